"""The engines of an application as Ray knows them: which there are, and how to connect to one.

Ray's own list of named actors is the directory, so there is no process whose end would take it along. It is asked once
a second for names, which are there before an engine is; that an engine is ready, the engine itself says at once to
whoever waits for an address. While Ray's head node is away there is no list, and nobody needs one: no actor can be
started then, and links need no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from actors.ray.names import NAMESPACE, living_actors
from actors.wire.transport import Address
from runtime.spec.config import ModelInfo
from runtime.spec.types import CallboardError

_LISTING_S = 1.0  # between two looks at Ray's list
_REPLACED_S = 0.2  # an engine that has died is in it under its new name by then
_HEALTH_S = 1.0  # a frozen engine does not answer

Answer = TypeVar("Answer")


class RayDirectory:
    """The living engine actors whose names begin with `prefix`; used from a process on any node."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._actors: dict[str, Any] = {}  # those that were asked before: no list is needed to ask them again
        # Ray answers when its head node does. A thread that waits for it is none of those that requests need.
        self._thread = ThreadPoolExecutor(1, "directory")
        self._has_died = asyncio.Event()

    async def changed(self, known: list[str]) -> list[str]:
        """Their names, oldest first, as soon as these are others than `known`."""
        while (names := await self._ask_ray(living_actors, self._prefix)) == known:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_died.wait(), _LISTING_S - _REPLACED_S)
            self._has_died.clear()
            await asyncio.sleep(_REPLACED_S)
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}
        return names

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        """An address for one connection, and the engine's model; raises CallboardError if it has none now."""
        if name not in self._actors:
            self._actors[name] = await self._ask_ray(ray.get_actor, name, NAMESPACE)
        engine = self._actors[name]
        try:
            found: tuple[Address, ModelInfo] = await engine.open_link.remote(ray.get_runtime_context().get_node_id())
        except RayError as e:
            if isinstance(e, ActorDiedError):
                self._has_died.set()
            raise plain_error(e) from e
        return found

    async def _ask_ray(self, function: Callable[..., Answer], *arguments: str) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def find_engines(prefix: str) -> list[Any]:
    """The living engine actors whose names begin with `prefix`, oldest first."""
    return [ray.get_actor(name, NAMESPACE) for name in living_actors(prefix)]


async def has_healthy_engine(prefix: str, except_for: str = "-") -> bool:
    """There is a living engine actor that takes requests, whose name begins with `prefix` and not with `except_for`."""

    async def is_healthy(engine: Any) -> bool:
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(engine.health.remote(), _HEALTH_S) is None
        return False

    names = [name for name in await asyncio.to_thread(living_actors, prefix) if not name.startswith(except_for)]
    with suppress(ValueError):  # one of them has ended since
        engines = [await asyncio.to_thread(ray.get_actor, name, NAMESPACE) for name in names]
        return any(await asyncio.gather(*map(is_healthy, engines)))
    return False


def plain_error(error: RayError) -> CallboardError:
    """The one sentence behind a failed Ray call, without its remote traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CallboardError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return CallboardError(lines[-1] if lines else type(cause).__name__)
