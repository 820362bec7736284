"""The adapters (LoRA) of an application as a front knows them, and how it has engines load and unload them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from actors.adapters import AdapterEntry, AdapterState
from actors.engine_client import EngineRefusal, Refusal
from runtime.core.types import CallboardError

if TYPE_CHECKING:
    from actors.link import EngineLink


class FrontAdapters:
    """The meaning of each name (adapters.py), from what the engines of these links tell."""

    def __init__(self, links: Callable[[], Sequence[EngineLink]]) -> None:
        self._links = links
        self._entries: dict[str, AdapterEntry] = {}  # what was said last
        self._served: dict[str, AdapterState] = {}  # by name: as an engine served it last
        self._news = asyncio.Event()  # set, and replaced, when an engine has told something

    def served(self) -> dict[str, AdapterState]:
        """Those that requests may ask for, by name.

        One of the settings is there as long as an engine has it, or all engines are away; another one until somebody
        unloads it: an engine that lacks it loads it, and its requests wait for that."""
        usable = [link for link in self._links() if link.usable]
        return {
            name: state
            for name, state in self._served.items()
            if state.entry.version or not usable or any(state.digest in link.digests for link in usable)
        }

    def on_status(self, link: EngineLink) -> None:
        """An engine has told what names mean there; it is told what it does not know."""
        for name, state in link.adapters.items():
            known = self._entries.get(name)
            if known is None or known.version < state.entry.version:
                self._set(state.entry)
            if state.entry == self._entries[name]:
                if state.is_served:
                    self._served[name] = state
                elif state.held:
                    self._served.setdefault(name, AdapterState(state.entry, state.held))
        for each in self._links():
            self._tell(each)
        self._wake()

    def on_lost(self) -> None:
        """An engine is gone, or one was: who waits for it need not."""
        self._wake()

    async def load(self, name: str, path: str) -> None:
        """Returns when all engines that can be reached have it. Until one has, the name means what it did.

        Raises EngineRefusal if there is none, and CallboardError if one cannot load it; none serves it then, but all
        what had the name before, as far as its files are still there."""
        if not any(link.usable for link in self._links()):
            raise EngineRefusal("There is no engine now that could load an adapter; try again later.", Refusal.DRAINING)
        known = self._entries.get(name)
        before = known.path if known is not None else ""
        states = await self._say(name, path)
        error = next((state.error for state in states if state.error), "")
        if len({state.digest for state in states}) > 1:
            error = error or f"The engines find different files in {path!r}; give all nodes the same."
        if error:
            if before != path:
                await self._say(name, before)
            elif any(state.digest for state in states):  # no folder has what the others go on with
                await self._say(name, "")
            raise CallboardError(error)

    async def unload(self, name: str) -> None:
        """From now on no new request gets it; returns when those that have it have come to their end."""
        await self._say(name, "")

    async def _say(self, name: str, path: str) -> list[AdapterState]:
        """Tell all engines what a name means now; returns what became of it at those that can be reached, when that
        is settled."""
        known = self._entries.get(name)
        entry = AdapterEntry(name, path, max(time.time_ns(), known.version + 1 if known is not None else 0))
        self._set(entry)
        for link in self._links():
            self._tell(link)
        while True:
            states = [link.adapters.get(name) for link in self._links() if link.usable]
            done = [s for s in states if s is not None and s.entry.version >= entry.version and s.is_settled]
            if len(done) == len(states) and (done or not path):
                return done
            await self._news.wait()

    def _set(self, entry: AdapterEntry) -> None:
        self._entries[entry.name] = entry
        if not entry.path:
            self._served.pop(entry.name, None)

    def _tell(self, link: EngineLink) -> None:
        """Tell an engine all that it does not know; those of the settings are its own."""
        known = {name: state.entry.version for name, state in link.adapters.items()}
        news = [entry for entry in self._entries.values() if entry.version > known.get(entry.name, 0)]
        if news and link.connected:
            link.tell_adapters(news)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
