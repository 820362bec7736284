"""One engine's weights: pauses, updates and their version.

    start    an update is open                     steps go on
    update   all ranks stage a part                steps go on
    finish   the steps in flight end; all ranks apply what is staged; the version changes; steps go on
    (later)  all ranks write the version to the weight store, which restarted runners read

A step runs wholly on one version, since ranks apply between two steps. An earlier failure drops the staged tensors. A
failure within `apply` counts as lost runners: fresh ones read the stored version.

The step thread owns all state here. Ranks stage and store in threads of this module."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

from actors.engine.link_server import Connection
from actors.engine.live_requests import LiveRequests
from actors.engine.metrics import EngineMetrics
from actors.engine.sleep import EnginePauses, Lease
from actors.runners.rank_weights import CallRanks, P, RankWeights, T
from actors.runners.step_channel import RunnersLost
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import checked
from actors.wire.weight_calls import (
    A,
    Check,
    Checked,
    Connect,
    Discard,
    Disconnect,
    Finish,
    GetState,
    Pause,
    Receive,
    Rename,
    Resume,
    Start,
    WeightCall,
    WeightState,
)
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.base.weight_version import WeightVersion
from runtime.core.engine import EngineCore
from runtime.updates.update_info import group_of_init_info, has_group, parts_of_json

logger = logging.getLogger(__name__)

_EXPIRES_S = 600.0  # an update without a call for this long is dropped, because its trainer is gone
_NEED_RUNNERS = Connect | Start | Receive | Check | Finish  # calls that a sleeping engine refuses

NoAnswer = Future[None]


class _Update:
    """An open update."""

    def __init__(self, update_id: str) -> None:
        self.id = update_id
        self.is_busy = False  # while ranks work for it
        self.num_parts = 0  # calls with parts that all ranks have staged
        self.begun_at = time.monotonic()
        self.lease: Lease  # its calls renew it


class EngineWeights:
    """The engine's pauses, and its weight updates."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        requests: LiveRequests,
        meter: EngineMetrics,
        call_ranks: CallRanks,
        finish: Callable[[], None],
        call: Callable[[Callable[[], object]], Future[Any]],
        changed: Callable[[], None],
        is_asleep: Callable[[], bool],
        pause_file: Path | None = None,
    ) -> None:
        """`call_ranks` calls a method of all runners, and `call` runs a function in the step thread.

        `finish` collects the steps in flight and sends their tokens. `changed` reports a new version or pause to the
        fronts. `pause_file` exists while the engine is paused."""
        self._core, self._requests, self._meter, self._ranks = core, requests, meter, call_ranks
        self._num_ranks = config.tensor_parallel_size
        self._finish, self._call, self._changed = finish, call, changed
        self.version = core.scheduler.info.weights  # None without weight_updates
        self._stored = self.version  # that fresh runners would have
        self._draft_head = ""  # what the last update did to a head
        self._is_asleep = is_asleep
        self._pending: deque[tuple[Callable[[], None], Future[Any]]] = deque()  # until the current step ends
        self._update: _Update | None = None
        self._pool = ThreadPoolExecutor(4, "weights")
        self._storing: NoAnswer | None = None  # the last write to the store
        self._num_discards = 0  # discards that ranks have not ended: they would drop the next update's parts, too
        self._default_lease_s = config.trainer_timeout_s
        self.pauses = EnginePauses(core, requests, finish, self._pause_lease, is_asleep, changed, pause_file)

    # ---- for other threads ------------------------------------------------------------------------------------------

    def call(self, call: WeightCall[A]) -> Future[A]:
        """Do what a front or a trainer wants. The answer raises CallboardError, WeightsRefused among them."""
        answer: Future[A] = Future()
        self._call(partial(self.begin, call, answer))
        return answer

    # ---- the step thread --------------------------------------------------------------------------------------------

    def begin(self, call: WeightCall[A], answer: Future[A], owner: Connection | None = None) -> None:
        """Do what a caller wants, or answer with its error. `owner` is the connection of the call, if it has one."""
        if not answer.set_running_or_notify_cancel():  # its caller is gone
            return
        try:
            if self.version is None:
                text = "This engine keeps its weights; start the server with --weight-updates to change them."
                raise WeightsRefused(text, "unavailable")
            if isinstance(call, _NEED_RUNNERS) and self._is_asleep():
                raise WeightsRefused("The engine sleeps; wake it up before its weights change.", "busy")
            self._do(call, answer, owner)
        except CallboardError as e:
            answer.set_exception(e)
        except Exception as e:
            logger.exception("the call %s about weights failed", type(call).__name__)
            answer.set_exception(CallboardError(f"The call {type(call).__name__} failed: {type(e).__name__}: {e}."))
        if not isinstance(call, GetState):  # which monitors send
            self.pauses.renew()

    def _do(self, call: WeightCall[Any], answer: Future[Any], owner: Connection | None) -> None:
        match call:
            case Pause():
                self.pauses.ask(checked(call), answer, owner)
            case Resume():
                self.pauses.resume()
                answer.set_result(None)
            case GetState():
                answer.set_result(self._state())
            case Connect():
                self._connect(call, answer)
            case Disconnect():
                self._on_ranks(RankWeights.weights_disconnect, answer)
            case Start():
                self._start(call, answer)
            case Receive():
                self._receive(call, answer)
            case Check():
                self._check(answer)
            case Finish():
                self._finish_update(call, answer)
            case Discard():
                self._discard(call, answer)
            case Rename():
                self._rename(call, answer)
            case _:
                raise WeightsRefused(f"{call!r} is not a call about weights.", "bad_request")

    @property
    def has_pending(self) -> bool:
        """True if `apply_requests` has something to do."""
        return bool(self._pending) or self.pauses.has_pending

    def apply_requests(self) -> bool:
        """Do what must happen between two steps. Returns True while the engine is paused.

        Raises RunnersLost if ranks failed to apply an update."""
        while self._pending:
            work, answer = self._pending.popleft()
            try:
                work()
            except RunnersLost as e:
                answer.set_exception(WeightsRefused(str(e), "unavailable"))
                raise
            except CallboardError as e:
                answer.set_exception(e)
        return self.pauses.apply()

    def restarted(self, weights: WeightVersion | None) -> None:
        """Fresh runners have these weights, the last stored ones. What the old ones had staged is lost."""
        if self._update is not None:
            self._drop(self._update)
        if weights != self.version:
            logger.warning("the weights are again those of version %s", weights and weights.name)
        self.version = self._stored = weights

    def _in_thread(
        self,
        work: Callable[[], T],
        done: Callable[[T], None],
        answer: Future[Any],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work` while steps continue, then `done` with its result, or `failed`, in the step thread.

        An error goes to `answer`."""

        def run() -> None:
            try:
                result = work()
            except RunnersLost as e:
                self._call(partial(fail, WeightsRefused(str(e), "unavailable")))
            except CallboardError as e:
                self._call(partial(fail, e if isinstance(e, WeightsRefused) else WeightsRefused(str(e), "bad_request")))
            except Exception as e:
                logger.exception("a call about weights failed")
                self._call(partial(fail, CallboardError(f"{type(e).__name__}: {e}.")))
            else:
                self._call(partial(done, result))

        def fail(error: CallboardError) -> None:
            failed()
            if not answer.done():
                answer.set_exception(error)

        in_background(self._pool.submit(run), "a call about weights")

    def _pause_lease(self, seconds: float | None, ended: Callable[[], object]) -> Lease:
        """Start a pause's lease. It holds while an update is open, which has its own lease."""
        return Lease(seconds or self._default_lease_s, self._call, ended, lambda: self._update is not None)

    # ---- updates ----------------------------------------------------------------------------------------------------

    def _state(self) -> WeightState:
        assert self.version is not None
        is_stored = self._stored is not None and self._stored.serial == self.version.serial
        is_paused, is_open = self.pauses.current is not None, self._update is not None
        named = self.version.name, self.version.serial
        return WeightState(is_paused, *named, is_stored, is_open, self._num_ranks, self._draft_head)

    def _on_ranks(
        self, method: Callable[Concatenate[Any, P], Any], answer: NoAnswer, *args: P.args, **kw: P.kwargs
    ) -> None:
        """Call a method on all ranks while steps continue, then answer."""
        self._in_thread(lambda: self._ranks(method, *args, **kw), lambda _: answer.set_result(None), answer)

    def _connect(self, call: Connect, answer: NoAnswer) -> None:
        if not has_group(call.init_info):  # only NCCL needs a group
            answer.set_result(None)
            return
        groups = [group_of_init_info(call.init_info, call.rank_offset + rank) for rank in range(self._num_ranks)]
        self._on_ranks(RankWeights.weights_connect, answer, groups)

    def _start(self, call: Start, answer: NoAnswer) -> None:
        if self._update is not None or self._num_discards:
            raise WeightsRefused("Another update of the weights is open; finish or discard it.", "busy")
        update = _Update(call.update_id)
        update.lease = Lease(_EXPIRES_S, self._call, self._expire, lambda: update.is_busy)
        self._update = update
        answer.set_result(None)

    def _expire(self) -> None:
        """Drop an update without calls, since its trainer is gone."""
        logger.warning("an update of the weights had no call for %.0f s; it is dropped", _EXPIRES_S)
        self._discard(Discard(), Future())

    def _drop(self, update: _Update) -> None:
        self._end(update)
        self._meter.figures.count("callboard:weight_updates", "failed")

    def _end(self, update: _Update) -> None:
        self._update = None
        update.lease.end()

    def _take(self) -> _Update:
        """Return the open update for its next call. Raises WeightsRefused if there is none, or it is busy."""
        if self._update is None:
            raise WeightsRefused("No update of the weights is open; send start_weight_update first.", "not_open")
        if self._update.is_busy:
            raise WeightsRefused("The last call of this update has not ended; wait for its answer.", "busy")
        self._update.is_busy = True
        return self._update

    def _release(self, update: _Update, answer: Future[Any]) -> None:
        """The call of an update has ended."""
        update.is_busy = False
        update.lease.renew()
        if self._update is not update:
            answer.set_exception(WeightsRefused("The update was dropped meanwhile; begin another.", "not_open"))

    def _receive(self, call: Receive, answer: NoAnswer) -> None:
        update = self._take()

        def receive() -> None:
            # a trainer may name 100,000 tensors
            for part in parts_of_json(call.update_info) if call.parts is None else call.parts:
                self._ranks(RankWeights.weights_receive, part)

        def received(_: object) -> None:
            update.num_parts += 1
            answer.set_result(None)

        self._of_update(update, receive, received, answer)

    def _check(self, answer: Future[Checked]) -> None:
        """Answer with all that must be equal on the engines of an update."""
        update, version = self._take(), self.version
        assert version is not None

        def checked(found: list[bool]) -> None:
            facts = version.serial, version.name, version.identity
            answer.set_result(Checked(update.id, update.num_parts, all(found), *facts))

        self._of_update(update, partial(self._ranks, RankWeights.weights_check), checked, answer)

    def _of_update(
        self, update: _Update, work: Callable[[], T], done: Callable[[T], None], answer: Future[Any]
    ) -> None:
        """Run an update's work while steps continue, then `done` with its result if the update is still open.

        An error drops the update, since parts may be staged."""

        def ended(result: T) -> None:
            self._release(update, answer)
            if not answer.done():
                done(result)

        def failed() -> None:
            if self._update is update:
                self._discard(Discard(), Future())

        self._in_thread(work, ended, answer, failed)

    def _finish_update(self, call: Finish, answer: Future[WeightState]) -> None:
        if not self._matches(call.update_id):
            raise WeightsRefused("The update was dropped meanwhile; begin another.", "not_open")
        update = self._take()

        def check() -> list[bool]:
            if self._storing is not None:
                wait([self._storing])  # the ranks still write the last update's tensors
            return self._ranks(RankWeights.weights_check)

        def checked(found: list[bool]) -> None:
            update.is_busy = True
            self._pending.append((partial(self._apply, update, all(found), call, answer), answer))

        self._of_update(update, check, checked, answer)

    def _apply(self, update: _Update, is_complete: bool, call: Finish, answer: Future[WeightState]) -> None:
        """Change the weights of all ranks, between two steps."""
        if self._update is not update or self.version is None:
            raise WeightsRefused("The update was dropped before it was applied; begin another.", "not_open")
        if self._is_asleep():
            self._release(update, answer)
            raise WeightsRefused("The engine fell asleep before the update was applied; wake it up.", "busy")
        self._finish()
        version = self.version
        if call.newest is not None:
            version = replace(version, serial=call.newest[0], name=call.newest[1])
        version = version.after(update.id, call.weight_version, is_complete)
        start = time.monotonic()
        try:
            applied = self._ranks(RankWeights.weights_apply, version)[0]
        except RunnersLost:
            raise
        except CallboardError as e:  # some ranks may have new weights
            raise RunnersLost(f"an update of the weights failed: {e}") from e
        self._count_seconds("receive", start - update.begun_at)
        self._count_seconds("apply", time.monotonic() - start)
        self._end(update)
        self.version, self._draft_head = version, applied.draft_head
        self._meter.figures.count("callboard:weight_updates", "applied")
        info, pause = self._core.scheduler.info, self.pauses.current
        kv = call.kv or ("recompute" if pause is None else pause.kv)
        self._core.scheduler.use_weights(replace(info, fingerprint=applied.fingerprint, weights=version), kv == "keep")
        self._changed()
        self._storing = Future()
        if call.wait_stored:
            self._store(version, self._storing, answer)
        else:
            answer.set_result(self._state())
            self._store(version, self._storing, Future())

    def _store(self, version: WeightVersion, end: NoAnswer, answer: Future[WeightState]) -> None:
        """All ranks write the version to the store while steps continue."""

        def store() -> None:
            try:
                self._ranks(RankWeights.weights_store)
            except CallboardError as e:
                logger.error("version %s of the weights is not stored: %s", version.name, e)
                raise
            finally:
                end.set_result(None)

        start = time.monotonic()

        def stored(_: object) -> None:
            self._count_seconds("store", time.monotonic() - start)
            if self.version is not None and self.version.serial == version.serial:  # else runners were lost meanwhile
                self._stored = self.version
            answer.set_result(self._state())

        self._in_thread(store, stored, answer)

    def _count_seconds(self, phase: str, seconds: float) -> None:
        self._meter.figures.count("callboard:weight_update_seconds", phase, by=seconds)

    def _matches(self, update_id: str | None) -> bool:
        """True if the open update has this id; None stands for any update, also without an open one."""
        return update_id is None or (self._update is not None and self._update.id == update_id)

    def _discard(self, call: Discard, answer: NoAnswer) -> None:
        if not self._matches(call.update_id):
            answer.set_result(None)
            return
        if self._update is not None:
            self._drop(self._update)
        self._num_discards += 1

        def ended() -> None:
            self._num_discards -= 1

        def discarded(_: object) -> None:
            ended()
            answer.set_result(None)

        self._in_thread(partial(self._ranks, RankWeights.weights_discard), discarded, answer, ended)

    def _rename(self, call: Rename, answer: NoAnswer) -> None:
        assert self.version is not None
        self.version = replace(self.version, name=call.new_version)
        self._core.scheduler.info = replace(self._core.scheduler.info, weights=self.version)
        self._changed()
        answer.set_result(None)
