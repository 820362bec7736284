"""An engine's step loop: takes requests from the links, runs the steps of the EngineCore, and replaces lost runners.

A plain class with a thread, without Ray. `actors/engine/actor.py` is its Ray shell."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from actors.engine.autoscaling import EngineFigures
from actors.engine.cache_feed import CacheFeed, Followers
from actors.engine.engine_adapters import EngineAdapters, LoadAdapter
from actors.engine.link_server import Connected, Connection, Disconnected, FromLink, LinkServer
from actors.engine.live_requests import LiveRequests
from actors.engine.metrics import EngineMetrics
from actors.engine.sleep import EngineSleep, SetSleep
from actors.engine.weights import EngineWeights
from actors.runners.rank_weights import CallRanks
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import (
    Abort,
    AbortById,
    Adapters,
    CancelPause,
    Follow,
    ResetPrefixCache,
    Sleep,
    Status,
    Submit,
    WaitLimits,
)
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.weight_calls import Pause
from runtime.assembly.engine import build_engine, draft_client_of, speculation_of, use_fresh_runners
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, FinishReason
from runtime.core.executor import Executor
from runtime.policy.engine_load import EngineLoad
from runtime.policy.stall_watch import STALL_S, StallWatch, stacks
from runtime.policy.step_pacing import StepPacing
from runtime.speculation.draft_client import DraftClient, DraftWire

logger = logging.getLogger(__name__)
# While a step need not be planned yet, the loop polls whether the one in flight has ended. Each pause is a share of
# the remaining time, within these bounds: a long step costs few polls, and a step that ends early leaves no long gap.
_POLL_SHARE, _MIN_POLL_S, _MAX_POLL_S = 0.25, 0.001, 0.01
_BACKLOG_POLL_S = 0.05  # seconds between attempts to write to full sockets, and between deadline checks
_CHECK_EVERY_S = 60.0  # seconds between checks of an idle engine's bookkeeping, if debugging is logged

_Work = Callable[[], object]  # done by the step thread


def _wait_limits(config: EngineConfig) -> WaitLimits:
    sizes = config.max_queued_requests, config.max_queued_tokens, config.max_queued_bytes
    return WaitLimits(*sizes, config.queue_timeout_s, config.trainer_timeout_s)


class EngineLoop:
    """The step thread. It alone uses the scheduler; all other threads put messages into its inbox."""

    def __init__(
        self,
        config: EngineConfig,
        start_runners: Callable[[], tuple[Executor, ModelInfo]],
        load_adapter: LoadAdapter,
        set_sleep: SetSleep,
        call_ranks: CallRanks,
        num_restarts: int = 0,
        pause_file: Path | None = None,
    ) -> None:
        """Args:
        start_runners: starts a fresh group of runners, at first and after a loss; returns their executor and model.
        load_adapter: loads an adapter onto all runners.
        set_sleep: puts the runners to sleep, or wakes them.
        call_ranks: calls a method of all runners, for their weights.
        num_restarts: the number of engines that this one follows.
        pause_file: exists while the engine is paused; None if no engine follows this one."""
        self.config = config
        self._start_runners = start_runners
        # Not a SimpleQueue: CPython 3.11's may ignore a short timeout and wait for the next item.
        self._inbox: queue.Queue[tuple[Connection, FromLink] | _Work] = queue.Queue()
        self._connections: set[Connection] = set()
        self._draining: str | None = None  # why the engine takes no new requests; None if it takes them
        self._closed = False
        self._progress = time.monotonic()
        self._stalls = StallWatch(time.monotonic)
        self._may_take_long = False  # the step thread waits for a step, or changes the runners' state
        self.num_rebuilds = 0
        self.reason: str | None = "The engine is loading its model."  # why it cannot serve now; None if it can
        self.executor, self.info = start_runners()
        speculation = speculation_of(config, self.info, time.monotonic)
        self._pacing = StepPacing(config.max_itl_ms, time.monotonic)
        self.core = build_engine(config, self.info, self.executor, speculation, self._pacing)
        scheduler = self.core.scheduler

        def fail(adapter: str, error: str) -> None:
            self.requests.fail(adapter, error)

        changed = self._adapters_have_changed
        self._adapters = EngineAdapters(config, scheduler, load_adapter, self._call, changed, fail)
        self._adapters.load_at_start()
        self.meter = EngineMetrics(config, self.info, num_restarts)
        self.requests = LiveRequests(config, self.core, self._adapters, self.meter)
        self._frames = self.requests.frames
        settled = partial(self._set_reason, None)
        self._sleep = EngineSleep(self.core, set_sleep, self._finish_steps, self._rebuild, settled, self._adapters)
        own = config, self.core, self.requests, self.meter, call_ranks, self._finish_steps, self._call
        self.weights = EngineWeights(*own, self._send_status_to_all, lambda: self._sleep.level > 0, pause_file)
        self._limits = _wait_limits(config)
        self._followers = Followers(CacheFeed(scheduler), time.monotonic)
        self._handlers: dict[type, Callable[[Connection, Any], None]] = {
            Connected: self._connected,
            Disconnected: self._disconnected,
            Submit: self._submit,
            Abort: self.requests.abort,
            AbortById: self.requests.abort_by_id,
            Follow: self._follow,
            ResetPrefixCache: self._reset_prefix_cache,
            Sleep: self._sleep.request,
            Pause: self._pause,
            CancelPause: lambda _, message: self.weights.pauses.cancel(message.pause_id),
            Adapters: self._adapters.apply,
        }
        self.links = LinkServer(lambda connection, message: self._inbox.put((connection, message)), self.report)
        self.reason = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._thread.start()

    # ---- for other threads ------------------------------------------------------------------------------------------

    def health(self) -> str | None:
        """Return None if the engine takes requests, else one sentence with the reason."""
        if not self._thread.is_alive():
            return "The engine's step thread has ended."
        return self._draining or self.reason

    def check_progress(self) -> bool:
        """Close the runners if a step exceeds step_timeout_s. Called about once a second.

        Returns False if the loop is still stuck after twice that time: its process must then be replaced."""
        if self._stalls.look(self._mark()):
            num_live = len(self.core.scheduler.requests)
            logger.error("no step for %.0f s with %d requests live; stacks:\n%s", STALL_S, num_live, stacks())
            self.meter.figures.count("callboard:stalls")
        stuck_s = time.monotonic() - self._progress
        if not self._has_work or self._adapters.is_restarting or stuck_s <= self.config.step_timeout_s:
            return True
        logger.error("no step finished for %.0f s with %d requests live", stuck_s, len(self.core.scheduler.requests))
        self.executor.close()
        return stuck_s <= 2 * self.config.step_timeout_s

    def _mark(self) -> tuple[int, int] | None:
        """Return what each step changes, and each look at a step that computes; None while no step is due."""
        scheduler = self.core.scheduler
        rests = self._sleep.level or self._sleep.requests or self.weights.pauses.current is not None
        changes = self._may_take_long or self._adapters.is_restarting or self.reason is not None
        if rests or changes or not scheduler.requests:
            return None
        return scheduler.stats.steps, self._frames.num_sends if scheduler.num_in_flight else 0

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, read without a lock. Each is correct; two may differ by a step."""
        streams = [len(c.streams) for c in list(self._connections)]  # each connection's live requests
        own = {"rebuilds": self.num_rebuilds, "connections": len(streams), "streams": streams}
        return self.core.stats() | own | {"sleep_level": self._sleep.level}

    def figures(self) -> EngineFigures:
        """The load for the scaling policy, read without a lock like `stats`."""
        scheduler = self.core.scheduler
        idle_s = 0.0 if scheduler.requests else time.monotonic() - self._progress
        return EngineFigures.of(scheduler, EngineLoad.of(scheduler), self._pacing.prefill_rate, idle_s)

    def report(self, figures: MetricValues) -> Snapshot:
        """Add a front's counts, and return all figures of this engine."""
        adapters = self._adapters.states
        memory = sum(connection.memory for connection in list(self._connections))
        is_paused = self.weights.pauses.current is not None
        return self.meter.report(figures, self.core, self.num_rebuilds, self._sleep.level, adapters, memory, is_paused)

    def drain(self, reason: str) -> Future[object]:
        """Take no new requests, for `reason`. Live requests continue; once this is done, their number only falls."""
        return self._call(partial(self._drain, reason))

    @property
    def draft(self) -> DraftClient | None:
        """The step thread's client of the draft model; None without a draft model."""
        return draft_client_of(self.core)

    def attach_draft(self, wire: DraftWire, step_us: tuple[tuple[int, float], ...]) -> None:
        """Use a fresh draft from now on. Returns when the old one is forgotten."""
        assert self.draft is not None
        self._call(partial(self.draft.attach, wire, step_us)).result()

    def _call(self, work: _Work) -> Future[object]:
        """Run `work` in the step thread. The future raises its CallboardError."""
        done: Future[object] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():  # its caller is gone
                return
            try:
                done.set_result(work())
            except CallboardError as e:
                done.set_exception(e)

        self._inbox.put(run)
        return done

    def join(self) -> None:
        """Wait until the step thread has ended."""
        self._thread.join()

    def close(self) -> None:
        """End the thread and the runners."""
        self._closed = True
        self._inbox.put(lambda: None)
        self.executor.close()
        self.links.close()
        self._thread.join(timeout=5)

    # ---- the step thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Submit each plan before the last step's frames are sent: runners compute while frames are written."""
        meter = self.meter
        while True:
            self._take_messages()
            if self._closed:
                return
            try:
                self._may_take_long = True
                is_asleep = self._sleep.apply_requests()
                is_paused = self.weights.apply_requests()
                self._may_take_long = False
                if is_asleep or is_paused:
                    continue
                waits = self.config.late_planning and self._wait_to_plan()
                meter.before_submit(self.core.scheduler.num_in_flight, self._frames.pending is not None)
                admitted = self.core.submit(waits)
                meter.submitted(admitted)
                for state in admitted:
                    self._frames.accept(state.owner, has_slot=True)
                self._frames.send()
                self._followers.send_changes()
                if waits and self.core.must_wait_to_plan():
                    continue  # an idle engine has just begun a step: requests that arrive during it join the next one
                self._collect()
            except CallboardError as e:
                if not self._closed:
                    self._rebuild(str(e))

    def _collect(self) -> None:
        self.meter.before_collect()
        may_take_long, self._may_take_long = self._may_take_long, self.core.scheduler.num_in_flight > 0
        self._frames.pending = self.core.collect()
        self._may_take_long = may_take_long
        if self._frames.pending is not None:
            self.meter.collected()
            self._followers.are_behind = True
        self._progress = time.monotonic()

    def _finish_steps(self) -> None:
        """Collect the steps in flight and send their tokens."""
        self._frames.send()
        while self.core.scheduler.num_in_flight:
            self._collect()
            self._frames.send()

    @property
    def _has_work(self) -> bool:
        if self._sleep.requests or self._adapters.loss or self.weights.has_pending:
            return True
        return self.core.has_work and not self._sleep.level and self.weights.pauses.current is None

    def _wait_to_plan(self) -> bool:
        """Take requests until the next step must be planned, so that they join it.

        Returns False if the step in flight ended earlier than expected: the runners are then idle."""
        while (delay_s := self.core.scheduler.planning_delay_s()) > 0 and not self._closed:
            if self.executor.has_result():
                return False
            self._frames.send()
            with contextlib.suppress(queue.Empty):
                poll_s = min(max(_POLL_SHARE * delay_s, _MIN_POLL_S), _MAX_POLL_S)
                self._take_message(self._inbox.get(timeout=min(delay_s, poll_s)))
        return True

    def _take_messages(self) -> None:
        """Empty the inbox. With nothing to compute or send, wait for a message first."""
        while True:
            self._adapters.release_unused()
            self.requests.refuse_late()
            if not self._inbox.empty():
                self._take_message(self._inbox.get())
            elif self._has_work or self._frames.pending is not None or self._closed:
                return
            else:
                self._wait_for_message()

    def _wait_for_message(self) -> None:
        """Wait while the engine is idle; write backlogs and check the bookkeeping meanwhile."""
        limits = self.requests.limits
        limits.idle()
        has_backlog = any(c.has_backlog for c in self._connections)
        is_due = has_backlog or limits.has_deadlines or self._adapters.is_kept_for_fronts
        idle_s = _CHECK_EVERY_S if logger.isEnabledFor(logging.DEBUG) else None
        changes_due_s = self._followers.send_changes()
        try:
            message = self._inbox.get(timeout=changes_due_s or (_BACKLOG_POLL_S if is_due else idle_s))
        except queue.Empty:
            for connection in self._connections:
                connection.send_backlog()
            if not is_due and not changes_due_s:
                faults = self.core.scheduler.find_faults()
                logger.debug("idle; faults of blocks and slots: %s", " ".join(faults) or "none")
            return
        self._progress = time.monotonic()
        self._take_message(message)

    def _take_message(self, message: tuple[Connection, FromLink] | _Work) -> None:
        self._followers.are_behind = True
        if isinstance(message, tuple):
            connection, content = message
            self._handlers[type(content)](connection, content)
        else:
            message()

    def _connected(self, connection: Connection, _: Connected) -> None:
        self._connections.add(connection)
        self._send_status(connection)

    def _disconnected(self, connection: Connection, _: Disconnected) -> None:
        self._connections.discard(connection)
        self._followers.follow(connection, False)
        self._adapters.apply(connection, Adapters(needs={}))
        self.requests.abort_all(connection)
        self._sleep.disconnected(connection)
        self.weights.pauses.disconnected(connection)

    def _pause(self, connection: Connection, message: Pause) -> None:
        def report(answer: Future[Any]) -> None:
            error = answer.exception()
            code = error.code if isinstance(error, WeightsRefused) else "unavailable"
            connection.answer(message.number, str(error or ""), code)

        answer: Future[None] = Future()
        answer.add_done_callback(report)
        self.weights.begin(message, answer, connection)

    def _submit(self, connection: Connection, message: Submit) -> None:
        self.requests.submit(connection, message, self._draining)

    def _follow(self, connection: Connection, message: Follow) -> None:
        self._followers.follow(connection, message.wanted)

    def _reset_prefix_cache(self, connection: Connection, message: ResetPrefixCache) -> None:
        self.core.scheduler.pool.evict_unheld()
        connection.answer(message.number)

    def _drain(self, reason: str) -> None:
        self._draining = reason
        self._send_status_to_all()

    def _send_status(self, connection: Connection) -> None:
        reason, info = self._draining or self.reason, self.core.scheduler.info
        is_asleep, current = self._sleep.level > 0, (info.fingerprint, info.weights)
        pause = self.weights.pauses.current
        status = Status(reason, self._draining is not None, [], is_asleep, [], {}, *current, pause, self._limits)
        connection.send(self._adapters.add_news(status, connection))

    def _adapters_have_changed(self) -> None:
        """Report the change to the fronts, and queue the requests that waited for it."""
        self._send_status_to_all()
        self.requests.queue_held()

    def _set_reason(self, reason: str | None) -> None:
        self.reason = reason
        self._send_status_to_all()

    def _send_status_to_all(self) -> None:
        for connection in self._connections:
            self._send_status(connection)

    def _rebuild(self, why: str) -> None:
        """Replace the runners and recompute every live request: runners are replaceable caches (C8).

        A request that was found to kill its runners ends with an error (runtime/policy/isolation.py)."""
        logger.warning("rebuilding the runners: %s", why)
        self._frames.send()
        self._set_reason(f"The engine is restarting its model runners: {why}")
        self.num_rebuilds += 1
        self.executor.close()
        if (culprit := self.core.lose()) is not None:
            text = f"The model runners were lost {culprit.num_losses} times while computing this request."
            self.requests.end_at_once(culprit.state.owner, FinishReason.ERROR, text)
        self.executor, info = self._adapters.restart(self._start_runners)
        before = self.core.scheduler.info
        if info.weights == before.weights and info.fingerprint != before.fingerprint:
            raise RuntimeError("the model's files changed under a running engine")
        use_fresh_runners(self.core, self.executor, info)
        if info.weights != before.weights:
            self.core.scheduler.use_weights(info, keeps_kv=False)
        self.weights.restarted(info.weights)
        self._progress, self._sleep.level = time.monotonic(), 0
        self._set_reason(None)
