"""An application's adapters (LoRA) as a front stores them; it has the engines load and unload them.

The names follow the rules in `actors/wire/adapter_entry.py`. A front also sends each engine its streams' adapters
(needs). The engine keeps or loads these until the streams have ended, so that each stream can move to it (C8)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from actors.front.link import EngineLink
from actors.wire.adapter_entry import FORGET_AFTER_S, MAX_NAMES, AdapterEntry, AdapterState
from actors.wire.engine_client import EngineRefusal, Refusal, Replaceable
from runtime.base.types import CallboardError

_EXPECTED_S = 5.0  # a request that was prepared for so long, and not submitted, has ended
_FREE_S = 5.0  # longest wait for a place, which another front's new stream may keep


class _NoPlace(CallboardError):
    """Raised if engines lack a free place; `idle` has the last uses of adapters that are idle on every engine."""

    def __init__(self, text: str, idle: dict[str, int]) -> None:
        super().__init__(text)
        self.idle = idle


class FrontAdapters:
    """The meaning of each name, from the states that engines send."""

    def __init__(self, links: Callable[[], Sequence[EngineLink]]) -> None:
        self._links = links
        self._entries: dict[str, AdapterEntry] = {}  # each name's newest entry
        self._settings: set[str] = set()  # names of the engines' command lines; their entries are never dropped
        self._served: dict[str, AdapterState] = {}  # the last state in which an engine served each name
        self._streams: Counter[str] = Counter()  # live streams by digest
        self._paths: dict[str, str] = {}  # adapter folders of engines and streams, by digest
        self._needs: dict[str, str] = {}  # folders by digest, as last sent to all engines
        self._news = asyncio.Event()  # set and replaced at each message of an engine
        self._expected: dict[str, float] = {}  # times of requests that are about to be submitted, by digest
        self._replacing = asyncio.Lock()  # held by a load that may unload others

    def served(self) -> dict[str, AdapterState]:
        """The adapters that requests may use, by name.

        A name of the command line is served while an engine has its adapter, or no engine is usable. Any other name is
        served until it is unloaded: an engine without its adapter loads it while the requests wait."""
        usable = [link for link in self._links() if link.usable]
        return {
            name: state
            for name, state in self._served.items()
            if state.entry.version or not usable or any(state.digest in link.digests for link in usable)
        }

    @contextmanager
    def stream_of(self, digest: str) -> Iterator[None]:
        """Have every engine keep or load an adapter during the life of a stream."""
        if not digest:
            yield
            return
        self._streams[digest] += 1
        self._expected.pop(digest, None)
        if digest not in self._needs:
            self._update_needs()
        try:
            yield
        finally:
            self._streams[digest] -= 1
            if not self._streams[digest]:
                del self._streams[digest]
                if not any(state.digest == digest for state in self._served.values()):
                    self._update_needs()
                    self._wake()

    def on_status(self, link: EngineLink, changed: Sequence[AdapterState], is_first: bool) -> None:
        """Take the states that an engine sent. Send it the entries and needs that it lacks.

        The first Status of a connection has all states."""
        has_news = False
        for state in changed:
            name = state.entry.name
            if state.is_setting:
                self._settings.add(name)
            known = self._entries.get(name)
            if known is None or known.version < state.entry.version:
                has_news = True
                self._set(state.entry)
            if state.entry == self._entries[name]:
                if state.is_served:
                    self._served[name], self._paths[state.digest] = state, state.entry.path
                elif state.held:
                    self._served.setdefault(name, AdapterState(state.entry, state.held))
        self._paths |= link.kept
        if has_news:
            self._forget_old()
        for each in self._links() if has_news else [link]:
            self._send_newer(each)
        if is_first and self._needs:
            link.send_adapters([], self._needs)
        self._update_needs()
        known_digests = {digest for each in self._links() for digest in each.kept} | self._streams.keys()
        known_digests |= {state.digest for state in self._served.values()}
        self._paths = {digest: path for digest, path in self._paths.items() if digest in known_digests}
        self._wake()

    def on_lost(self) -> None:
        """An engine is gone: wake the calls that wait for it."""
        self._wake()

    def expect(self, digest: str) -> None:
        """Keep an adapter for a request that is about to be submitted."""
        if digest:
            self._expected[digest] = time.monotonic()

    async def load(self, name: str, path: str, replaceable: Replaceable | None = None) -> None:
        """Load an adapter as `_load` does. Without a place, the least recently used of `replaceable` are unloaded.

        Raises EngineRefusal if requests use all places, and the errors of `_load`."""
        if replaceable is None:
            return await self._load(name, path)
        async with self._replacing:
            while True:
                try:
                    return await self._load(name, path)
                except _NoPlace as e:
                    if (unused := self._least_used(e.idle, await replaceable())) is None:
                        text = f"Requests use all adapters that are loaded, so {name!r} has no place (max_loras)"
                        raise EngineRefusal(f"{text}; try again later.", Refusal.BUSY, 1.0) from e
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FREE_S):
                        await self.unload(unused)

    def _least_used(self, idle: dict[str, int], replaceable: Collection[str]) -> str | None:
        """Return a name that no request uses, the least recently used one; None if there is none."""
        now = time.monotonic()
        kept = self._streams.keys() | {digest for digest, at in self._expected.items() if now - at < _EXPECTED_S}
        kept |= {
            state.digest for name, state in self._served.items() if name not in replaceable or not state.entry.version
        }
        found = {name: idle[s.digest] for name, s in self._served.items() if s.digest in idle.keys() - kept}
        return min(found, key=found.__getitem__, default=None)

    async def _load(self, name: str, path: str) -> None:
        """Load an adapter on all usable engines. Until an engine has loaded it, the name keeps its former adapter.

        Raises EngineRefusal without a usable engine, or at the limit of names. Raises CallboardError if an engine
        cannot load it: then no engine serves it, and each serves the former adapter if its files still exist."""
        if not any(link.usable for link in self._links()):
            raise EngineRefusal("There is no engine now that could load an adapter; try again later.", Refusal.DRAINING)
        known = self._entries.get(name)
        self._forget_old()
        if known is None and len(self._entries) >= MAX_NAMES:
            text = (
                f"There are {MAX_NAMES} names of adapters, the limit; unload some, or try again when those that were "
                f"unloaded are forgotten, after {FORGET_AFTER_S} s."
            )
            raise EngineRefusal(text, Refusal.BUSY, float(FORGET_AFTER_S))
        before = known.path if known is not None else ""
        states = await self._broadcast(name, path)
        error = next((state.error for state in states if state.error), "")
        if len({state.digest for state in states}) > 1:
            error = error or f"The engines find different files in {path!r}; give all nodes the same."
        if error:
            if before != path:
                await self._broadcast(name, before)
            elif any(state.digest for state in states):  # no folder has the adapter that the others still serve
                await self._broadcast(name, "")
            full = [state.idle for state in states if state.idle is not None]
            if full and len(full) == sum(bool(state.error) for state in states):
                common = set(full[0]).intersection(*full)
                raise _NoPlace(error, {digest: max(idle[digest] for idle in full) for digest in common})
            raise CallboardError(error)

    async def unload(self, name: str) -> None:
        """Refuse new requests for the name. Returns when the streams of its adapter have ended."""
        state = self._served.get(name)
        await self._broadcast(name, "")
        while state is not None and self._is_kept(state.digest):
            await self._news.wait()

    def _is_kept(self, digest: str) -> bool:
        """True if streams use an adapter without a name. An engine that started meanwhile may have it too."""
        if any(state.digest == digest for state in self._served.values()):
            return False
        return digest in self._streams or any(link.usable and digest in link.kept for link in self._links())

    async def _broadcast(self, name: str, path: str) -> list[AdapterState]:
        """Send all engines a new entry. Wait until the usable ones have settled it, and return their states."""
        known = self._entries.get(name)
        entry = AdapterEntry(name, path, max(time.time_ns(), known.version + 1 if known is not None else 0))
        self._set(entry)
        for link in self._links():
            self._send_newer(link)
        self._update_needs()
        while True:
            states = [link.adapters.get(name) for link in self._links() if link.usable]
            done = [s for s in states if s is not None and s.entry.version >= entry.version and s.is_settled]
            if not path and len(done) == len(states) - states.count(None):
                return done
            if path and done and len(done) == len(states):
                return done
            await self._news.wait()

    def _set(self, entry: AdapterEntry) -> None:
        self._entries[entry.name] = entry
        if not entry.path:
            self._served.pop(entry.name, None)

    def _forget_old(self) -> None:
        """Drop old entries without a folder. An old entry that no engine can load becomes such an entry."""
        now_ns, usable = time.time_ns(), [link for link in self._links() if link.usable]
        for name, entry in list(self._entries.items()):
            if name in self._settings or not entry.version or not entry.is_older(now_ns):
                continue
            states = [link.adapters.get(name) for link in usable]
            if not entry.path:
                if not any(state is not None and state.digest for state in states):
                    del self._entries[name]
            elif states and all(s is not None and s.entry == entry and s.error and not s.held for s in states):
                self._set(AdapterEntry(name, "", entry.version + 1))
                for link in usable:
                    self._send_newer(link)

    def _send_newer(self, link: EngineLink) -> None:
        """Send an engine all entries that are newer than its own. It knows its own command line's."""
        if not link.usable:
            return  # its first Status triggers another call
        known = {name: state.entry.version for name, state in link.adapters.items()}
        news = [entry for entry in self._entries.values() if entry.version > known.get(entry.name, 0)]
        if news:
            link.send_adapters(news, None)

    def _update_needs(self) -> None:
        """Send all engines the adapters of live streams if these changed. A sent adapter with a name stays."""
        named = {state.digest for state in self._served.values()}
        wanted = self._streams.keys() | (self._needs.keys() & named)
        needs = {digest: self._paths[digest] for digest in wanted if digest in self._paths}
        if needs != self._needs:
            self._needs = needs
            for link in self._links():
                if link.usable:
                    link.send_adapters([], needs)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
