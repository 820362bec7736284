"""A tensor with all a layer's experts is read as one weight for each expert E.

Transformers 5 stores, for most families:

- `X.experts.gate_up_proj` [experts, 2 * ffn, hidden]: `X.experts.E.gate_proj.weight`, `X.experts.E.up_proj.weight`.
- `X.experts.down_proj` [experts, hidden, ffn]: `X.experts.E.down_proj.weight`.

Block scales have the same names with a suffix, such as `X.experts.down_proj_scale_inv`. Granite has
`X.block_sparse_moe.input_linear.weight` and `output_linear.weight` in their place.

gpt-oss has gate and up rows in turn (`in_turn`), gate first. Its dense tensors are [experts, in, out]. Its others
have suffixes: `_bias` [experts, out], `_blocks` [experts, out, in / 32, 16] and mxfp4's `_scales`.

Published Qwen3-VL-MoEs have [experts, in, out] too, gate columns first. Only the hidden size shows it, because
transformers saves them like most families. As there, a square weight is read as [out, in]."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

_GRANITE = re.compile(r"(.*\bblock_sparse_moe)\.(input|output)_linear\.weight")
_STACKED = re.compile(r"(.*\bexperts)\.(gate_up|down)_proj(_scale_inv|_blocks|_scales|_bias)?")
_IN_TURN = {"_bias": ".bias", "_blocks": ".weight_blocks", "_scales": ".weight_scales"}  # gpt-oss's suffixes
_NUM_DIMS = {"_bias": 2, "_blocks": 4}


class Place(NamedTuple):
    """One expert's rows in a tensor with all experts."""

    expert: int
    start: int
    stop: int
    step: int = 1
    transposed: bool = False  # the tensor has [in, out] for each expert

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the rows."""
        return self.rows(tensor[self.expert])

    def rows(self, own: torch.Tensor) -> torch.Tensor:
        """Return a view of the rows in the expert's part of the tensor."""
        return (own.t() if self.transposed else own)[self.start : self.stop : self.step]

    def shape(self, stacked: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows' shape in a tensor with this shape."""
        shape = stacked[:0:-1] if self.transposed else stacked[1:]
        return (len(range(self.start, self.stop, self.step)), *shape[1:])


def single_weights(name: str, shape: tuple[int, ...], in_turn: bool = False, hidden: int = 0) -> dict[str, Place]:
    """Return the weights in a tensor of all experts, by their own names; {} for another tensor.

    `hidden` is the model's hidden size, or 0 if it is unknown."""
    if granite := _GRANITE.fullmatch(name):
        name = f"{granite[1]}.experts.{'gate_up' if granite[2] == 'input' else 'down'}_proj"
    match = _STACKED.fullmatch(name)
    if match is None:
        return {}
    prefix, part, suffix = match.groups("")
    if len(shape) != _NUM_DIMS.get(suffix, 3) or (suffix in _IN_TURN and not in_turn):
        return {}
    inputs, outputs = (2, 1) if part == "gate_up" else (1, 2)  # dimensions with and without `hidden`
    transposed = not suffix and (in_turn or shape[inputs] != hidden == shape[outputs])
    rows = shape[2] if transposed else shape[1]
    if part == "gate_up" and rows % 2:
        return {}
    parts = {"down_proj": (0, rows, 1)}
    if part == "gate_up":
        halves = ((0, rows, 2), (1, rows, 2)) if in_turn else ((0, rows // 2, 1), (rows // 2, rows, 1))
        parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
    ending = _IN_TURN.get(suffix, f".weight{suffix}")
    return {
        f"{prefix}.{expert}.{own}{ending}": Place(expert, *at, transposed)
        for expert in range(shape[0])
        for own, at in parts.items()
    }
