"""Isolation: finds the request that kills the runners by running suspects alone.

When the runners are lost (a crashed kernel, a killed process, a hung step), all requests pause. They are then computed
again (C8). One request may be the cause, and would cause the next loss too:

    first loss     all requests continue together: most losses have another cause, or happen once
    second loss    requests with rows in flight both times that gained next to nothing between are suspects. They run
                   one after another, each alone, until it has gained a few tokens: then it is cleared
    third loss     the request that ran alone is at fault, and ends (C9)

It does not matter which rows kill, nor whether steps finish between. A prompt may be computed each time, and the first
token after it fail. No other request runs during a trial, so only the suspect can cause a third loss. A trial takes a
few steps, less than loading a model again. A request that gains more between two losses is not suspected.

Several requests may kill the runners only together. Each is cleared alone, and a cleared request is not tried again:

    cleared        they return one after another, each when the one before has gained a few tokens among the others
    lost again     just after a return: one fewer may run together from then on, and the others wait until one ends. A
                   request that was lost so _MAX_RETURNS times in a row is at fault, and ends
                   at another time: half as many may run together

So each further loss shrinks the group or brings a request closer to its end."""

from __future__ import annotations

from collections.abc import Set

from runtime.base.types import FinishReason
from runtime.core.extra import Culprit, Extra
from runtime.core.request_state import RequestState

MAX_LOSSES = 3  # losses in a row, the last one alone, that end a request
_MAX_RETURNS = 3  # losses in a row just after its return that end a cleared request
PROGRESS_TOKENS = 4  # tokens without a loss that clear a request


class _Losses:
    """The runner losses that had one request's rows in flight."""

    __slots__ = ("at", "num", "num_returns")

    def __init__(self) -> None:
        self.num = 0  # losses in a row
        self.at = 0  # known tokens at the last one
        self.num_returns = 0  # losses just after its return from a trial


class Isolation(Extra):
    """The suspects, one suspect's trial, and the return of cleared requests."""

    def __init__(self) -> None:
        self._losses: dict[RequestState, _Losses] = {}  # live requests that were ever in flight at a loss
        self._goals: dict[RequestState, int] = {}  # suspects, and the number of tokens that clears each

        # Cleared requests in order of return, each with the token count after which the next one returns; 0 before its
        # own return.
        self._cleared: dict[RequestState, int] = {}
        self._most: int | None = None  # cleared requests that may run together; None for all

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        """Count the loss for all requests in flight; return the one at fault if it is known."""
        states = list(in_flight)
        for state in states:
            losses = self._losses.setdefault(state, _Losses())
            has_progressed = len(state.tokens) - losses.at >= PROGRESS_TOKENS
            losses.num = 1 if has_progressed else losses.num + 1
            losses.at = len(state.tokens)
            if losses.num >= MAX_LOSSES - 1 and state not in self._cleared:
                self._goals[state] = losses.at + PROGRESS_TOKENS
        # The last to arrive is tried first: a request that has run for long was harmless until now.
        self._goals = dict(sorted(self._goals.items(), key=lambda item: item[0].sort_key[-1], reverse=True))
        if len(states) == 1 and self._losses[states[0]].num >= MAX_LOSSES:
            culprit: RequestState | None = states[0]
        else:
            culprit = self._lost_together([state for state in states if state in self._cleared])
        return None if culprit is None else Culprit(culprit, self._losses[culprit].num)

    def _lost_together(self, cleared: list[RequestState]) -> RequestState | None:
        """Count a loss with these cleared requests in flight; return one that was lost too often on its return."""
        returned = [state for state in cleared if len(state.tokens) < self._cleared[state]]
        for state in cleared:
            losses = self._losses[state]
            losses.num_returns = losses.num_returns + 1 if state in returned else 0
        if len(cleared) > 1:
            self._most = len(cleared) - 1 if returned else len(cleared) // 2
        self._cleared = dict.fromkeys(sorted(self._cleared, key=self._return_order), 0)
        return next((state for state in returned if self._losses[state].num_returns >= _MAX_RETURNS), None)

    def run_alone(self) -> RequestState | None:
        """Return the suspect on trial; None without suspects."""
        while self._goals:
            state, goal = next(iter(self._goals.items()))
            if len(state.tokens) < goal:
                return state
            del self._goals[state]
            self._cleared[state] = 0
            self._cleared = {each: self._cleared[each] for each in sorted(self._cleared, key=self._return_order)}
        return None

    def held(self) -> frozenset[RequestState]:
        """Return the cleared requests that must wait: all but the next one, or all while another returns."""
        waiting = [state for state in self._cleared if state.slot is None]
        if not waiting:
            return frozenset()
        running = [state for state in self._cleared if state.slot is not None]
        is_returning = any(len(state.tokens) < self._cleared[state] for state in running)
        if is_returning or (self._most is not None and len(running) >= self._most):
            return frozenset(waiting)
        self._cleared[waiting[0]] = len(waiting[0].tokens) + PROGRESS_TOKENS
        return frozenset(waiting[1:])

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        if self._losses.pop(state, None) is None:
            return
        self._goals.pop(state, None)
        self._cleared.pop(state, None)
        if not self._cleared:
            self._most = None

    def _return_order(self, state: RequestState) -> tuple[int, int]:
        """Requests that were lost on their return come last, then arrival decides."""
        return self._losses[state].num_returns, state.sort_key[-1]
