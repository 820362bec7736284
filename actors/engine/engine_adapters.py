"""One engine's adapters (LoRA): a thread and the runner calls around the pure `adapter_machine.py`.

step thread      events -> AdapterMachine -> actions;  Restore and End are done here
adapters thread  Read and Load, one after another;     each answer is an event for the step thread"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from actors.engine.adapter_machine import Action, AdapterMachine, End, Hold, Load, Read, Rebuild, Report, Restore
from actors.engine.link_server import Connection
from actors.runners.step_channel import RunnersLost
from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.link_messages import Adapters, Status
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.core.scheduler import Scheduler
from runtime.features.adapter_table import AdapterTable, is_in_use
from runtime.loading.adapter_files import read_adapter
from runtime.loading.resolve import resolve_adapter

logger = logging.getLogger(__name__)

_HELD_S = 1.0  # new requests may use a name's former adapter, until fronts have received its successor
_SILENCE_CHECK_S = 1.0  # seconds between checks for silent fronts
_T = TypeVar("_T")

LoadAdapter = Callable[[int, str, str], None]  # loads (index, folder, required digest) on all runners
_Event = Callable[[], list[Action]]


class EngineAdapters:
    """The names of adapters, and their places on the runners."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        load: LoadAdapter,
        call: Callable[[Callable[[], Any]], Future[Any]],
        changed: Callable[[], None],
        fail: Callable[[str, str], None],
    ) -> None:
        """Args:
        load: loads an adapter on all runners.
        call: runs a function in the step thread.
        changed: called when names or places changed, or a load ended.
        fail: ends the requests of a digest with an error."""
        self._config, self._load, self._call = config, load, call
        self._changed, self._fail = changed, fail
        self._machine = AdapterMachine(
            scheduler.extras[AdapterTable], lambda index: is_in_use(index, scheduler.all_states()), config.adapters
        )
        self.is_awaited = self._machine.is_awaited
        self.fell_asleep, self.woke_up = self._event(self._machine.fell_asleep), self._event(self._machine.woke_up)
        self._fetched: dict[str, str] = {}  # folders of the adapters read from buckets, by digest
        self.is_restarting = False  # while runners start
        self.loss = ""  # why the runners must be replaced; empty if they need not
        self._runners = threading.Lock()  # held during their start, and during each load
        self._jobs: queue.SimpleQueue[Read | Load] = queue.SimpleQueue()
        self._silence_checked_at = 0.0  # the time of the last check for silent fronts
        threading.Thread(target=self._work, name="adapters", daemon=True).start()

    def load_at_start(self) -> None:
        """Load the adapters of the settings before the first request. Raises CallboardError if one fails."""
        actions: list[Action] = []
        for name, path in self._config.adapters.items():
            actions += self._machine.received([AdapterEntry(name, path)], time.time_ns())
            while actions:
                match actions.pop(0):
                    case Read() | Load() as job:
                        actions += self._attempt(job)()
                    case Rebuild(why):
                        raise RunnersLost(why)
            if error := self._machine.states[name].error:
                raise CallboardError(error)

    # ---- the step thread --------------------------------------------------------------------------------------------

    @property
    def states(self) -> dict[str, AdapterState]:
        """The state of each name."""
        return self._machine.states

    def add_news(self, status: Status, front: Connection) -> Status:
        """Add the changes since the last Status that was sent to this front."""
        states, sent = self._machine.states, front.sent_adapters
        status.adapters = [state for name, state in states.items() if sent.get(name) is not state]
        status.dropped = list(sent.keys() - states.keys())
        status.kept = self._machine.kept
        front.sent_adapters = states
        return status

    @property
    def is_kept_for_fronts(self) -> bool:
        """True if `release_unused` must be called even while the engine is idle."""
        return bool(self._machine.retaining())

    def apply(self, front: Connection, message: Adapters) -> None:
        """Apply the message of a front. Older entries are ignored."""
        self._run(self._machine.received(message.entries, time.time_ns()))
        if message.needs is not None:
            self._run(self._machine.needed(front, message.needs))

    def check(self, digest: str, resumed: bool) -> None:
        """Note the use of an adapter; raises CallboardError if a request may not use it."""
        self._machine.check(digest, resumed, time.time_ns() if digest else 0)

    def release_unused(self) -> None:
        """Free the places without a name or a request. A silent front that keeps one loses its connection.

        The step thread calls it between steps."""
        if self._machine.is_leaving:
            self._run(self._machine.unused())
        if (now := time.monotonic()) - self._silence_checked_at > _SILENCE_CHECK_S:
            self._silence_checked_at = now
            for front in self._machine.retaining():
                if isinstance(front, Connection) and front.is_silent:
                    front.close()

    def restart(self, start: Callable[[], _T]) -> _T:
        """Start fresh runners by `start`, restore their adapters, and return its result."""
        with self._runners:
            self.is_restarting = True  # set inside the lock: a load that hangs is not a start
            try:
                started = start()
                self.loss = ""
                actions = self._machine.started()
                for action in [action for action in actions if isinstance(action, Restore)]:
                    if error := self._restore(action):
                        actions += self._machine.restored(action.digest, error)
            finally:
                self.is_restarting = False
        self._run(actions)
        return started

    def _restore(self, place: Restore) -> str:
        """Load one adapter onto fresh runners. Returns the error; empty on success. Raises RunnersLost."""
        try:
            self._load_onto(place.at, place.path, place.digest)
        except RunnersLost:
            raise
        except CallboardError as e:
            logger.warning("adapter %s: %s", place.path, e)
            return str(e)
        return ""

    def _event(self, event: _Event) -> Callable[[], None]:
        return lambda: self._run(event())

    def _run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Read() | Load():
                    self._jobs.put(action)
                case End(digest, error):
                    self._fail(digest, error)
                case Rebuild(why):
                    self.loss = why
                case Hold(entry):
                    timer = threading.Timer(
                        _HELD_S, self._call, (self._event(partial(self._machine.hold_ended, entry)),)
                    )
                    timer.daemon = True
                    timer.start()
                case Report():
                    self._changed()

    def _load_onto(self, at: int, path: str, digest: str) -> None:
        """Load an adapter onto the runners, from the folder that was read, whatever a bucket has now."""
        self._load(at, self._fetched.get(digest) or resolve_adapter(path), digest)

    # ---- the thread that loads --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._call(self._event(self._attempt(self._jobs.get())))

    def _attempt(self, job: Read | Load) -> _Event:
        """Do a job, and return the event that it causes."""
        machine = self._machine
        try:
            if isinstance(job, Read):
                folder = resolve_adapter(job.path)
                adapter = read_adapter(folder)
                adapter.check_rank(self._config.max_lora_rank)
                if folder != job.path:
                    self._fetched[adapter.digest] = folder
                return partial(machine.read, job, adapter.digest)
            with self._runners:
                if job.generation != machine.generation:
                    return partial(machine.skipped, job)
                self._load_onto(job.at, job.path, job.digest)
            return partial(machine.loaded, job)
        except RunnersLost as e:
            assert isinstance(job, Load), "reading calls no runner"
            return partial(machine.lost, job, str(e))
        except CallboardError as e:
            error = str(e)
            logger.warning("adapter %s: %s", job.path, error)
        except Exception as e:
            logger.exception("adapter %s could not be loaded", job.path)
            error = f"The adapter in {job.path} could not be loaded: {type(e).__name__}: {e}."
        if isinstance(job, Read):
            return partial(machine.read, job, "", error)
        return partial(machine.loaded, job, error)
