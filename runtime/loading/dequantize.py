"""Quantised GGUF tensors as float32, by the `gguf` package. It is imported with the first GGUF file."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def ggml_types() -> dict[int, tuple[str, int, int]]:
    """The types that `dequantize` knows, by their numbers: name, weights in one block, bytes of one block."""
    from gguf import GGML_QUANT_SIZES, quants

    types = {}
    for kind, (block, block_bytes) in GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError):
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            types[int(kind)] = kind.name, block, block_bytes
    return types


def dequantize(raw: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """The weights of whole rows of blocks: raw [num_rows, row_bytes] -> float32 [num_rows, row_len]."""
    from gguf import GGMLQuantizationType, quants

    weights: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType[type_name])
    return weights
