"""Pooled prompts: requests that end with a vector of their prompt (base/pooling.py)."""

from __future__ import annotations

from runtime.base.model.pooling import required_pooling
from runtime.base.model_info import ModelInfo
from runtime.base.reports import Vector
from runtime.base.types import FinishReason, StepOutput
from runtime.core.extra import Extra, end_of
from runtime.core.request_state import RequestState
from runtime.core.step import ReportedRow


class PooledPrompts(Extra):
    """Serves `pooled`. The sample after the prompt is dropped."""

    serves = frozenset({"pooled"})
    reads = Vector

    def __init__(self, info: ModelInfo) -> None:
        self._pooling = info.pooling

    def on_add(self, state: RequestState) -> None:
        if state.params.pooled:
            state.has_reports = True
            state.reads_cache = state.fills_cache = required_pooling(self._pooling).shares_prefixes

    def on_report(self, row: ReportedRow, report: Vector, output: StepOutput) -> FinishReason:
        """Report the vector of a request, which ends."""
        output.reports.append((row.state, report))
        return end_of(report.numbers)  # a number that is not finite is a fault of the model
