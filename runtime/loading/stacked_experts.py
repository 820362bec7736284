"""Tensors of all experts of a layer, as transformers 5 stores them, are read as a weight of each expert E.

- `X.experts.gate_up_proj` [num_experts, 2 * ffn, hidden]: `X.experts.E.gate_proj.weight`, `X.experts.E.up_proj.weight`.
- `X.experts.down_proj` [num_experts, hidden, ffn]: `X.experts.E.down_proj.weight`.

Scales of blocks have the same names with a suffix, such as `X.experts.down_proj_scale_inv`.

Granite has `X.block_sparse_moe.input_linear.weight` and `output_linear.weight` in their place."""

from __future__ import annotations

import re
from typing import NamedTuple

_GRANITE = re.compile(r"(.*\bblock_sparse_moe)\.(input|output)_linear\.weight")
_STACKED = re.compile(r"(.*\bexperts)\.(gate_up|down)_proj(_scale_inv)?")


class Place(NamedTuple):
    """The rows of one expert in a tensor of all experts."""

    expert: int
    start: int
    stop: int


def single_weights(name: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """Return the weights in a tensor of all experts, by their own names; {} for another tensor."""
    if granite := _GRANITE.fullmatch(name):
        name = f"{granite[1]}.experts.{'gate_up' if granite[2] == 'input' else 'down'}_proj"
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3 or (match[2] == "gate_up" and shape[1] % 2):
        return {}
    prefix, part, suffix = match.groups("")
    parts = {"down_proj": (0, shape[1])}
    if part == "gate_up":
        parts = {"gate_proj": (0, shape[1] // 2), "up_proj": (shape[1] // 2, shape[1])}
    return {
        f"{prefix}.{expert}.{own}.weight{suffix}": Place(expert, *rows)
        for expert in range(shape[0])
        for own, rows in parts.items()
    }
