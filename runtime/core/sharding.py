"""How the ranks of a tensor-parallel group divide a parameter among themselves (Megatron-LM, arXiv 1909.08053).

The rule follows from what a parameter does, not from how it is stored: a weight format is told which parts of the
parameter a rank holds, and finds the same parts of its own tensors."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from runtime.core.decoder_spec import DecoderSpec
from runtime.core.types import CallboardError


class Sharding(Enum):
    """The share of a rank; weights of linear maps are [out, in]."""

    REPLICATED = "replicated"  # the whole parameter
    COLUMN = "column"  # some outputs: rows of the weight and of its bias
    ROW = "row"  # some inputs: columns of the weight. Results are summed over the ranks, then the bias is added once
    VOCABULARY = "vocabulary"  # some tokens: rows of the embedding and of the output head
    EXPERT_INNER = "expert-inner"  # some of each expert's intermediate values: rows of gate and up, columns of down


class Part(NamedTuple):
    """A range of one dimension of a parameter."""

    dim: int
    start: int
    stop: int


_DIVIDED_DIM = {"q": 0, "k": 0, "v": 0, "qkv": 0, "gate": 0, "up": 0, "gate_up": 0, "out": 1, "down": 1}


def sharding_of(parameter: str) -> Sharding:
    """The rule for a parameter of `DecoderSpec.shapes`."""
    *_, part, kind = ("", *parameter.split("."))
    if kind in ("embed", "head"):
        return Sharding.VOCABULARY
    if part not in _DIVIDED_DIM or (kind == "bias" and _DIVIDED_DIM[part] == 1):
        return Sharding.REPLICATED
    if ".experts." in parameter:
        return Sharding.EXPERT_INNER
    return Sharding.ROW if _DIVIDED_DIM[part] else Sharding.COLUMN


def parts_of(spec: DecoderSpec, parameter: str, rank: int, size: int) -> tuple[Part, ...]:
    """The part of a parameter that a rank of a group of `size` holds, as ranges in rising order; () is the whole.

    There are several where the checkpoint has maps fused into one tensor, each of which is divided by itself.
    Raises CallboardError if the group cannot divide the parameter evenly."""
    if size == 1 or sharding_of(parameter) is Sharding.REPLICATED:
        return ()
    part = parameter.split(".")[-2] if "." in parameter else parameter
    dim, q, kv = _DIVIDED_DIM.get(part, 0), spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    fused = {"qkv": (q, kv, kv), "gate_up": (spec.ffn_size, spec.ffn_size)}
    parts, start = [], 0
    for length in fused.get(part, (spec.shapes()[parameter][dim],)):
        if length % size:
            raise CallboardError(f"tensor_parallel_size is {size}, which does not divide the {length} of {parameter}.")
        share = length // size
        parts.append(Part(dim, start + rank * share, start + (rank + 1) * share))
        start += length
    return tuple(parts)
