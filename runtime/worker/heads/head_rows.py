"""The rows of a head's passes, from its target's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.core.plan import StepPlan, last_tokens

IntArray = NDArray[np.integer[Any]]


class Tokens(NamedTuple):
    """The tokens of rows, row after row."""

    rows: NDArray[np.int64]  # [num_tokens] index of each token's row
    positions: NDArray[np.int64]  # [num_tokens]


def tokens_of(starts: IntArray, counts: IntArray) -> Tokens:
    """Return the tokens of rows with these first positions and sizes, [num_rows] each."""
    rows = np.repeat(np.arange(len(counts)), counts)
    first = starts - (np.cumsum(counts) - counts)
    return Tokens(rows, np.arange(len(rows)) + first[rows])


class ExtendRows(NamedTuple):
    """Rows that write a head's entries: for each row of the target, the positions after its tokens."""

    rows: NDArray[np.int64]  # [n] rows of the plan with a position to write
    plan: StepPlan  # these rows, without samples
    continued: NDArray[np.bool_]  # [n] true if the first position's feature is that of the prefix's last block


def extend_rows(plan: StepPlan, is_new: NDArray[np.bool_], block_size: int, max_model_len: int) -> ExtendRows:
    """Return the rows for the target's positions, shifted by one. A row ends at `max_model_len`.

    The first row of a slot (`is_new`) that continues cached blocks also has their next position."""
    starts, ends = plan.num_computed, plan.ends
    continued = is_new[plan.slots] & (starts > 0) & (starts % block_size == 0)
    begins = starts + 1 - continued
    counts = np.minimum(ends + 1, max_model_len) - begins
    rows = np.flatnonzero(counts > 0)
    columns = (plan.slots[rows], begins[rows], counts[rows], np.zeros(len(rows)))
    slots, computed, tokens, samples = (column.astype(np.int32) for column in columns)
    shifted = StepPlan(plan.step_id, slots=slots, num_computed=computed, num_tokens=tokens, num_samples=samples)
    return ExtendRows(rows, shifted, continued[rows])


class Accepted(NamedTuple):
    """The last samples that count, of rows that may have drafts after them."""

    rows: NDArray[np.int64]  # [n] rows of the plan
    positions: Int32s  # [n] position of the sample


def accepted_samples(plan: StepPlan, draft_token_ids: Int32s, token_ids: Int32s) -> Accepted:
    """Return each row's last sample after draft tokens that agree with the samples before it.

    Rows without samples are left out, and so are rows with a failed last sample. `draft_token_ids` has -1 for missing
    ones."""
    num_samples = plan.num_samples.astype(np.int64)
    lens = plan.draft_lens.astype(np.int64) if len(plan.draft_lens) else np.zeros_like(num_samples)
    begins, most = np.cumsum(num_samples) - num_samples, int(lens.max(initial=0))
    last = begins + num_samples - 1 - lens  # the sample that the first draft token is compared with
    agrees = np.zeros((len(lens), most), np.int64)
    if most:
        rows, positions = last_tokens(plan, lens.astype(np.int32))
        within = positions - (plan.ends - lens)[rows]
        agrees[rows, within] = (draft_token_ids == token_ids[last[rows] + within]) & (draft_token_ids >= 0)
    counts = agrees.cumprod(1).sum(1)
    sampling = np.flatnonzero(num_samples > 0)
    valid = sampling[token_ids[(last + counts)[sampling]] >= 0]
    return Accepted(valid, (plan.ends - lens + counts)[valid].astype(np.int32))
