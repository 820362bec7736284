"""Pooler: vectors of prompts, from the hidden states of a step.

A pooled prompt ends with a sample, so that every way to run a step, graphs among them, has the state of its last token
at hand already. A mean needs the states of all tokens: it is summed up chunk after chunk, in float64, where the sums of
so few digits are exact and do not show how a prompt was cut."""

from __future__ import annotations

import numpy as np
import torch

from runtime.core.plan import EMPTY, Int32s, NewSlot, StepPlan, last_tokens
from runtime.models.decoder import Decoder
from runtime.spec.pooling import Pooling


class Pooler:
    """The slots whose prompts are pooled."""

    def __init__(
        self, decoder: Decoder, num_slots: int, pooling: Pooling | None, classifier: torch.Tensor | None = None
    ) -> None:
        """`classifier` [num_labels, hidden] float32 makes scores of a hidden state."""
        self.decoder, self.classifier = decoder, classifier
        self.sums: torch.Tensor | None = None  # [num_slots, hidden] of the chunks so far; None: no mean is wanted
        if pooling is not None and pooling.kind == "mean":
            shape = num_slots, decoder.spec.hidden_size
            self.sums = torch.zeros(shape, dtype=torch.float64, device=decoder.numerics.device)
        self._is_pooled = np.zeros(num_slots, bool)
        self._num_pooled = 0

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.remove(new.slot)
        if new.params.pooled:
            self._is_pooled[new.slot] = True
            self._num_pooled += 1

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        self._num_pooled -= int(self._is_pooled[slot])
        self._is_pooled[slot] = False

    def find(self, plan: StepPlan) -> Int32s:
        """Which of the plan's samples are in place of vectors."""
        if not self._num_pooled:
            return EMPTY
        rows, _ = last_tokens(plan, plan.num_samples)
        return np.flatnonzero(self._is_pooled[plan.slots[rows]]).astype(np.int32)

    def wants_all(self, plan: StepPlan) -> bool:
        """True if the plan has a row all of whose hidden states are wanted."""
        return self.sums is not None and bool(self._num_pooled and self._is_pooled[plan.slots].any())

    def accumulate(self, hidden: torch.Tensor, plan: StepPlan, last: np.ndarray) -> None:
        """Add up the states of pooled rows, of the step's [num_tokens, hidden]; `last` tells where each row's last one
        is."""
        if self.sums is None or not self.wants_all(plan):
            return
        rows = zip(*(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, last)), strict=True)
        for slot, start, count, end in rows:
            if self._is_pooled[slot]:
                total = self.decoder.normed(hidden[end - count + 1 : end + 1]).sum(0, dtype=torch.float64)
                self.sums[slot] = total if start == 0 else self.sums[slot] + total

    def pool(self, hidden: torch.Tensor, slots: Int32s, positions: Int32s) -> torch.Tensor:
        """[n, width] float32 of n prompts, whose last tokens' states [n, hidden] these are, at these positions."""
        if self.sums is None:
            vectors = self.decoder.normed(hidden).float()
        else:
            device = self.sums.device
            at, counts = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (slots, positions + 1))
            vectors = (self.sums.index_select(0, at) / counts[:, None]).float()
        if self.classifier is None:
            return vectors
        return (vectors[:, None] * self.classifier).sum(-1)  # a row's order of sums is the same among any others
