"""Access to stored responses in a Serve application's other fronts, by Ray calls.

A response's id contains its front's id, from which the name of the front's actor follows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from actors.ray.names import SERVE_NAMESPACE, serve_actors
from runtime.base.types import CallboardError
from serve_app.apis.responses.store import ResponseStore, gone
from serve_app.protocol.errors import ApiError

_ANSWER_S = 5.0  # even a busy front answers within milliseconds
_LISTING_S = 1.0  # seconds between two listings of Ray's actors

Answer = TypeVar("Answer")


class RayFronts:
    """All fronts of this process's application; implements `Fronts`."""

    def __init__(self) -> None:
        self._id = serve.get_replica_context().replica_id
        self.own = self._id.unique_id
        self._actors: dict[str, Any] = {}  # actors by front, in the last listing
        self._names: frozenset[str] = frozenset()  # names of Serve's actors in the last listing
        self._listed_at = -_LISTING_S  # when the last listing began
        self._listing: asyncio.Task[None] | None = None  # scheduled or running
        # A Ray call waits for the head node, so it does not use a thread for requests.
        self._thread = ThreadPoolExecutor(1, "fronts")

    async def call(self, front: str, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_S):
                actor = await self._actor(front)
                return await actor.__ray_call__.remote(_answer, method, *args)
        except RayTaskError as e:
            if isinstance(e.cause, CallboardError):
                raise e.cause from None
            raise
        except (ValueError, ActorDiedError):  # the actor does not exist, or has ended
            self._actors.pop(front, None)
            self._names -= {self._name_of(front)}
            raise gone(front) from None
        except (RayError, TimeoutError) as e:
            text = "The front with this response does not answer now; try again."
            raise ApiError(503, text, code="front_unavailable", retry_after_s=1.0) from e

    async def _actor(self, front: str) -> Any:
        """Return the front's actor; raises ValueError without one.

        Clients can send any id, so this looks up only listed fronts, and lists them at most once a second."""
        if front not in self._actors:
            name, asked_at = self._name_of(front), time.monotonic()
            while name not in self._names and self._listed_at < asked_at:
                if self._listing is None:
                    self._listing = asyncio.create_task(self._list())
                await asyncio.shield(self._listing)
            if name not in self._names:
                raise ValueError(f"Serve has no actor {name!r}.")
            self._actors[front] = await self._ask_ray(ray.get_actor, name, SERVE_NAMESPACE)
        return self._actors[front]

    def _name_of(self, front: str) -> str:
        return replace(self._id, unique_id=front).to_full_id_str()

    async def _list(self) -> None:
        """List Serve's actors when the last listing is old enough."""
        try:
            await asyncio.sleep(self._listed_at + _LISTING_S - time.monotonic())
            self._listed_at = time.monotonic()
            self._names = await self._ask_ray(serve_actors)
            self._actors = {f: actor for f, actor in self._actors.items() if self._name_of(f) in self._names}
        finally:
            self._listing = None

    async def _ask_ray(self, function: Callable[..., Answer], *arguments: str) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class StoreOnLoop:
    """A front's store for calls by other fronts. It runs each call on the front's own event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self._store, self._loop, self._thread = store, asyncio.get_running_loop(), threading.get_ident()

    def call(self, method: str, *args: Any) -> Any:
        if threading.get_ident() == self._thread:
            return getattr(self._store, method)(*args)

        async def call() -> Any:
            return getattr(self._store, method)(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_ANSWER_S)


def _answer(replica: object, method: str, *args: Any) -> Any:
    """Call the store of the front in this process."""
    front: Any = serve.get_replica_context().servable_object
    return front.stored_responses.call(method, *args)
