"""ExpertRecorder: the experts that a mixture chose for a step's tokens.

The routers of all layers record their choices while a step with such a request is computed. Other steps record nothing,
and graphs cannot, so these steps run kernel by kernel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from runtime.base.model_info import ModelInfo
from runtime.base.reports import Experts
from runtime.core.plan import NewSlot, StepPlan, StepResult
from runtime.kernels.experts.moe_torch import Router
from runtime.models.decoder import Decoder, Mlp
from runtime.worker.extras import Needs, RunnerParts, StepWork


class ExpertRecorder:
    """A StepExtra: the experts of tokens in the slots that report them."""

    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        self.decoder, self.experts = decoder, decoder.spec.experts
        self._reports = np.zeros(num_slots, bool)
        self._num_reporting = 0
        self._is_recording = False

    @classmethod
    def of(cls, parts: RunnerParts) -> ExpertRecorder:
        """For a runner's model."""
        return cls(parts.decoder, parts.num_slots)

    def describe(self, info: ModelInfo) -> ModelInfo:
        if self.experts is None:
            return info
        return replace(info, routed_experts=(len(self._routers()), self.experts.top_k))

    def reset(self) -> None:
        self._reports[:] = False
        self._num_reporting = 0

    def add(self, new: NewSlot) -> None:
        self.remove(new.slot)
        if new.params.routed_experts:
            self._reports[new.slot] = True
            self._num_reporting += 1

    def remove(self, slot: int) -> None:
        self._num_reporting -= int(self._reports[slot])
        self._reports[slot] = False

    def needs(self, plan: StepPlan) -> Needs:
        wants = self._num_reporting and self._reports[plan.slots].any()
        return Needs.ALL_STATES if wants else Needs.NOTHING

    def begin(self, plan: StepPlan) -> None:
        wants = self.needs(plan) is Needs.ALL_STATES
        if wants or self._is_recording:  # the step before may have failed within
            self._record(wants)

    def run(self, work: StepWork) -> None:
        if not self._is_recording or work.last is None or self.experts is None:
            return
        plan, tokens, last = work.plan, len(work.hidden), work.last
        rows = np.flatnonzero(self._reports[plan.slots])
        places = [np.arange(last[row] + 1 - plan.num_tokens[row], last[row] + 1) for row in rows]
        index = work.copies.upload(np.concatenate(places).astype(np.int64))
        chosen = (torch.cat(router.record or []).view(tokens, -1) for router in self._routers())
        ids = [each.index_select(0, index)[:, : self.experts.top_k] for each in chosen]  # the shared ones are left out
        found = work.copies.download(torch.stack(ids, 1).to(torch.int16))
        self._record(False)

        def report(result: StepResult) -> None:
            parts = np.split(found.numpy(), np.cumsum(plan.num_tokens[rows])[:-1])
            result.reports += zip(rows.tolist(), (Experts(part.tobytes()) for part in parts), strict=True)

        work.reports.append(report)

    def _record(self, wants: bool) -> None:
        self._is_recording = wants
        for router in self._routers():
            router.record = [] if wants else None

    def _routers(self) -> list[Router]:
        """The routers by layer. A weight update may replace a decoder's layers."""
        return [layer.feed_forward.router for layer in self.decoder.layers if not isinstance(layer.feed_forward, Mlp)]
