"""PromptScorer: log-probabilities for the tokens that a request brings: its prompt, and an output to be scored.

The token after a row's token is known while it is a given one, so only its logits are missing. They are made for a
slice of the step's tokens at a time: a whole prompt's logits can be larger than the model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from runtime.base.model_info import ModelInfo
from runtime.base.reports import PromptScores
from runtime.core.plan import NewSlot, StepPlan, StepResult
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.models.decoder import Decoder
from runtime.worker.extras import Needs, RunnerParts, StepWork
from runtime.worker.memory import MIN_LOGIT_ROWS
from runtime.worker.ranks.split_logits import SplitLogits


class _ScoredRow(NamedTuple):
    """A row of a scored prompt."""

    number: int  # index in the plan
    slot: int
    start: int
    num_targets: int  # scored tokens: the successors of its own tokens, up to the last given one
    num_top: int


class PromptScorer:
    """A StepExtra: log-probabilities for the slots with scored prompts.

    It uses sampling's memory: a slice has the largest batch's rows, or MIN_LOGIT_ROWS (memory.py)."""

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
        return Needs.ALL_STATES if self._scored_rows(plan) else Needs.NOTHING

    def begin(self, plan: StepPlan) -> None:
        pass

    def run(self, work: StepWork) -> None:
        if not (rows := self._scored_rows(work.plan)):
            return
        scores = self._score(work, rows) if any(row.num_targets for row in rows) else ()
        columns = [work.copies.download(column) for column in scores] or [torch.empty(0, 0)] * 4

        def report(result: StepResult) -> None:
            end = 0
            for row in rows:
                begin, end = end, end + row.num_targets
                ranks, logprobs, *top = (column[begin:end].numpy() for column in columns)
                parts = ranks, logprobs, *(column[:, : row.num_top] for column in top)
                result.reports.append((row.number, PromptScores(*(part.tobytes() for part in parts))))

        work.reports.append(report)

    def _scored_rows(self, plan: StepPlan) -> list[_ScoredRow]:
        """Return the rows with given tokens. A row without further given tokens lacks targets."""
        if not self.prompts:
            return []
        rows = []
        columns = zip(*(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens)), strict=True)
        for number, (slot, start, count) in enumerate(columns):
            num_given, num_top = self.prompts.get(slot, (0, 0))
            if start < num_given:
                rows.append(_ScoredRow(number, slot, start, min(start + count, num_given - 1) - start, num_top))
        return rows

    def _score(self, work: StepWork, rows: list[_ScoredRow]) -> list[torch.Tensor]:
        """Return the columns of PromptScores for all targets, at least one."""
        assert work.last is not None, "`needs` wants all states"
        parts = []  # [2, n]: indices of states to predict from, and places of the tokens that follow
        for row in rows:
            begin = work.last[row.number] + 1 - work.plan.num_tokens[row.number]
            first = np.array([[begin], [row.slot * work.stride + row.start + 1]])
            parts.append(first + np.arange(row.num_targets))
        where = work.copies.upload(np.concatenate(parts, 1).astype(np.int32))
        num_top = max(row.num_top for row in rows)
        slices = []
        for states, follow in zip(*(w.split(self.slice_len) for w in where), strict=True):
            logits = self.split.whole(self.decoder.logits(work.hidden.index_select(0, states)).float())
            slices.append(token_logprobs(logits, work.tokens.index_select(0, follow).long(), num_top))
        own, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*slices, strict=True))
        return [ranks.int(), own, top_ids.int(), top]
