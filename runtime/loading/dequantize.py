"""Quantised GGUF tensors as float32, without torch: the block layouts of ggml-common.h in numpy.

A block is a few scales and the packed numbers that they scale. ggml packs all of them in one way, which `_unpack`
undoes: a run of bytes holds the first numbers of its part in its lowest bits, the next ones in the bits above.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]

_HALF = "<f2"
_LAYOUTS: dict[str, np.dtype] = {
    name: np.dtype(fields)
    for name, fields in {
        "Q4_0": [("d", _HALF), ("qs", "u1", 16)],
        "Q4_1": [("d", _HALF), ("m", _HALF), ("qs", "u1", 16)],
        "Q5_0": [("d", _HALF), ("qh", "u1", 4), ("qs", "u1", 16)],
        "Q5_1": [("d", _HALF), ("m", _HALF), ("qh", "u1", 4), ("qs", "u1", 16)],
        "Q8_0": [("d", _HALF), ("qs", "i1", 32)],
        "Q2_K": [("scales", "u1", 16), ("qs", "u1", 64), ("d", _HALF), ("m", _HALF)],
        "Q3_K": [("qh", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", _HALF)],
        "Q4_K": [("d", _HALF), ("m", _HALF), ("scales", "u1", 12), ("qs", "u1", 128)],
        "Q5_K": [("d", _HALF), ("m", _HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
        "Q6_K": [("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", _HALF)],
    }.items()
}


def dequantize(raw: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """The weights of whole rows of blocks: raw [num_rows, row_bytes] -> float32 [num_rows, row_len].

    Bit for bit what ggml and its Python package make of them."""
    raw = np.ascontiguousarray(raw)
    match type_name:
        case "F32":
            return raw.view("<f4")
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return _weights(raw.reshape(-1).view(_LAYOUTS[type_name]), type_name).reshape(len(raw), -1)


def _weights(blocks: NDArray[np.void], type_name: str) -> NDArray[np.float32]:
    """[num_blocks] of a layout -> [num_blocks, weights of a block], in any shape."""
    d = blocks["d"].astype(np.float32)[:, None]
    m = blocks["m" if "m" in (blocks.dtype.names or ()) else "d"].astype(np.float32)[:, None]  # not every type has it
    qs = blocks["qs"]
    match type_name:
        case "Q8_0":
            return qs * d
        case "Q4_0":
            return _scaled(_unpack(qs, 16, 4).view(np.int8) - np.int8(8), d)
        case "Q4_1":
            return _scaled(_unpack(qs, 16, 4), d) + m
        case "Q5_0":
            return _scaled((_unpack(qs, 16, 4) | _fifth_bits(blocks["qh"])).view(np.int8) - np.int8(16), d)
        case "Q5_1":
            return _scaled(_unpack(qs, 16, 4) | _fifth_bits(blocks["qh"]), d) + m
        case "Q2_K":
            packed = blocks["scales"]
            return _scaled(_unpack(qs, 32, 2), d * (packed & 15), m * (packed >> 4))
        case "Q3_K":
            low, high = blocks["scales"][:, :8], blocks["scales"][:, 8:]
            signed = (_unpack(low, 8, 4) | _unpack(high, 4, 2) << 4).view(np.int8) - np.int8(32)
            third = _unpack(blocks["qh"], 32, 1) << 2
            return _scaled((_unpack(qs, 32, 2) | third).view(np.int8) - np.int8(4), d * signed)
        case "Q4_K":
            scales, mins = _six_bit_pairs(blocks["scales"])
            return _scaled(_unpack(qs, 32, 4), d * scales, m * mins)
        case "Q5_K":
            scales, mins = _six_bit_pairs(blocks["scales"])
            return _scaled(_unpack(qs, 32, 4) | _unpack(blocks["qh"], 32, 1) << 4, d * scales, m * mins)
        case _:  # Q6_K
            quants = _unpack(qs, 64, 4) | _unpack(blocks["qh"], 32, 2) << 4
            return _scaled(quants.view(np.int8) - np.int8(32), d * blocks["scales"])


def _unpack(packed: NDArray[np.uint8], run: int, bits: int) -> NDArray[np.uint8]:
    """[n, num_bytes] -> [n, num_bytes * 8 / bits]: `run` bytes hold 8 / bits runs of numbers, lowest bits first."""
    runs = packed.reshape(len(packed), -1, run)
    out = np.empty((*runs.shape[:2], 8 // bits, run), np.uint8)
    for i in range(8 // bits):
        np.right_shift(runs, i * bits, out=out[:, :, i])
    out &= (1 << bits) - 1
    return out.reshape(len(packed), -1)


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, 4] bytes -> [n, 32] of 0 or 16; these lie in the order of the weights."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _six_bit_pairs(packed: NDArray[np.uint8]) -> tuple[Integers, Integers]:
    """[n, 12] bytes -> scales and minima of 8 sub-blocks, [n, 8] each.

    The first four scales are the low 6 bits of bytes 0-3, the first four minima those of bytes 4-7; of the others,
    bytes 8-11 have the low 4 bits and the top bits of bytes 0-7 the upper two."""
    scale, least, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales: Integers = np.concatenate([scale & 63, (rest & 15) | (scale >> 6) << 4], axis=1)
    minima: Integers = np.concatenate([least & 63, (rest >> 4) | (least >> 6) << 4], axis=1)
    return scales, minima


def _scaled(
    quants: Integers, scales: NDArray[np.float32], minima: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """quants [n, block]; scales and minima [n, number of sub-blocks], in each of which w = scale * q - minimum."""
    out = quants.reshape(*scales.shape, -1) * scales[:, :, None]
    if minima is not None:
        out -= minima[:, :, None]
    return out.reshape(len(quants), -1)
