"""PromptScorer: log-probabilities of the tokens that a request brings: its prompt, and an output to be scored.

The token after a row's token is known while it is a given one, so only its logits are missing. They are made for a
slice of the step's tokens at a time: the logits of a whole prompt can be larger than the model.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.base.config import ModelInfo
from runtime.core.plan import EMPTY, NewSlot, StepPlan, num_targets
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.models.decoder import Decoder
from runtime.worker.extras import Needs, RunnerParts, StepWork
from runtime.worker.logprobs import Logprobs
from runtime.worker.memory import MIN_LOGIT_ROWS
from runtime.worker.ranks.split_logits import SplitLogits


class PromptScorer:
    """A StepExtra: log-probabilities for the slots with scored prompts.

    Its memory is that of sampling: a slice has the rows of the largest batch, or MIN_LOGIT_ROWS (memory.py)."""

    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        self.decoder = decoder
        self.split = SplitLogits(decoder.spec.whole.vocab_size, decoder.communicator)
        self.slice_len = max(num_slots, MIN_LOGIT_ROWS)
        self.prompts: dict[int, tuple[int, int]] = {}  # slot -> given tokens, alternatives to report

    @classmethod
    def of(cls, parts: RunnerParts) -> PromptScorer:
        """For a runner's model."""
        return cls(parts.decoder, parts.num_slots)

    def describe(self, info: ModelInfo) -> ModelInfo:
        return info

    def reset(self) -> None:
        self.prompts.clear()

    def add(self, new: NewSlot) -> None:
        self.remove(new.slot)
        if new.params.prompt_logprobs is not None:
            self.prompts[new.slot] = max(new.prompt_len, len(new.token_ids)), new.params.prompt_logprobs

    def remove(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    def needs(self, plan: StepPlan) -> Needs:
        if self.prompts:
            for slot, start in zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True):
                if slot in self.prompts and num_targets(start, 1, self.prompts[slot][0]):
                    return Needs.ALL_STATES
        return Needs.NOTHING

    def begin(self, plan: StepPlan) -> None:
        pass

    def run(self, work: StepWork) -> None:
        if self.prompts and work.last is not None and (where := self._find(work, work.last)).size:
            found = self._score(work.hidden, work.tokens, work.copies.upload(where))
            work.reports.append(found.downloaded(work.copies.download).report)

    def _find(self, work: StepWork, last: np.ndarray) -> Int32s:
        """[2, n], row after row: the indices of hidden states to predict from, and the places of the tokens that
        follow there, `slot * stride + position`."""
        parts: list[np.ndarray] = []
        plan = work.plan
        rows = zip(*(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, last)), strict=True)
        for slot, start, count, end in rows:
            if slot in self.prompts and (n := num_targets(start, count, self.prompts[slot][0])):
                first = np.array([[end - count + 1], [slot * work.stride + start + 1]])
                parts.append(first + np.arange(n))
        return np.concatenate(parts, 1).astype(np.int32) if parts else EMPTY.reshape(2, 0)

    def _score(self, hidden: torch.Tensor, tokens: torch.Tensor, where: torch.Tensor) -> Logprobs:
        """The log-probabilities of n tokens; `where` [2, n] int32 comes from `_find`."""
        num_top = max(n for _, n in self.prompts.values())
        slices = []
        for rows, follow in zip(*(w.split(self.slice_len) for w in where), strict=True):
            logits = self.split.whole(self.decoder.logits(hidden.index_select(0, rows)).float())
            slices.append(token_logprobs(logits, tokens.index_select(0, follow).long(), num_top))
        own, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*slices, strict=True))
        return Logprobs(EMPTY, top.shape[1], ranks, own, top_ids, top)
