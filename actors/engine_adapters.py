"""The adapters (LoRA) of one engine: what each name means there, and how its runners get them while steps go on.

    apply(entries)  ->  a thread reads the files  ->  an index  ->  all runners load it  ->  requests may ask for it
    a name is gone  ->  no new request gets what it meant  ->  the last one ends  ->  the index is free
    a name is said again  ->  it means what it did until its successor is loaded, and then that is like one that is gone

The step thread owns all of it. The other thread only reads files and waits for the runners, one adapter after another.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from actors.adapters import AdapterEntry, AdapterState
from actors.executor import RunnersLost
from runtime.core.config import EngineConfig
from runtime.core.scheduler import Scheduler
from runtime.core.types import CallboardError
from runtime.loading.adapters import read_adapter

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # to load one, where runners are lost meanwhile: it may be what kills them
_HELD_S = 1.0  # requests may ask so long for what had a name before: fronts learn of its successor meanwhile
_T = TypeVar("_T")

LoadAdapter = Callable[[int, str], None]  # lets all runners load the adapter in a folder as the one of an index


class EngineAdapters:
    """Names, and what the runners have loaded for them."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        load: LoadAdapter,
        call: Callable[[Callable[[], Any]], Future[Any]],
        rebuild: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """`call` has the step thread do something, `rebuild` is there what gets fresh runners (by `restart`), and
        `changed` is told when a name means something else, or when one that was being loaded has been."""
        self._config, self._scheduler, self._table = config, scheduler, scheduler.adapters
        self._load_onto, self._call, self._rebuild, self._changed = load, call, rebuild, changed
        self._states: dict[str, AdapterState] = {}  # by name
        self._paths: dict[str, str] = {}  # by digest: what the runners have
        self._num_loading = 0
        self._is_leaving = False  # the runners have something that has no name any more
        self._runners = threading.Lock()  # around their start and whatever they load
        self._num_starts = 0
        self._entries: queue.SimpleQueue[AdapterEntry] = queue.SimpleQueue()
        threading.Thread(target=self._load_all, name="adapters", daemon=True).start()

    def load_at_start(self) -> None:
        """Load what the settings name, before there are requests; raises CallboardError if something cannot be."""
        for name, path in self._config.adapters.items():
            self._states[name] = AdapterState(entry := AdapterEntry(name, path))
            digest = self._digest_of(path)
            if (index := self._reserve(entry, digest)) is not None:
                self._load_onto(index, path)
                self._serve(entry, digest)

    # ---- the step thread ------------------------------------------------------------------------------------------

    def states(self) -> list[AdapterState]:
        """The state of every name, as fronts are told."""
        return list(self._states.values())

    def is_awaited(self, digest: str) -> bool:
        """True if requests for this adapter must wait: it may be one of those that are being loaded."""
        return bool(digest and self._num_loading) and digest not in self._paths

    def apply(self, entries: Iterable[AdapterEntry]) -> None:
        """A front has said what names mean; what is older than what is known already, means nothing."""
        has_changed = False
        for entry in entries:
            known = self._states.get(entry.name)
            if known is not None and entry.version <= known.entry.version:
                continue
            self._is_leaving = has_changed = True
            before = (known.digest or known.held) if known is not None else ""
            if entry.path:
                self._states[entry.name] = AdapterState(entry, held=before if known and known.entry.path else "")
                self._num_loading += 1
                self._entries.put(entry)
            else:
                self._states[entry.name] = AdapterState(entry, before)
        if has_changed:
            self._changed()
            self.release_unused()

    def release_unused(self) -> None:
        """Called now and then: forget what has no name any more and is used by no request."""
        if not self._is_leaving:
            return
        named = frozenset[str]().union(*(state.digests for state in self._states.values()))
        for digest in self._paths.keys() - named:
            self._table.close(digest)
            if not self._scheduler.uses_adapter(self._table.loaded[digest]):
                self._table.release(digest)
                del self._paths[digest]
        self._is_leaving = bool(self._paths.keys() - named)
        leaving = [state for state in self._states.values() if state.digest and not state.is_served]
        for state in leaving:
            if state.digest in named or state.digest not in self._paths:
                self._states[state.entry.name] = AdapterState(state.entry)
                self._changed()

    def restart(self, start: Callable[[], _T], fail: Callable[[str, str], None]) -> _T:
        """Let `start` get fresh runners, and give these all that the old ones had, before requests go on. `fail` is
        told of each adapter that they could not be given, and why."""
        with self._runners:
            started = start()
            self._num_starts += 1
            for digest, path in list(self._paths.items()):
                try:
                    if self._digest_of(path) != digest:
                        raise CallboardError(f"The files of the adapter {digest} have changed since it was loaded.")
                    self._load_onto(self._table.loaded[digest], path)
                except RunnersLost:
                    raise
                except CallboardError as e:
                    fail(digest, str(e))
                    self._lose(digest, str(e))
        return started

    def _lose(self, digest: str, error: str) -> None:
        self._table.release(digest)
        del self._paths[digest]
        for name, state in self._states.items():
            held = state.held if state.held != digest else ""
            if state.digest == digest:
                self._states[name] = AdapterState(state.entry, error=error if state.entry.path else "", held=held)
            else:
                self._states[name] = msgspec.structs.replace(state, held=held)

    def _is_wanted(self, entry: AdapterEntry) -> bool:
        return self._states[entry.name].entry == entry

    def _reserve(self, entry: AdapterEntry, digest: str) -> int | None:
        """The index that runners shall load it as; None if there is nothing to load."""
        if digest not in self._paths:
            return self._table.reserve(digest) if self._is_wanted(entry) else None
        if self._is_wanted(entry):
            self._serve(entry, digest)
        return None

    def _serve(self, entry: AdapterEntry, digest: str) -> None:
        self._paths.setdefault(digest, entry.path)
        self._table.open(digest)
        before = self._states[entry.name].held
        self._states[entry.name] = AdapterState(entry, digest, held=before if before != digest else "")
        if self._states[entry.name].held:
            timer = threading.Timer(_HELD_S, self._call, (partial(self._let_go, entry),))
            timer.daemon = True
            timer.start()

    def _let_go(self, entry: AdapterEntry) -> None:
        """No new request gets what had the name before."""
        if self._is_wanted(entry):
            self._states[entry.name] = msgspec.structs.replace(self._states[entry.name], held="")
            self._is_leaving = True
            self._changed()

    def _settle(self, entry: AdapterEntry, digest: str, index: int | None, error: str) -> None:
        """The loading of an entry has come to its end; it had that `index`."""
        self._num_loading -= 1
        if index is not None and (error or not self._is_wanted(entry)):
            self._table.release(digest)
        elif index is not None:
            self._serve(entry, digest)
        if error and self._is_wanted(entry):
            logger.warning("adapter %s: %s", entry.name, error)
            self._states[entry.name] = AdapterState(entry, error=error, held=self._states[entry.name].held)
        self._changed()

    # ---- the thread that loads --------------------------------------------------------------------------------------

    def _load_all(self) -> None:
        while True:
            self._load(self._entries.get())

    def _load(self, entry: AdapterEntry) -> None:
        digest, index, error = "", None, ""
        try:
            digest = self._digest_of(entry.path)
            index = self._call(partial(self._reserve, entry, digest)).result()
            if index is not None:
                self._give(entry, index)
        except CallboardError as e:
            error = str(e)
        except Exception as e:
            logger.exception("adapter %s could not be loaded", entry.name)
            error = f"The adapter {entry.name!r} could not be loaded: {type(e).__name__}: {e}."
        self._call(partial(self._settle, entry, digest, index, error)).result()

    def _digest_of(self, path: str) -> str:
        adapter = read_adapter(path)
        adapter.check_rank(self._config.max_lora_rank)
        return adapter.digest

    def _give(self, entry: AdapterEntry, index: int) -> None:
        """Let the runners load it; those that are lost meanwhile are replaced."""
        for _ in range(_ATTEMPTS):
            with self._runners:
                num_starts = self._num_starts
                try:
                    self._load_onto(index, entry.path)
                    return
                except RunnersLost as e:
                    why = str(e)
            self._call(partial(self._replace_lost, num_starts, why)).result()
        raise CallboardError(f"The model runners were lost {_ATTEMPTS} times while they loaded {entry.name!r}: {why}")

    def _replace_lost(self, num_starts: int, why: str) -> None:
        """In the step thread: fresh runners, unless these are there already."""
        if self._num_starts == num_starts:
            self._rebuild(why)
