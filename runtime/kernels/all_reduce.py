"""Sums over the ranks of a tensor-parallel group, which every rank takes for itself from all ranks' partial results."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_partials_torch(partials: Sequence[torch.Tensor], tree: bool = False) -> torch.Tensor:
    """The sum in float32 of several ranks' partials, by rank: in their order, or as a binary tree, whose sums of 2, 4
    and 8 ranks are those of one rank that adds up eight partials in the same tree."""
    sums = [partial.float() for partial in partials]
    if not tree:
        total = sums[0] + sums[1]
        for partial in sums[2:]:
            total += partial
        return total
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [left + right for left, right in pairs] + sums[len(sums) & ~1 :]
    return sums[0]
