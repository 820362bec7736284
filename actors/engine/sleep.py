"""The sleep and the pauses of one engine. Requests wait in both, and in sleep the runners release their memory.

    awake  ->  the steps in flight end  ->  level 1: the runners keep their weights in the host's memory
                                            level 2: the runners end
    asleep ->  requests wait in the queue, within queue_timeout_s
    awake  ->  the weights are copied back, or read again; all requests are recomputed from their known tokens (C8)

A pause belongs to a caller until it begins. From then on it has a lease.

Only the step thread uses this module."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from actors.engine.engine_adapters import EngineAdapters
from actors.engine.link_server import Connection
from actors.engine.live_requests import LiveRequests
from actors.runners.step_channel import RunnersLost
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import Sleep, encode
from actors.wire.weight_calls import Pause
from runtime.base.types import CallboardError
from runtime.core.engine import EngineCore

logger = logging.getLogger(__name__)

_LEFT = "The front that sent the call is gone."

SetSleep = Callable[[int], None]  # sets all runners' level: 1 sleeps, 2 ends them, 0 wakes from level 1


class EngineSleep:
    """The current sleep level, and fronts' requests for another level."""

    def __init__(
        self,
        core: EngineCore,
        set_level: SetSleep,
        finish: Callable[[], None],
        rebuild: Callable[[str], None],
        settled: Callable[[], None],
        adapters: EngineAdapters,
    ) -> None:
        """Args:
        set_level: sets the level of all runners.
        finish: collects the steps in flight and sends their tokens.
        rebuild: starts fresh runners, which are awake.
        settled: reports the new level to the fronts.
        adapters: loads nothing while the runners sleep."""
        self.level = 0
        self.requests: deque[tuple[Connection, Sleep]] = deque()
        self._core, self._set_level = core, set_level
        self._finish, self._rebuild, self._settled, self._adapters = finish, rebuild, settled, adapters

    def request(self, connection: Connection, message: Sleep) -> None:
        """Queue a front's request until the current step ends."""
        self.requests.append((connection, message))

    def disconnected(self, connection: Connection) -> None:
        """Drop the requests of a front that is gone."""
        self.requests = deque(each for each in self.requests if each[0] is not connection)

    def apply_requests(self) -> bool:
        """Set the requested levels, between two steps. Returns True while the engine is asleep.

        Raises RunnersLost if the load of an adapter found the runners lost."""
        if self._adapters.loss:
            raise RunnersLost(self._adapters.loss)
        while self.requests:
            connection, message = self.requests.popleft()
            error = ""
            try:
                self._go_to(message.level)
            except CallboardError as e:
                error = str(e)
                if message.level or isinstance(e, RunnersLost):  # else they stay asleep
                    self._rebuild(error)
                    error = error if message.level else ""  # fresh runners are awake
            finally:
                self._settled()
                connection.answer(message.number, error)
        return self.level > 0

    def _go_to(self, level: int) -> None:
        if level > self.level:
            if not self.level:
                self._finish()
                self._core.lose()
            self.level = level  # before the runners sleep: copies may take longer than a step
            self._adapters.fell_asleep()
            self._set_level(level)
        elif not level and self.level == 1:
            self._wake()
            self._core.recover(self._core.executor)
            self.level = 0
            self._adapters.woke_up()
        elif not level and self.level == 2:
            self._rebuild("they ended to sleep")

    def _wake(self) -> None:
        try:
            self._set_level(0)
        except RunnersLost:
            raise
        except CallboardError:  # one rank failed; the others may be awake
            self._set_level(self.level)
            raise


