"""Routed experts: a mixture's choices for each token of a request, in position order.

A row that is computed again, after a preemption or a loss, may choose others if numerics are not deterministic. The
first report for a position counts: the tokens after it were sampled with this choice.
"""

from __future__ import annotations

from runtime.base.model_info import ModelInfo
from runtime.base.reports import Experts
from runtime.base.types import CallboardError, FinishReason, StepOutput
from runtime.core.extra import Extra
from runtime.core.request_state import RequestState
from runtime.core.step import ReportedRow


class _Report:
    """The choices for the first `num_tokens` tokens of a request, then those for draft tokens in the last result."""

    __slots__ = ("drafts", "num_tokens", "parts")

    def __init__(self) -> None:
        self.parts, self.num_tokens, self.drafts = list[bytes](), 0, b""


class ExpertReports(Extra):
    """Serves `routed_experts`."""

    serves = frozenset({"routed_experts"})
    reads = Experts

    def __init__(self, info: ModelInfo) -> None:
        self._has_experts = info.routed_experts is not None
        layers, top_k = info.routed_experts or (0, 0)
        self._size = 2 * layers * top_k  # bytes per token
        self._live: dict[RequestState, _Report] = {}

    def on_add(self, state: RequestState) -> None:
        if state.params.routed_experts:
            if not self._has_experts:
                raise CallboardError("This model has no experts to report; leave routed_experts out.")
            state.reads_cache = False  # the cache holds no choices
            state.has_reports = True
            self._live[state] = _Report()

    def on_report(self, row: ReportedRow, report: Experts, output: StepOutput) -> FinishReason:
        """Store the choices of a row. Those for draft tokens wait until these are verified."""
        if (live := self._live.get(row.state)) is None:
            return FinishReason.NONE
        known = max(0, live.num_tokens - row.start) * self._size
        sure = max(known, (row.num_tokens - row.num_drafts) * self._size)
        self._add(live, report.ids[known:sure])
        live.drafts = report.ids[sure:] if row.num_drafts else b""
        if live.num_tokens >= len(row.state.request.token_ids):
            row.state.reads_cache = True  # a preemption need not report them again
        return FinishReason.NONE

    def on_verified(self, state: RequestState, num_accepted: int, rejected: bool) -> None:
        if (report := self._live.get(state)) is not None:
            self._add(report, report.drafts[: num_accepted * self._size])
            report.drafts = b""

    def _add(self, report: _Report, found: bytes) -> None:
        if found:
            report.parts.append(found)
            report.num_tokens += len(found) // self._size

    def on_finish(self, state: RequestState, output: StepOutput) -> None:
        """Report the choices with the end. The last sampled token has none, because no row computes it."""
        if (report := self._live.get(state)) is not None:
            num_tokens = len(state.tokens) - (not state.only_scores)
            output.reports.append((state, Experts(b"".join(report.parts)[: num_tokens * self._size])))

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._live.pop(state, None)
