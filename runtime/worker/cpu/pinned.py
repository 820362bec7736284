"""Pinned acceptance of a plan's draft tokens, for benchmarks and their tests (kernels/sampling/pinned.py)."""

from __future__ import annotations

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.core.plan import StepPlan, last_tokens
from runtime.kernels.sampling.pinned import pin_samples_torch
from runtime.kernels.step.draft_rows import DRAFT_WIDTH


def pin_plan(
    plan: StepPlan, token_ids: torch.Tensor, slots: Int32s, positions: Int32s, num_slots: int, mean: float
) -> None:
    """Replace samples [n] by the plan's draft tokens that are accepted."""
    if not len(plan.draft_token_ids):
        return
    drafts = np.full((num_slots, DRAFT_WIDTH), -1, np.int32)
    rows, at = last_tokens(plan, plan.draft_lens)
    drafts[plan.slots[rows], at % DRAFT_WIDTH] = plan.draft_token_ids
    own = torch.from_numpy(slots.astype(np.int32)), torch.from_numpy(positions.astype(np.int32))
    pin_samples_torch(token_ids, *own, None, torch.from_numpy(drafts), mean)