class Lease:
    """Calls `ended` in the step thread once nothing has renewed it for `seconds`, unless `is_held()` then."""

    def __init__(
        self,
        seconds: float,
        call: Callable[[Callable[[], object]], object],
        ended: Callable[[], object],
        is_held: Callable[[], bool],
    ) -> None:
        """`call` runs a function in the step thread."""
        self.seconds, self._call, self._ended, self._is_held = seconds, call, ended, is_held
        self._is_over = False
        self.renew()
        self._look_after(seconds)

    def renew(self) -> None:
        self._ends_at = time.monotonic() + self.seconds

    def end(self) -> None:
        """`ended` is not called any more."""
        self._is_over = True
        self._timer.cancel()

    def _look_after(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._call, (self._look,))
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        if self._is_over:
            return
        if self._is_held():
            self.renew()
        if (left_s := self._ends_at - time.monotonic()) > 0:
            self._look_after(left_s)
        else:
            self._ended()


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A pause that has not begun."""

    pause: Pause
    answer: Future[Any]
    owner: Connection | None  # the connection that the answer goes to; None for a caller without one


class EnginePauses:
    """The current pause, and pauses before their begin. The step thread owns them.

    A pause that has not begun ends with its caller, or with a resume. One that has begun ends with a resume, or with
    its lease: calls about weights renew it."""

    def __init__(
        self,
        core: EngineCore,
        requests: LiveRequests,
        finish: Callable[[], None],
        start_lease: Callable[[float | None, Callable[[], object]], Lease],
        is_asleep: Callable[[], bool],
        changed: Callable[[], None],
        file: Path | None,
    ) -> None:
        """`finish` collects the steps in flight. `changed` reports the current pause to the fronts.

        `start_lease` starts a lease of some seconds, None for the default, which calls a function at its end. `file`
        holds the current pause, so an engine that replaces this one stays paused."""
        self._core, self._requests, self._finish, self._start_lease = core, requests, finish, start_lease
        self._is_asleep, self._changed, self._file = is_asleep, changed, file
        self._asked: list[_Asked] = []
        self._before: Pause | None = None  # that the current one replaced
        self._lease: Lease | None = None
        self._is_new = True  # no call has paused or resumed this engine
        self.current = _read(file) if file is not None and file.exists() else None
        self._begin_lease()

    @property
    def has_pending(self) -> bool:
        """True if `apply` has something to do."""
        return any(self._may_begin(asked.pause) or self._is_asleep() for asked in self._asked)

    def _may_begin(self, pause: Pause) -> bool:
        return pause.mode != "wait" or not self._core.scheduler.requests

    def ask(self, pause: Pause, answer: Future[Any], owner: Connection | None) -> None:
        """Pause once the current step has ended, or with mode wait all requests. Raises WeightsRefused."""
        if pause.joins and not self._is_new:  # it may have been resumed since
            answer.set_result({})
            return
        if self.current is not None and not self._may_begin(pause):
            raise WeightsRefused("Paused requests cannot end; resume the engine before a pause that waits.", "busy")
        self._is_new = False
        self._requests.holds_new = self._requests.holds_new or pause.mode == "wait"
        self._asked.append(_Asked(pause, answer, owner))

    def apply(self) -> bool:
        """Begin the pauses that may begin, between two steps. Returns True while the engine is paused."""
        if not self._asked:  # true before almost every step
            return self.current is not None
        self._void(_LEFT, lambda asked: asked.owner is not None and asked.owner.is_silent)
        for asked in [asked for asked in self._asked if self._may_begin(asked.pause)]:
            self._finish()
            if asked.pause.mode == "abort":
                self._requests.end_all("A pause of the server ended this request; send it again.")
            self._before = self.current
            self._set(asked.pause)
            self._asked.remove(asked)
            asked.answer.set_result({})
        if self._asked and self.current is not None:
            self._void("The engine was paused before its requests ended; resume it first.")
        elif self._asked and self._is_asleep():
            self._void("A sleeping engine's requests cannot end; wake it up before a pause that waits.")
        return self.current is not None

    def renew(self) -> None:
        """A call about the weights shows that their trainer lives."""
        if self._lease is not None:
            self._lease.renew()

    def resume(self) -> None:
        """End the current pause, and void all others."""
        self._is_new = False
        self._set(None)
        self._void("The engine was resumed before its requests ended.")

    def cancel(self, pause_id: str) -> None:
        """Undo one pause: another engine has refused it, or its caller is gone."""
        self._void("The pause was cancelled.", lambda asked: asked.pause.pause_id == pause_id)
        if self.current is not None and self.current.pause_id == pause_id:
            self._set(self._before)
            self._queue_held()

    def disconnected(self, connection: Connection) -> None:
        """Void the pauses of a front that is gone."""
        self._void(_LEFT, lambda asked: asked.owner is connection)

    def _void(self, reason: str, is_void: Callable[[_Asked], bool] = lambda _: True) -> None:
        """Refuse pauses that have not begun."""
        for asked in [asked for asked in self._asked if is_void(asked)]:
            self._asked.remove(asked)
            asked.answer.set_exception(WeightsRefused(reason, "busy"))
        self._queue_held()

    def _queue_held(self) -> None:
        """Without a pause, the requests that wait for one are queued."""
        if self.current is None and not self._asked and self._requests.holds_new:
            self._requests.holds_new = False
            self._requests.queue_held()

    def _set(self, pause: Pause | None) -> None:
        self.current = pause
        self._begin_lease()
        self._write()
        self._changed()

    def _begin_lease(self) -> None:
        if self._lease is not None:
            self._lease.end()
        pause = self.current
        self._lease = None if pause is None else self._start_lease(pause.lease_s, self._expire)

    def _expire(self) -> None:
        logger.warning("a pause ends, since no trainer called for as long as its lease")
        self.resume()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            if self.current is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_bytes(encode(self.current))
            else:
                self._file.unlink(missing_ok=True)
        except OSError as e:
            state = "paused" if self.current is not None else "resumed"
            logger.warning("an engine in place of this one would not stay %s: %s", state, e)


def _read(file: Path) -> Pause:
    """Return the stored pause; one with the default lease if its file is damaged."""
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Pause)
    except (OSError, msgspec.DecodeError):
        return Pause()
