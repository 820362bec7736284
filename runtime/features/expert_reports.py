"""Routed experts: the choices of a mixture for each token of a request, in the order of positions.

A row that is computed again, after a preemption or a loss, may choose others if numerics are not deterministic. The
first report of a position counts: the tokens after it were sampled with this choice.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from runtime.base.config import ModelInfo
from runtime.base.types import CallboardError, FinishReason, StepOutput
from runtime.core.extra import Culprit, Ended, Extra
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.core.step import Step


class _Row(NamedTuple):
    """A planned row of a request that reports experts."""

    state: RequestState
    epoch: int
    start: int
    num_tokens: int  # draft tokens included
    num_drafts: int


class _Report:
    """The choices for the first `num_tokens` tokens of a request, then those for draft tokens in the last result."""

    __slots__ = ("drafts", "num_tokens", "parts")

    def __init__(self) -> None:
        self.parts, self.num_tokens, self.drafts = list[bytes](), 0, b""


class ExpertReports(Extra):
    """Serves `routed_experts`. It precedes the extras that may end a request in `on_result`."""

    serves = frozenset({"routed_experts"})

    def __init__(self, info: ModelInfo) -> None:
        self._has_experts = info.routed_experts is not None
        layers, top_k = info.routed_experts or (0, 0)
        self._size = 2 * layers * top_k  # bytes of a token
        self._live: dict[RequestState, _Report] = {}
        self._in_flight: dict[int, list[_Row]] = {}  # by the id of the step

    def on_add(self, state: RequestState) -> None:
        if state.params.routed_experts:
            if not self._has_experts:
                raise CallboardError("This model has no experts to report; leave routed_experts out.")
            state.reads_cache = False  # the cache holds no choices
            self._live[state] = _Report()

    def on_plan(self, step: Step) -> None:
        if not self._live:
            return
        drafts = {state: len(tokens) for state, _, tokens in step.sampled_rows}
        columns = step.plan.num_computed.tolist(), step.plan.num_tokens.tolist()
        rows = [
            _Row(state, state.epoch, start, num_tokens, drafts.get(state, 0))
            for state, start, num_tokens in zip(step.rows, *columns, strict=True)
            if state.params.routed_experts
        ]
        if rows:
            self._in_flight[step.step_id] = rows

    def on_result(self, step: Step, result: StepResult, output: StepOutput) -> Ended:
        at = 0
        for state, epoch, start, num_tokens, num_drafts in self._in_flight.pop(step.step_id, ()):
            found = result.experts[at : at + num_tokens]
            at += num_tokens
            if (report := self._live.get(state)) is None or state.epoch != epoch:
                continue  # it ended or was preempted meanwhile (C3)
            known = max(0, report.num_tokens - start)
            self._add(report, found[known : num_tokens - num_drafts].tobytes())
            report.drafts = found[max(known, num_tokens - num_drafts) :].tobytes() if num_drafts else b""
            if report.num_tokens >= len(state.request.token_ids):
                state.reads_cache = True  # a preemption need not report them again
        return []

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
            output.experts.append((state, b"".join(report.parts)[: num_tokens * self._size]))

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._live.pop(state, None)

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        self._in_flight.clear()
        return None
