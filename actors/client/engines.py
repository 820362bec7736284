"""The engines of an application for a client: which ones, and streams that are read once, at their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from actors.front.client_stream import ClientStream
from actors.front.engine_group import EngineGroup
from actors.ray.directory import RayDirectory
from actors.ray.names import living_actors
from actors.wire.engine_client import ignore_engine
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput

_ENGINE = "/engine/"  # follows the application in engine names
_POLL_S = 0.5
_REPLACED_S = 5.0  # time without the model's engines, before another model's engines count


class _WholeStream(ClientStream):
    """A stream that wakes its reader once, at its end: at 50,000 tokens a second, a task a token is too much."""

    __slots__ = ("ended",)

    def __init__(self, request: Request) -> None:
        super().__init__(request, ignore_engine)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Tokens wait in `pending`."""

    def fail(self, error: CallboardError) -> None:
        self.error = error
        self._end()

    def end(self, reason: FinishReason, error: str = "") -> None:
        output = self.output()
        output.finish_reason, output.error = reason, error
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class RolloutGroup(EngineGroup):
    """An EngineGroup that returns whole outputs."""

    async def complete(self, request: Request) -> RequestOutput:
        """Return the whole output of a request at its end. A cancelled call aborts the request.

        Raises EngineRefusal if it is refused, and CallboardError if it fails otherwise."""
        if self._draining is not None:  # refused for ever: see OneModelDirectory
            raise CallboardError(self._draining)
        stream = _WholeStream(request)
        with self.adapters.stream_of(request.adapter):
            self._assign(stream)
            try:
                await stream.ended
            finally:
                self._release(stream)
        if stream.error is not None:
            raise stream.error
        return stream.output()

    @property
    def num_places(self) -> int:
        """Requests that the usable engines compute at once."""
        return sum(link.info.max_num_seqs for link in self.links.values() if link.usable)

    @property
    def least_serial(self) -> int:
        """The fewest updates that the weights of a usable engine have."""
        versions = [link.info.weights for link in self.links.values() if link.usable]
        return min((version.serial for version in versions if version is not None), default=0)


class OneModelDirectory(RayDirectory):
    """The engines of the model that a client has connected to. Its prompts and weights fit no other model."""

    on_replaced: Callable[[str], None]  # called with a sentence when only engines of another model live

    async def changed(self, known: list[str]) -> list[str]:
        while True:
            with suppress(TimeoutError):
                return await asyncio.wait_for(super().changed(known), None if known else _REPLACED_S)
            application = self._prefix.partition(_ENGINE)[0]
            if await self._ask_ray(living_actors, f"{application}{_ENGINE}"):
                self.on_replaced(f"The application {application!r} serves another model now; connect another client.")


def find_engines(application: str | None, timeout_s: float) -> str:
    """Wait for an engine, and return the name prefix of its application's engines.

    While two models are being swapped, the newest engine's model counts. Raises CallboardError after the timeout, or if
    `application` is None and there are several."""
    deadline = time.monotonic() + timeout_s
    while not (names := living_actors("" if application is None else f"{application}{_ENGINE}")) or not (
        prefix := _newest_model(names, application)
    ):
        if time.monotonic() > deadline:
            whose = "No application" if application is None else f"The application {application!r} has no engine, and"
            what = "of this Ray has an engine" if application is None else "none started"
            raise CallboardError(f"{whose} {what} within {timeout_s:g} s; start it with `callboard serve`.")
        time.sleep(_POLL_S)
    return prefix


def _newest_model(names: Iterable[str], application: str | None) -> str:
    engines = [name for name in names if _ENGINE in name]
    found = dict.fromkeys(name.partition(_ENGINE)[0] for name in engines)
    if application is None and len(found) > 1:
        raise CallboardError(f"This Ray has engines of {', '.join(map(repr, found))}; name the application.")
    return engines[-1].rpartition("/")[0] + "/" if engines else ""
