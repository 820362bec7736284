"""Log-probabilities of prompts: which rows of a step have some to give, and their computation.

The token after a row's token is known while it lies in the prompt, so only its logits are missing. They are made for a
slice of the step's tokens at a time: those of a whole prompt would be larger than the model.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.core.plan import EMPTY, Int32s, NewSlot, StepPlan, num_targets
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.models.decoder import Decoder
from runtime.worker.cpu.sampler import Logprobs
from runtime.worker.ranks.split_logits import SplitLogits

MIN_SLICE = 64  # tokens


class PromptScorer:
    """The slots whose prompts are scored. It needs no more memory than sampling has: a slice is as long as the largest
    batch (memory.py plans for `MIN_SLICE` at least)."""

    def __init__(self, decoder: Decoder, num_slots: int, split: SplitLogits) -> None:
        self.decoder, self.split = decoder, split
        self.slice_len = max(num_slots, MIN_SLICE)
        self.prompts: dict[int, tuple[int, int]] = {}  # slot -> prompt length, alternatives to report

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.remove(new.slot)
        if new.params.prompt_logprobs is not None:
            self.prompts[new.slot] = new.prompt_len, new.params.prompt_logprobs

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        self.prompts.pop(slot, None)

    def is_wanted(self, plan: StepPlan) -> bool:
        """True if a row of the plan gives log-probabilities of a prompt."""
        rows = zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True) if self.prompts else ()
        return any(slot in self.prompts and num_targets(start, 1, self.prompts[slot][0]) for slot, start in rows)

    def find(self, plan: StepPlan, last: np.ndarray, stride: int) -> Int32s:
        """[2, n], row after row: which of the step's hidden states to predict from, and which of the slots' tokens, at
        `slot * stride + position`, follow there. `last` tells where each row's last hidden state is."""
        parts: list[np.ndarray] = []
        if self.prompts:
            rows = zip(*(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, last)), strict=True)
            for slot, start, count, end in rows:
                if slot in self.prompts and (n := num_targets(start, count, self.prompts[slot][0])):
                    first = np.array([[end - count + 1], [slot * stride + start + 1]])
                    parts.append(first + np.arange(n))
        return np.concatenate(parts, 1).astype(np.int32) if parts else EMPTY.reshape(2, 0)

    def score(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden] of the step
        tokens: torch.Tensor,  # the slots', flat, int32
        where: torch.Tensor,  # [2, n] int32, of `find`
    ) -> Logprobs:
        """The log-probabilities of the n tokens."""
        num_top = max(n for _, n in self.prompts.values())
        slices = []
        for rows, follow in zip(*(w.split(self.slice_len) for w in where), strict=True):
            logits = self.split.whole(self.decoder.logits(hidden.index_select(0, rows)).float())
            slices.append(token_logprobs(logits, tokens.index_select(0, follow).long(), num_top))
        own, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*slices, strict=True))
        return Logprobs(EMPTY, top.shape[1], ranks, own, top_ids, top)
