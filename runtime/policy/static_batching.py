"""Batching and order other than the core's: static batches, and the shortest job first."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.extra import Extra
from runtime.core.request_state import RequestState
from runtime.core.step import Step


class StaticBatching(Extra):
    """Admits only into an empty batch. A batch is closed once a row has sampled."""

    def __init__(self) -> None:
        self._is_closed = False

    def may_open_slots(self, step: Step, running: Sequence[RequestState]) -> bool:
        """Return True while the batch is open. It may open more slots than the step's budget computes."""
        if not running:
            self._is_closed = False
        return bool(step.admitted) or not (self._is_closed or step.reaches_end)

    def on_plan(self, step: Step) -> None:
        self._is_closed |= step.reaches_end


class ShortestJobFirst(Extra):
    """Orders one priority's requests by their most tokens."""

    def on_add(self, state: RequestState) -> None:
        priority, _, arrival = state.sort_key
        state.sort_key = priority, state.max_len, arrival
