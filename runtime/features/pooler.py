"""Pooler: vectors for prompts, from a step's hidden states.

A pooled prompt ends with a sample, so every step program has its last token's state. A mean needs all
tokens' states. They are added up chunk after chunk in float64. There sums of such short numbers are exact, so they do
not depend on how a prompt is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.base.model.pooling import Pooling
from runtime.base.model_info import ModelInfo
from runtime.base.reports import Vector
from runtime.core.plan import NewSlot, StepPlan, StepResult, last_tokens
from runtime.models.decoder import Decoder
from runtime.worker.extras import Needs, RunnerParts, StepWork, Take
from runtime.worker.sources import ModelSource


class Pooler:
    """A StepExtra: the vectors of the slots with pooled prompts."""

    def __init__(
        self, decoder: Decoder, num_slots: int, pooling: Pooling | None, classifier: torch.Tensor | None = None
    ) -> None:
        """`classifier` [num_labels, hidden] float32 makes scores of a hidden state. Without `pooling` there is nothing
        to do."""
        self.decoder, self.pooling, self.classifier = decoder, pooling, classifier
        self._wanted = ""  # the setting `pooling`
        self.sums: torch.Tensor | None = None  # [num_slots, hidden] sums over the chunks; None unless means are made
        if pooling is not None and pooling.kind == "mean":
            shape = num_slots, decoder.spec.hidden_size
            self.sums = torch.zeros(shape, dtype=torch.float64, device=decoder.numerics.device)
        self._is_pooled = np.zeros(num_slots, bool)
        self._num_pooled = 0

    @classmethod
    def of(cls, parts: RunnerParts) -> Pooler:
        """For a runner's model and its setting `pooling`."""
        source, wanted = parts.source, parts.config.pooling
        classifier = source.classifier(wanted, parts.decoder.numerics.device)
        pooler = cls(parts.decoder, parts.num_slots, source.pooling(wanted), classifier)
        pooler._wanted = wanted
        return pooler

    def read_weights(self, source: ModelSource, take: Take) -> None:
        """Read the classifier again, after an update of the weights."""
        if self.classifier is not None:
            new = source.classifier(self._wanted, self.decoder.numerics.device)
            self.classifier = take(self.classifier, new)

    def describe(self, info: ModelInfo) -> ModelInfo:
        return replace(info, pooling=self.pooling)

    def reset(self) -> None:
        self._is_pooled[:] = False
        self._num_pooled = 0

    def add(self, new: NewSlot) -> None:
        self.remove(new.slot)
        if new.params.pooled:
            self._is_pooled[new.slot] = True
            self._num_pooled += 1

    def remove(self, slot: int) -> None:
        self._num_pooled -= int(self._is_pooled[slot])
        self._is_pooled[slot] = False

    def needs(self, plan: StepPlan) -> Needs:
        if not self._num_pooled:
            return Needs.NOTHING
        rows = self._is_pooled[plan.slots]
        if self.sums is not None and rows.any():
            return Needs.ALL_STATES
        return Needs.SAMPLED_STATES if (rows & (plan.num_samples > 0)).any() else Needs.NOTHING

    def begin(self, plan: StepPlan) -> None:
        pass

    def run(self, work: StepWork) -> None:
        if not self._num_pooled:
            return
        self._accumulate(work)
        rows, _ = last_tokens(work.plan, work.plan.num_samples)
        found = np.flatnonzero(self._is_pooled[work.plan.slots[rows]]).astype(np.int32)  # sample numbers
        if not found.size:
            return
        states = work.sampled_states.index_select(0, work.copies.upload(found))
        vectors = work.copies.download(self._pool(states, work, found))

        def report(result: StepResult) -> None:
            result.reports += zip(rows[found].tolist(), (Vector(v.tobytes()) for v in vectors.numpy()), strict=True)

        work.reports.append(report)

    def _accumulate(self, work: StepWork) -> None:
        """Add up the states of pooled rows."""
        if self.sums is None or work.last is None:
            return
        plan = work.plan
        rows = zip(*(a.tolist() for a in (plan.slots, plan.num_computed, plan.num_tokens, work.last)), strict=True)
        for slot, start, count, end in rows:
            if self._is_pooled[slot]:
                total = self.decoder.normed(work.hidden[end - count + 1 : end + 1]).sum(0, dtype=torch.float64)
                self.sums[slot] = total if start == 0 else self.sums[slot] + total

    def _pool(self, states: torch.Tensor, work: StepWork, found: Int32s) -> torch.Tensor:
        """Vectors [n, width] float32, from the states [n, hidden] of n prompts' last tokens."""
        if self.sums is None:
            vectors = self.decoder.normed(states).float()
        else:
            # The sample's position is the prompt's length.
            at = work.copies.upload(work.slots[found].astype(np.int64))
            counts = work.copies.upload(work.positions[found].astype(np.int64))
            vectors = (self.sums.index_select(0, at) / counts[:, None]).float()
        if self.classifier is None:
            return vectors
        return (vectors[:, None] * self.classifier).sum(-1)  # a row's order of additions does not depend on other rows
