"""The adapters (LoRA) of one engine: the thread and the calls of runners around `adapter_machine.py`, which decides.

step thread      events -> AdapterMachine -> actions;  Restore and End are done here
adapters thread  Read and Load, one after another;     each answer is an event for the step thread
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from actors.engine.link_server import Connection
from actors.engine.step_channel import RunnersLost
from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.adapter_machine import Action, AdapterMachine, End, Hold, Load, Read, Rebuild, Report, Restore
from actors.wire.messages import Adapters, Status
from runtime.core.scheduler import Scheduler
from runtime.features.adapter_table import AdapterTable, is_in_use
from runtime.loading.adapter_files import read_adapter
from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError

logger = logging.getLogger(__name__)

_HELD_S = 1.0  # new requests may have a name's former adapter so long: fronts receive its successor meanwhile
_LOOK_S = 1.0  # between two looks for fronts that are silent
_T = TypeVar("_T")

LoadAdapter = Callable[[int, str, str], None]  # lets all runners load a folder at an index, if its digest is this one
_Event = Callable[[], list[Action]]


class EngineAdapters:
    """Names of adapters, and what the runners have loaded for them."""

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
        call: makes the step thread call something.
        changed: is called when names or places have changed, or a load has ended.
        fail: ends the requests of a digest with an error."""
        self._config, self._load_onto, self._call = config, load, call
        self._changed, self._fail = changed, fail
        self._machine = AdapterMachine(
            scheduler.extras[AdapterTable], lambda index: is_in_use(index, scheduler.all_states()), config.adapters
        )
        self.is_awaited, self.check = self._machine.is_awaited, self._machine.check
        self.fell_asleep, self.woke_up = self._event(self._machine.fell_asleep), self._event(self._machine.woke_up)
        self.is_restarting = False  # runners are being started
        self.loss = ""  # why the runners must be started anew; empty if they need not
        self._runners = threading.Lock()  # around their start, and around each load
        self._jobs: queue.SimpleQueue[Read | Load] = queue.SimpleQueue()
        self._looked_at = 0.0  # when the fronts were last checked for silence
        threading.Thread(target=self._work, name="adapters", daemon=True).start()

    def load_at_start(self) -> None:
        """Load the adapters of the settings before there are requests. Raises CallboardError if one cannot be."""
        actions: list[Action] = []
        for name, path in self._config.adapters.items():
            actions += self._machine.said([AdapterEntry(name, path)], time.time_ns())
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
        """Add what has changed since the last Status that this front got."""
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
        """Take over what a front sent. Entries that are not newer have no effect."""
        self._run(self._machine.said(message.entries, time.time_ns()))
        if message.needs is not None:
            self._run(self._machine.needed(front, message.needs))

    def release_unused(self) -> None:
        """Called now and then: forget what no name means and no request uses. A silent front loses its connection."""
        if self._machine.is_leaving:
            self._run(self._machine.unused())
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at = now
            for front in self._machine.retaining():
                if isinstance(front, Connection) and front.is_silent:
                    front.close()

    def restart(self, start: Callable[[], _T]) -> _T:
        """Return what `start` returns, which starts fresh runners; they have all adapters before requests go on."""
        with self._runners:
            self.is_restarting = True  # from here on: a load that hangs must not look like a start
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
        """Load one adapter onto fresh runners; returns why they refuse it. Raises RunnersLost."""
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
                        _HELD_S, self._call, (self._event(partial(self._machine.hold_over, entry)),)
                    )
                    timer.daemon = True
                    timer.start()
                case Report():
                    self._changed()

    # ---- the thread that loads --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._call(self._event(self._attempt(self._jobs.get())))

    def _attempt(self, job: Read | Load) -> _Event:
        """Do a job; returns the event that it causes."""
        machine = self._machine
        try:
            if isinstance(job, Read):
                adapter = read_adapter(job.path)
                adapter.check_rank(self._config.max_lora_rank)
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
