"""Pooled prompts: requests that end with a vector of their prompt (base/pooling.py)."""

from __future__ import annotations

import numpy as np

from runtime.base.config import ModelInfo
from runtime.base.pooling import required_pooling
from runtime.base.types import FinishReason, StepOutput
from runtime.core.extra import Ended, Extra
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.core.step import Step


class PooledPrompts(Extra):
    """Serves `pooled`. The sample after the prompt is dropped."""

    serves = frozenset({"pooled"})

    def __init__(self, info: ModelInfo) -> None:
        self._pooling = info.pooling

    def on_add(self, state: RequestState) -> None:
        if state.params.pooled:
            state.reads_cache = state.fills_cache = required_pooling(self._pooling).shares_prefixes

    def on_result(self, step: Step, result: StepResult, output: StepOutput) -> Ended:
        """Report the vectors of the step's requests, which end. A request that was preempted meanwhile has none."""
        if not len(result.pooled_rows):
            return []
        rows = [row for row in step.sampled_rows for _ in range(1 + len(row[2]))]  # one for each sample
        ended: Ended = []
        for at, vector in zip(result.pooled_rows.tolist(), result.pooled, strict=True):
            state, epoch, _ = rows[at]
            if state.epoch == epoch:
                output.pooled.append((state, vector.tobytes()))
                # A number that is not finite is a fault of the model, which shows nowhere else.
                ended.append((state, FinishReason.LENGTH if np.isfinite(vector).all() else FinishReason.ERROR))
        return ended
