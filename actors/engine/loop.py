"""An engine's step loop: takes requests from the links, turns the EngineCore, sends each front its new tokens, and
rebuilds lost runners. A plain class with a thread; `actors/engine/actor.py` is its Ray shell."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from actors.engine.adapter_loading import EngineAdapters, LoadAdapter
from actors.engine.autoscaling import EngineFigures
from actors.engine.held_requests import HeldRequests
from actors.engine.link_server import Connection, LinkServer, Stream
from actors.engine.queue_limits import QueueLimits
from actors.engine.sleep import EngineSleep, SetSleep
from actors.wire.cache_feed import CacheFeed, Followers
from actors.wire.engine_client import Refusal
from actors.wire.messages import (
    Abort,
    AbortById,
    Adapters,
    Ended,
    Follow,
    Forget,
    FromFront,
    Refused,
    Sleep,
    Status,
    Submit,
)
from actors.wire.metrics import EngineMetrics, MetricValues, Snapshot
from runtime.assembly.engine import build_engine, draft_client_of, speculation_of
from runtime.core.executor import Executor
from runtime.policy.engine_load import EngineLoad
from runtime.policy.step_pacing import StepPacing
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.types import NOT_FINITE, CallboardError, FinishReason, Request, StepOutput
from runtime.speculation.draft_client import DraftClient, DraftWire

logger = logging.getLogger(__name__)
# While a step need not be planned yet, the loop looks whether the one in flight has ended already: after a share of the
# time that is left each time, so that a long step costs few looks and one that was far shorter leaves no long gap.
_LOOK_SHARE, _LEAST_LOOK_S = 0.25, 0.001
_CHECK_EVERY_S = 60.0  # an idle engine looks for faults of its bookkeeping this often, when debugging is logged


class EngineLoop:
    """The step thread. It alone touches the scheduler; everybody else puts a message in its inbox.

    `start_runners()` makes a fresh group of runners and returns an executor for it; it is called at the start and
    whenever a runner is lost; `load_adapter` lets them load one, `set_sleep` sleep and wake. `num_restarts` tells how
    many engines there were before this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_runners: Callable[[], tuple[Executor, ModelInfo]],
        load_adapter: LoadAdapter,
        set_sleep: SetSleep,
        num_restarts: int = 0,
    ) -> None:
        self.config = config
        self._start_runners = start_runners
        # From a connection, its message or None when it comes or goes; from anyone else, what the step thread shall do.
        self._inbox: queue.SimpleQueue[tuple[Connection, FromFront | None] | Callable[[], None]]
        self._inbox = queue.SimpleQueue()
        self._connections: set[Connection] = set()
        self._by_id: dict[str, dict[Stream, None]] = {}  # live ones by their clients' ids
        self._held = HeldRequests(config.queue_timeout_s)
        self._untold: set[Connection] = set()  # those that do not know yet what was accepted
        self._draining: str | None = None  # why no new requests are taken
        self._output: StepOutput | None = None  # committed, not sent yet
        self._closed = False
        self._progress = time.monotonic()
        self.num_rebuilds = 0
        self.reason: str | None = "The engine is loading its model."  # why it cannot serve now
        self.executor, self.info = start_runners()
        speculation = speculation_of(config, self.info, time.monotonic)
        self._pacing = StepPacing(config.max_itl_ms, time.monotonic)
        self.core = build_engine(config, self.info, self.executor, speculation, self._pacing)
        scheduler, changed = self.core.scheduler, self._adapters_have_changed
        self._limits = QueueLimits(config, scheduler, self._held)
        self._adapters = EngineAdapters(config, scheduler, load_adapter, self._call, changed, self._fail_requests)
        self._adapters.load_at_start()
        settled = partial(self._set_reason, None)
        self._sleep = EngineSleep(self.core, set_sleep, self._finish_steps, self._rebuild, settled, self._adapters)
        self._followers = Followers(CacheFeed(scheduler), time.monotonic)
        self.meter = EngineMetrics(config, self.info, num_restarts)
        self.links = LinkServer(lambda connection, message: self._inbox.put((connection, message)), self.report)
        self.reason = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._thread.start()

    # ---- what other threads may call ------------------------------------------------------------------------------

    def health(self) -> str | None:
        """None when it is healthy and takes requests; else one sentence that says why not."""
        if not self._thread.is_alive():
            return "The engine's step thread has ended."
        return self._draining or self.reason

    def check_progress(self) -> bool:
        """Called now and then: a step that takes longer than step_timeout_s loses its runners.

        False if even that did not help: then this process itself is stuck, and must be replaced."""
        stuck_s = time.monotonic() - self._progress
        if not self._has_work or self._adapters.is_restarting or stuck_s <= self.config.step_timeout_s:
            return True
        logger.error("no step finished for %.0f s with %d requests live", stuck_s, len(self.core.scheduler.requests))
        self.executor.close()
        return stuck_s <= 2 * self.config.step_timeout_s

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, read without a lock: each is right, together they may be a step apart."""
        streams = [len(c.streams) for c in list(self._connections)]  # live requests of each
        own = {"rebuilds": self.num_rebuilds, "connections": len(streams), "streams": streams}
        return self.core.stats() | own | {"sleep_level": self._sleep.level}

    def figures(self) -> EngineFigures:
        """For the policy of scaling; read as `stats` are."""
        scheduler = self.core.scheduler
        idle_s = 0.0 if scheduler.requests else time.monotonic() - self._progress
        return EngineFigures.of(scheduler, EngineLoad.of(scheduler), self._pacing.prefill_rate, idle_s)

    def report(self, figures: MetricValues) -> Snapshot:
        """Add what a front has counted; all figures of this engine."""
        adapters = self._adapters.states
        memory = sum(connection.memory for connection in list(self._connections))
        return self.meter.report(figures, self.core, self.num_rebuilds, self._sleep.level, adapters, memory)

    def drain(self, reason: str) -> Future[object]:
        """Take no new requests, for `reason`; those that are live go on. When it is done, their number only falls."""
        return self._call(partial(self._drain, reason))

    @property
    def draft(self) -> DraftClient | None:
        """The step thread's side of the draft model, if there should be one."""
        return draft_client_of(self.core)

    def attach_draft(self, wire: DraftWire, step_us: tuple[tuple[int, float], ...]) -> None:
        """Let a draft that knows nothing yet guess from now on; returns when the old one is forgotten."""
        assert self.draft is not None
        self._call(partial(self.draft.attach, wire, step_us)).result()

    def _call(self, work: Callable[[], object]) -> Future[object]:
        """Let the step thread do `work`; a CallboardError is the future's."""
        done: Future[object] = Future()

        def run() -> None:
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
        """End the thread and let the runners go."""
        self._closed = True
        self._inbox.put(lambda: None)
        self.executor.close()
        self.links.close()
        self._thread.join(timeout=5)

    # ---- the step thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """New requests and the plan after a step go to the runners before the step's tokens go to the fronts, so that
        the runners compute while frames are written."""
        meter = self.meter
        while True:
            self._take_messages()
            if self._closed:
                return
            try:
                if self._sleep.follow():
                    continue
                waits = self.config.late_planning and self._wait_to_plan()
                meter.before_submit(self.core.scheduler.num_in_flight, self._output is not None)
                admitted = self.core.submit(waits)
                meter.submitted(admitted)
                for state in admitted:
                    state.owner.connection.frame.accepted.append((state.owner.number, True))
                    self._untold.add(state.owner.connection)
                self._emit()
                self._followers.tell()
                if waits and self.core.must_wait_to_plan():
                    continue  # an idle engine has just begun a step: who arrives during it is in the next one
                self._collect()
            except CallboardError as e:
                if not self._closed:
                    self._rebuild(str(e))

    def _collect(self) -> None:
        self.meter.before_collect()
        self._output = self.core.collect()
        if self._output is not None:
            self.meter.collected()
            self._followers.are_behind = True
        self._progress = time.monotonic()

    def _finish_steps(self) -> None:
        """Send all that the steps in flight sample."""
        self._emit()
        while self.core.scheduler.num_in_flight:
            self._collect()
            self._emit()

    @property
    def _has_work(self) -> bool:
        return bool(self._sleep.asked or self._adapters.loss) or (self.core.has_work and not self._sleep.level)

    def _wait_to_plan(self) -> bool:
        """Take requests until the next step must be planned, so that they wait for no other one but this one. False if
        the step in flight has ended sooner than was expected: the runners have nothing to do."""
        while (delay_s := self.core.scheduler.planning_delay_s()) > 0 and not self._closed:
            if self.executor.has_result():
                return False
            self._emit()
            with contextlib.suppress(queue.Empty):
                look_s = max(_LOOK_SHARE * delay_s, _LEAST_LOOK_S)
                self._take_message(self._inbox.get(timeout=min(delay_s, look_s)))
        return True

    def _take_messages(self) -> None:
        """All that is in the inbox; when there is nothing to compute or to send, wait for something."""
        inbox = self._inbox
        while True:
            self._adapters.release_unused()
            self._refuse_late()
            if inbox.empty():
                if self._has_work or self._output is not None or self._closed:
                    return
                self._limits.idle()
                has_backlog = any(c.has_backlog for c in self._connections)
                is_due = has_backlog or self._limits.has_deadlines or self._adapters.is_kept_for_fronts
                idle_s = _CHECK_EVERY_S if logger.isEnabledFor(logging.DEBUG) else None
                untold_s = self._followers.tell()
                try:
                    item = inbox.get(timeout=untold_s or (0.05 if is_due else idle_s))
                except queue.Empty:
                    for connection in self._connections:
                        connection.send_backlog()
                    if not is_due and not untold_s:
                        faults = self.core.scheduler.find_faults()
                        logger.debug("idle; faults of blocks and slots: %s", " ".join(faults) or "none")
                    continue
                self._progress = time.monotonic()
            else:
                item = inbox.get()
            self._take_message(item)

    def _take_message(self, item: tuple[Connection, FromFront | None] | Callable[[], None]) -> None:
        self._followers.are_behind = True
        if isinstance(item, tuple):
            self._handle(*item)
        else:
            item()

    def _handle(self, connection: Connection, message: FromFront | None) -> None:
        if isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Abort):
            if (stream := connection.streams.get(message.stream)) is not None:
                self.core.abort(stream.key)
                self._forget(stream)
        elif isinstance(message, AbortById):
            self._abort(message)
        elif isinstance(message, Follow):
            self._followers.follow(connection, message.wanted)
        elif isinstance(message, Forget):
            self.core.scheduler.pool.evict_unheld()
            connection.answer(message.number)
        elif isinstance(message, Sleep):
            self._sleep.asked.append((connection, message))
        elif isinstance(message, Adapters):
            self._adapters.apply(connection, message)
        elif connection not in self._connections:
            self._connections.add(connection)
            self._send_status(connection)
        else:
            self._connections.discard(connection)
            self._followers.follow(connection, False)
            self._adapters.apply(connection, Adapters(needs={}))
            for stream in list(connection.streams.values()):
                self.core.abort(stream.key)
                self._forget(stream)

    def _submit(self, connection: Connection, message: Submit) -> None:
        connection.last_stream = message.stream
        if not message.resumed:
            draining = Refused(message.stream, self._draining, Refusal.DRAINING) if self._draining else None
            if (refusal := draining or self._limits.refusal(message)) is not None:
                connection.send(refusal)
                return
        stream = Stream(connection, message.stream, message.request.request_id)
        connection.streams[message.stream] = stream
        self._by_id.setdefault(stream.client_id, {})[stream] = None
        self._add(stream, replace(message.request, request_id=stream.key), message.resumed)

    def _add(self, stream: Stream, request: Request, resumed: bool) -> None:
        """Queue a request, unless its adapter is not loaded yet."""
        connection = stream.connection
        if self._adapters.is_awaited(request.adapter):
            self._held.add(stream, request, resumed)
            return
        try:
            self._adapters.check(request.adapter, resumed)
            state = self.core.add(request, stream)
        except CallboardError as e:
            self._forget(stream)
            connection.send(Refused(stream.number, str(e), Refusal.NEVER))
            return
        connection.frame.accepted.append((stream.number, False))
        self._untold.add(connection)
        if len(request.token_ids) == request.prompt_len:
            self._limits.queued(state, stream.arrived_at)

    def _refuse_late(self) -> None:
        for stream in self._limits.late():
            self.core.abort(stream.key)
            self._forget(stream)
            text = f"The request waited {self.config.queue_timeout_s:g} s in the queue (queue_timeout_s)."
            stream.connection.send(Refused(stream.number, text, Refusal.LATE))

    def _drain(self, reason: str) -> None:
        self._draining = reason
        self._tell_status()

    def _abort(self, asked: AbortById) -> None:
        found = {s: None for key in asked.client_ids() for s in self._by_id.get(key, ()) if asked.means(s.request_id)}
        if found:
            self._emit()  # what it has gained comes before its end
        for stream in found:
            self._end_at_once(stream, FinishReason.ABORT)

    def _emit(self) -> None:
        """Sort the last step's columns by front and send each its frame."""
        output, self._output = self._output, None
        if output is None:
            return
        touched, self._untold = self._untold, set()
        logprobs, meter = output.logprobs, self.meter
        sampled_at, step, num_others, num_prompt = meter.sampled_at, self.core.scheduler.stats.steps, 0, 0
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            stream: Stream = state.owner
            connection = stream.connection
            if stream.last_step != step - 1:
                num_others += 1
                if stream.last_step is not None:
                    meter.token_latency.observe(sampled_at - stream.last_at)
                else:
                    num_prompt += state.prompt_len
                    times = stream.admitted_at - stream.arrived_at, sampled_at - stream.admitted_at
                    connection.frame.started.append((stream.number, state.num_cached, *times))
            stream.last_step, stream.last_at = step, sampled_at
            if i in logprobs:
                connection.frame.logprobs[len(connection.token_column)] = logprobs[i]
            connection.stream_column.append(stream.number)
            connection.token_column.append(token)
            touched.add(connection)
        for state, num_draft_tokens, num_accepted in output.verified:
            state.owner.connection.frame.verified.append((state.owner.number, num_draft_tokens, num_accepted))
        for state, scores in output.prompt_logprobs:
            state.owner.connection.frame.prompt_logprobs.append((state.owner.number, scores))
            touched.add(state.owner.connection)
        for state, vector in output.pooled:
            stream, connection = state.owner, state.owner.connection
            times = stream.admitted_at - stream.arrived_at, sampled_at - stream.admitted_at
            connection.frame.started.append((stream.number, state.num_cached, *times))
            connection.frame.pooled.append((stream.number, vector))
            num_prompt += state.prompt_len
        meter.emitted(len(output.states), num_others, num_prompt)
        for state, reason in output.finished:
            self._limits.finished(sampled_at)
            stop_id, error = None, state.failure
            if reason is FinishReason.STOP and state.tokens[-1] in state.params.stop_token_ids:
                stop_id = state.tokens[-1]
            if reason is FinishReason.ERROR:
                error = NOT_FINITE
            self._end(state.owner, reason, stop_id, error)
            touched.add(state.owner.connection)
        for connection in touched:
            connection.flush(meter.sampled_at_wall)
            if connection.lease_expired:
                connection.close()

    def _end_at_once(self, stream: Stream, reason: FinishReason, error: str = "") -> None:
        """End a request between two steps."""
        self.core.abort(stream.key)
        self._end(stream, reason, None, error)
        stream.connection.flush(self.meter.sampled_at_wall)

    def _end(self, stream: Stream, reason: FinishReason, stop_id: int | None, error: str) -> None:
        stream.connection.frame.ended.append(Ended(stream.number, int(reason), stop_id, error))
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        stream.connection.streams.pop(stream.number, None)
        self._held.remove(stream)
        of_id = self._by_id.get(stream.client_id, {})
        of_id.pop(stream, None)
        if not of_id:
            self._by_id.pop(stream.client_id, None)

    def _send_status(self, connection: Connection) -> None:
        status = Status(self._draining or self.reason, self._draining is not None, is_asleep=self._sleep.level > 0)
        connection.send(self._adapters.add_news(status, connection))

    def _adapters_have_changed(self) -> None:
        """Send it to the fronts, and queue the requests that have waited for it."""
        self._tell_status()
        for stream, request, resumed in self._held.take():
            self._add(stream, request, resumed)

    def _fail_requests(self, adapter: str, error: str) -> None:
        for state in [s for s in self.core.scheduler.requests.values() if s.request.adapter == adapter]:
            self._end_at_once(state.owner, FinishReason.ERROR, error)

    def _set_reason(self, reason: str | None) -> None:
        self.reason = reason
        self._tell_status()

    def _tell_status(self) -> None:
        for connection in self._connections:
            self._send_status(connection)

    def _rebuild(self, why: str) -> None:
        """Runners are replaceable caches (C8): get new ones and recompute every live request.

        A request that is found to kill its runners ends with an error (isolation.py)."""
        logger.warning("rebuilding the runners: %s", why)
        self._emit()
        self._set_reason(f"The engine is restarting its model runners: {why}")
        self.num_rebuilds += 1
        self.executor.close()
        if (culprit := self.core.lose()) is not None:
            text = f"The model runners were lost {culprit.num_losses} times while computing this request."
            self._end_at_once(culprit.state.owner, FinishReason.ERROR, text)
        self.executor, info = self._adapters.restart(self._start_runners)
        if info.fingerprint != self.info.fingerprint:
            raise RuntimeError("the model's files changed under a running engine")
        self.core.recover(self.executor)
        self._progress, self._sleep.level = time.monotonic(), 0
        self._set_reason(None)
