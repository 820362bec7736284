"""Extra: the interface of everything that the core can do without.

The core serves requests by itself: first come, first served, within its memory. An extra changes the order, a step's
size or the fields that a request may set. It overrides the hooks that it needs and keeps its own records by request.
The engine is constructed with its extras. Deleting an extra leaves a correct engine.

The step thread calls all hooks. An event goes to all extras, a question to the first extra that overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from runtime.base.reports import Report
from runtime.base.types import CallboardError, FinishReason, Request, StepOutput
from runtime.core.block_pool import EvictionOrder
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import StepResult
from runtime.core.queues import WaitingQueue
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.stats import EngineStats
from runtime.core.step import ReportedRow, Step

# request fields that extras serve
OPTIONAL_FIELDS = ("adapter", "grammar", "images", "pooled", "prompt_logprobs", "routed_experts", "thinking")


def end_of(numbers: bytes) -> FinishReason:
    """Return the finish reason of a request with these float32 numbers as output: ERROR if one is not finite."""
    return FinishReason.LENGTH if np.isfinite(np.frombuffer(numbers, np.float32)).all() else FinishReason.ERROR


class Culprit(NamedTuple):
    """A request that is at fault when runners are lost, and has ended."""

    state: RequestState
    num_losses: int  # losses in a row with this request's rows in flight


class Extra:
    """An addition to the engine. Each hook here is the core's own behaviour."""

    serves: ClassVar[frozenset[str]] = frozenset()  # the OPTIONAL_FIELDS that a request may set with this extra
    reads: ClassVar[type[Report] | None] = None  # the kind of row reports that it takes

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        """The engine is constructed."""

    def eviction_order(self) -> EvictionOrder | None:
        """Return the order in which cached blocks are evicted; None for the core's."""
        return None

    # ---- a request ------------------------------------------------------------------------------------------------

    def on_add(self, state: RequestState) -> None:
        """A request arrives. Raises CallboardError to refuse it."""

    def on_queue(self, state: RequestState) -> None:
        """A request enters the waiting queue: it is new, preempted or requeued."""

    def on_dequeue(self, state: RequestState) -> None:
        """A request leaves the waiting queue."""

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        """A request has ended."""

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        """The runners are lost with rows of these live requests in flight. Return the request at fault, if known."""
        return None

    def on_weights(self) -> None:
        """The next step runs with other weights. No step is in flight."""

    # ---- a step ---------------------------------------------------------------------------------------------------

    def run_alone(self) -> RequestState | None:
        """Return the request that must run without any other now."""
        return None

    def needs_plan(self) -> bool:
        """Return True if the next step must be planned although it lacks rows, because of transfers."""
        return False

    def begin_step(self, running: Sequence[RequestState]) -> bool:
        """A step is about to be planned. Return True to plan nothing now, because draft tokens are on their way."""
        return False

    def on_idle(self) -> None:
        """No step is in flight: wait here for what `begin_step` has requested."""

    def planning_delay_s(self, step: Step) -> float:
        """Return the seconds for which the step after `step`, the only one in flight, need not be planned."""
        return 0.0

    def max_prompt_tokens(self, running: Sequence[RequestState], waiting: WaitingQueue) -> int | None:
        """Return the most prompt tokens of the next step; None for its whole budget."""
        return None

    def may_open_slots(self, step: Step, running: Sequence[RequestState]) -> bool:
        """Return True if `step` may admit one more request."""
        return step.prompt_budget > 0

    def held(self) -> Set[RequestState]:
        """Return the waiting requests that must not be admitted now."""
        return frozenset()

    def may_admit(self, state: RequestState, room: int, running: Sequence[RequestState]) -> bool:
        """Return True if a waiting request, which can hold at most `room` blocks, may join the running ones."""
        return True

    def next_status(self, state: RequestState, hits: list[list[int]], num_slots: int) -> RequestStatus:
        """Return RUNNING to admit a waiting request, which fits and has the cached blocks `hits`.

        LOADING: it waits for more blocks, and is held. WAITING: all must wait, as `num_slots` free slots are taken."""
        return RequestStatus.RUNNING

    def row_tokens(self, state: RequestState, count: int, step: Step, running: Sequence[RequestState]) -> int:
        """Return how many of a prompt's next `count` tokens the request's row in `step` may compute.

        It may return more, up to the step's budget, if the row cannot be shorter."""
        return count

    def on_plan(self, step: Step) -> None:
        """A step is planned."""

    # ---- draft tokens ---------------------------------------------------------------------------------------------

    @property
    def is_drafting(self) -> bool:
        """True if rows of the step that is being planned should verify draft tokens."""
        return False

    @property
    def next_drafts(self) -> int:
        """Draft tokens that the runner's head makes after each row of the step that is being planned."""
        return 0

    def defers(self, state: RequestState) -> bool:
        """Return True to leave out a request with its last token in flight, so that the next step can draft for it."""
        return False

    def drafts(self, state: RequestState, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the known tokens of a request."""
        return []

    def on_verified(self, state: RequestState, num_accepted: int, rejected: bool) -> None:
        """A row has accepted draft tokens. `rejected` is True if the next one differs from the sample."""

    # ---- a result -------------------------------------------------------------------------------------------------

    def on_result(self, step: Step, result: StepResult) -> None:
        """A result arrives, before its tokens are committed."""

    def on_report(self, row: ReportedRow, report: Any, output: StepOutput) -> FinishReason:
        """A report that this extra `reads` arrives. Return why its request ends; NONE to continue."""
        return FinishReason.NONE

    def on_finish(self, state: RequestState, output: StepOutput) -> None:
        """A request ends with a result, after its last token. `on_end` follows."""

    def without_sample(self, state: RequestState, result: StepResult, at: int) -> FinishReason:
        """Token `at` of the result was not sampled. Return why the request ends; NONE to plan its row again."""
        return FinishReason.ERROR

    def stats(self) -> dict[str, float]:
        """Return figures of this extra."""
        return {}


_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Extras:
    """The hooks of an engine's extras. A hook that no extra overrides costs nothing, or is the core's own behaviour."""

    def __init__(self, extras: Iterable[Extra] = ()) -> None:
        self._all, core = tuple(extras), Extra()
        served = frozenset[str]().union(*(extra.serves for extra in self._all))
        self._unserved = [name for name in OPTIONAL_FIELDS if name not in served]
        # Events: all extras that override the hook are called.
        self.attach, self.stats = self._every(core.attach), self._every(core.stats)
        self.on_add, self.on_end = self._every(core.on_add), self._every(core.on_end)
        self.on_queue, self.on_dequeue = self._every(core.on_queue), self._every(core.on_dequeue)
        self.on_lost, self.on_plan = self._every(core.on_lost), self._every(core.on_plan)
        self.on_weights = self._every(core.on_weights)
        self.on_result, self.on_verified = self._every(core.on_result), self._every(core.on_verified)
        self.on_finish = self._every(core.on_finish)
        self.readers = {extra.reads: extra.on_report for extra in self._all if extra.reads is not None}
        self._held, self._needs_plan = self._every(core.held), self._every(core.needs_plan)
        # Questions: the first extra that overrides the hook answers.
        self.eviction_order, self.run_alone = self._first(core.eviction_order), self._first(core.run_alone)
        self.begin_step, self.on_idle = self._first(core.begin_step), self._every(core.on_idle)
        self.planning_delay_s = self._first(core.planning_delay_s)
        self.max_prompt_tokens = self._first(core.max_prompt_tokens)
        self.may_open_slots, self.may_admit = self._first(core.may_open_slots), self._first(core.may_admit)
        self.next_status, self.row_tokens = self._first(core.next_status), self._first(core.row_tokens)
        self.without_sample = self._first(core.without_sample)
        self.drafter = next((extra for extra in self._all if type(extra).drafts is not Extra.drafts), None)

    def __getitem__(self, kind: type[_T]) -> _T:
        """Return the extra of this class. Raises KeyError if there is none."""
        if (found := self.get(kind)) is None:
            raise KeyError(f"This engine has no {kind.__name__}.")
        return found

    def get(self, kind: type[_T]) -> _T | None:
        """Return the extra of this class, or None."""
        return next((extra for extra in self._all if isinstance(extra, kind)), None)

    def held(self) -> Set[RequestState]:
        """Return the waiting requests that any extra holds."""
        return frozenset[RequestState]().union(*(held() for held in self._held))

    def needs_plan(self) -> bool:
        """Return True if an extra needs a plan, even one without rows."""
        return any(needs_plan() for needs_plan in self._needs_plan)

    def check_served(self, request: Request) -> None:
        """Raises CallboardError if a request sets an optional field that no extra serves."""
        for name in self._unserved:
            value = getattr(request if name in ("adapter", "images") else request.params, name)
            if value is not None and value is not False and value not in ("", ()):
                raise CallboardError(f"This engine does not serve {name}; leave it out.")

    def take(self, step: Step, result: StepResult, output: StepOutput) -> list[tuple[RequestState, FinishReason]]:
        """Give extras a result and its reports of rows. Return the requests that end with a report."""
        for on_result in self.on_result:
            on_result(step, result)
        ended = []
        for number, report in result.reports:
            row, reader = step.reported_rows.get(number), self.readers.get(type(report))
            if row is None or reader is None or row.state.epoch != row.epoch:
                continue  # its request ended or was preempted meanwhile (C3)
            if reason := reader(row, report, output):
                ended.append((row.state, reason))
        return ended

    def _every(self, own: _Hook) -> tuple[_Hook, ...]:
        name = own.__name__
        return tuple(getattr(e, name) for e in self._all if getattr(type(e), name) is not getattr(Extra, name))

    def _first(self, own: _Hook) -> _Hook:
        return next(iter(self._every(own)), own)
