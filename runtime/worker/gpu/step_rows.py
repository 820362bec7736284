"""MixedShape: the rows of a step with prompts as one int array, for launched steps and for graphs.

    rows of one token | longer rows | samples, in the plan's order
    slots, starts, q_starts of the rows; token before each sample, slot and position of the samples

A launched step has exactly its plan's rows. A graph has room for more:

- Unused rows and samples belong to the null slot; unused rows are empty.
- Padding tokens belong to the last row, which plans do not use. They are the null slot's first positions, so that
  their keys and values go to the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.core.plan import EMPTY, EMPTY_TABLE, StepPlan, last_tokens

RowArray = TypeVar("RowArray", Int32s, torch.Tensor)


class MixedShape(NamedTuple):
    """The size of a step with prompts and decoding rows; for a graph, the most that it has room for."""

    num_tokens: int
    num_short: int  # rows with one token; they come first
    num_long: int  # other rows
    num_samples: int
    max_count: int  # tokens in the longest row
    max_len: int  # positions that a row's last token sees, at most

    @classmethod
    def of(cls, plan: StepPlan) -> MixedShape:
        """The exact size of a plan."""
        num_short, num_samples = int((plan.num_tokens == 1).sum()), int(plan.num_samples.sum())
        num_long, max_count, max_len = len(plan.slots) - num_short, int(plan.num_tokens.max()), int(plan.ends.max())
        return cls(int(plan.num_tokens.sum()), num_short, num_long, num_samples, max_count, max_len)

    @property
    def num_rows(self) -> int:
        return self.num_short + self.num_long

    @property
    def num_ints(self) -> int:
        """Length of the packed rows."""
        return 3 * self.num_rows + 1 + 3 * self.num_samples

    def has_room(self, own: MixedShape) -> bool:
        """True if a plan with shape `own` fits before a last row for padding."""
        has_rows = own.num_short <= self.num_short and own.num_long < self.num_long
        return has_rows and own.num_tokens <= self.num_tokens and own.num_samples <= self.num_samples

    def split(self, rows: RowArray) -> list[RowArray]:
        """Split packed rows: the rows' slots, starts and q_starts [num_rows + 1]. The last three arrays belong to the
        samples: the token before each, slots, positions."""
        n, s = self.num_rows, self.num_samples
        sizes = n, n, n + 1, s, s, s
        return [rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def pack(self, plan: StepPlan, null_slot: int) -> Int32s:
        """The plan's rows, and the padding of this shape."""
        packed = np.zeros(self.num_ints, np.int32)
        slots, starts, q_starts, sampled, sampled_slots, positions = self.split(packed)
        slots[:] = sampled_slots[:] = null_slot
        order, num_short = short_first(plan), int((plan.num_tokens == 1).sum())
        at = np.arange(len(order))
        at[num_short:] += self.num_short - num_short
        slots[at], starts[at] = plan.slots[order], plan.num_computed[order]
        counts = np.zeros(self.num_rows, np.int32)
        counts[at] = plan.num_tokens[order]
        counts[-1] += self.num_tokens - counts.sum()
        np.cumsum(counts, out=q_starts[1:])
        rows, sampled_after = last_tokens(plan, plan.num_samples)
        n = len(rows)
        sampled[:n] = token_offsets(plan)[rows] + sampled_after
        sampled_slots[:n], positions[:n] = plan.slots[rows], sampled_after + 1
        return packed

    def sample_places(self, plan: StepPlan) -> np.ndarray:
        """The numbers of the samples that the plan wants, in the plan's order."""
        return np.arange(int(plan.num_samples.sum()))


def cut(plan: StepPlan, sizes: Sequence[int]) -> list[StepPlan]:
    """Cut a plan's rows into pieces with these numbers of tokens, which run one after another. The pieces do not
    carry the plan's changes to slots and tables."""
    ends = np.cumsum(plan.num_tokens)
    firsts, pieces = ends - plan.num_tokens, []
    for begin, end in pairwise((0, *accumulate(sizes))):
        low, high = np.clip(firsts, begin, None), np.clip(ends, None, end)
        num_samples = np.clip(high - np.maximum(low, ends - plan.num_samples), 0, None)
        columns, here = (plan.slots, plan.num_computed + low - firsts, high - low, num_samples), high > low
        pieces.append(StepPlan(plan.step_id, EMPTY, [], EMPTY_TABLE, *(c[here].astype(np.int32) for c in columns)))
    return pieces


def token_offsets(plan: StepPlan) -> Int32s:
    """[num_rows] the index in the step at which each row's token at position 0 would be, in the plan's order."""
    order = short_first(plan)
    counts = plan.num_tokens[order]
    offsets = np.empty(len(order), np.int32)
    offsets[order] = np.cumsum(counts) - counts - plan.num_computed[order]
    return offsets


def short_first(plan: StepPlan) -> np.ndarray:
    """The order of a plan's rows in a step with prompts."""
    return np.argsort(plan.num_tokens > 1, kind="stable")
