"""HeldWeight: rows of a weight on the device, on their way from a checkpoint to kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from runtime.quant.weight_format import DENSE, Tensors, WeightFormat


class HeldWeight(NamedTuple):
    """Consecutive rows in one format: one parameter as it was read, or several joined ones."""

    names: tuple[str, ...]  # its parameters
    weight_format: WeightFormat
    tensors: Tensors  # each has a row for a weight row or a block

    @property
    def dense(self) -> torch.Tensor:
        """The numbers of a weight in a dense format."""
        (numbers,) = self.tensors
        return numbers

    @property
    def num_rows(self) -> int:
        return len(self.tensors[0])

    @property
    def operand(self) -> Any:
        """What kernels multiply with."""
        return self.weight_format.operand([self.tensors], self.num_rows)

    def split(self, sizes: Sequence[int]) -> list[HeldWeight]:
        """Cut the rows into pieces of these sizes, each in its own memory.

        So pieces are aligned: a library's sums may depend on alignment."""
        total = sum(sizes)
        pieces = [tensor.split([size * len(tensor) // total for size in sizes]) for tensor in self.tensors]
        return [self._replace(tensors=tuple(map(torch.clone, same))) for same in zip(*pieces, strict=True)]


def held_dense(name: str, numbers: torch.Tensor) -> HeldWeight:
    """A dense weight."""
    return HeldWeight((name,), DENSE, (numbers,))


def joined(weights: Sequence[HeldWeight], row_order: torch.Tensor | None = None) -> list[HeldWeight]:
    """Join neighbours in matching formats. The first rows are reordered if an order is given."""
    groups, found, at = list[list[HeldWeight]](), list[HeldWeight](), 0
    for weight in weights:
        if groups and groups[-1][0].weight_format.joins(weight.weight_format):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    for group in groups:
        num_rows = sum(part.num_rows for part in group)
        own = None if row_order is None or at >= len(row_order) else row_order[at : at + num_rows] - at
        names, at = tuple(name for part in group for name in part.names), at + num_rows
        found.append(HeldWeight(names, group[0].weight_format, _stacked([part.tensors for part in group], own)))
    return found


def _stacked(weights: Sequence[Tensors], row_order: torch.Tensor | None) -> Tensors:
    """Stack the rows of several weights; then reorder the first rows."""
    stacked = tuple(same[0] if len(same) == 1 else torch.cat(same) for same in zip(*weights, strict=True))
    if row_order is None:
        return stacked
    if len(weights) == 1:
        return tuple(torch.cat((tensor[row_order], tensor[len(row_order) :])) for tensor in stacked)
    for tensor in stacked:
        tensor[: len(row_order)] = tensor[row_order]
    return stacked
