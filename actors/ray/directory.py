"""An application's engines in Ray's list of actors: finds them, and opens links to them.

Ray's own list of named actors is the directory, so it does not depend on our processes. It has all actors in the
cluster, so a front reads it only with a reason, and then once a second for a while:

    an engine has a new name        its supervisor calls `announce_engine`, which reaches all fronts
    an engine has died              `open_link` to it fails
    an announcement has been lost   no read for 30 s

A name appears before its engine is ready, and `open_link` then waits for the engine itself. The list is unavailable
while Ray's head node is away. Then no actor can start, and open links do not use Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from actors.ray.names import NAMESPACE, SERVE_NAMESPACE, living_actors, serve_actors
from actors.ray.private import replicas_of
from actors.wire.engine_client import Idleness, WeightsRefused
from actors.wire.transport import Address
from actors.wire.weight_calls import A, WeightCall
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError

_LISTING_S = 1.0  # seconds between two reads of Ray's list while it may change
_SETTLED_S = 10.0  # after this long without a reason it changes no more
_IDLE_S = 30.0  # seconds between two reads then
_REPLACED_S = 0.2  # time until the list has the new name of an engine that died
_HEALTH_S = 1.0  # limit for an answer; a frozen engine gives none

Answer = TypeVar("Answer")


_directories: WeakSet[RayDirectory] = WeakSet()  # this process's directories


class RayDirectory:
    """The living engine actors with names that begin with `prefix`, for a process on any node."""

    def __init__(self, prefix: str, idle_s: float = _IDLE_S) -> None:
        """`idle_s` is the time between two reads of Ray's list without a reason."""
        self._prefix, self._idle_s = prefix, idle_s
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that waits in `changed`
        self._settled_at = 0.0  # the loop's time
        self._actors: dict[str, Any] = {}  # known handles, by name: later calls do not use the list
        # Calls block while the head node is away, so they have their own thread.
        self._thread = ThreadPoolExecutor(1, "directory")
        self._has_reason = asyncio.Event()
        _directories.add(self)

    def read_again(self) -> None:
        """Read Ray's list again soon: an engine has started or died. Any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._has_reason.set)

    async def changed(self, known: list[str]) -> list[str]:
        """Wait until the names differ from `known`, and return them, oldest first."""
        loop = self._loop = asyncio.get_running_loop()
        self._settled_at = loop.time() + _SETTLED_S
        while (names := await self._ask_ray(living_actors, self._prefix)) == known:
            with suppress(TimeoutError):
                period = _LISTING_S if loop.time() < self._settled_at else self._idle_s
                await asyncio.wait_for(self._has_reason.wait(), period)
                self._has_reason.clear()
                self._settled_at = loop.time() + _SETTLED_S
                await asyncio.sleep(_REPLACED_S)
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}
        return names

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        """Return an address for one connection, and the model. Raises CallboardError if the engine has none now."""
        engine = await self._actor(name)
        try:
            found: tuple[Address, ModelInfo] = await engine.open_link.remote(ray.get_runtime_context().get_node_id())
        except RayError as e:
            if isinstance(e, ActorDiedError):
                self._has_reason.set()
            raise plain_error(e) from e
        return found

    async def weights(self, name: str, call: WeightCall[A]) -> A:
        """Call an engine about its weights. Raises CallboardError, WeightsRefused among them."""
        try:
            engine = await self._actor(name)
            answer: A = await engine.weights.remote(call)
        except ValueError as e:
            text = "An engine is missing in Ray's list; try again when it is there, or another has started."
            raise WeightsRefused(text, "unavailable") from e
        except RayTaskError as e:
            raise plain_error(e) from e
        except RayError as e:
            raise WeightsRefused(f"An engine is lost: {plain_error(e)}", "unavailable") from e
        return answer

    async def keep(self, name: str, seconds: float | None) -> Idleness | None:
        """Let an engine end after this idle time, unless it is None. Returns None if it is gone."""
        with suppress(ValueError, RayError, TimeoutError):
            engine = await self._actor(name)
            found: Idleness = await asyncio.wait_for(engine.keep.remote(seconds), _HEALTH_S)
            return found
        return None

    async def _actor(self, name: str) -> Any:
        """Return a handle. A link may outlive its engine's entry in the list, which may return. Raises ValueError."""
        if name not in self._actors:
            self._actors[name] = await self._ask_ray(ray.get_actor, name, NAMESPACE)
        return self._actors[name]

    async def _ask_ray(self, function: Callable[..., Answer], *arguments: str) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def announce_engine(application: str) -> None:
    """Make the fronts of an application read Ray's list, because an engine has a new name. Waits for Ray's head node.

    Fronts that start now read it later. A lost call costs a front `_IDLE_S`."""
    for name in serve_actors(replicas_of(application, "Front")):
        with suppress(ValueError, RayError):  # it has ended since
            ray.get_actor(name, SERVE_NAMESPACE).__ray_call__.remote(_read_again)


def _read_again(replica: object) -> None:
    for directory in [*_directories]:
        directory.read_again()


def find_engines(prefix: str) -> list[Any]:
    """Return the living engine actors with names that begin with `prefix`, oldest first."""
    return [ray.get_actor(name, NAMESPACE) for name in living_actors(prefix)]


async def has_healthy_engine(prefix: str, except_for: str = "-") -> bool:
    """True if an engine takes requests. Its name must begin with `prefix`, and not with `except_for`."""

    async def is_healthy(engine: Any) -> bool:
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(engine.health.remote(), _HEALTH_S) is None
        return False

    names = [name for name in await asyncio.to_thread(living_actors, prefix) if not name.startswith(except_for)]
    with suppress(ValueError):  # an engine has ended since
        engines = [await asyncio.to_thread(ray.get_actor, name, NAMESPACE) for name in names]
        return any(await asyncio.gather(*map(is_healthy, engines)))
    return False


def plain_error(error: RayError) -> CallboardError:
    """Return the cause of a failed Ray call as one sentence, without the remote traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CallboardError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return CallboardError(lines[-1] if lines else type(cause).__name__)
