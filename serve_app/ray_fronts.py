"""The fronts of a Serve application, which ask one another for stored responses by Ray calls.

A front is an actor that Ray finds by its name, and that name follows from the front's id, which each response's id has.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from runtime.core.types import CallboardError
from serve_app.errors import ApiError
from serve_app.response_store import ResponseStore, gone

_NAMESPACE = "serve"  # of Serve's own actors
_ANSWER_S = 5.0  # a front that is busy answers within milliseconds


class RayFronts:
    """All fronts of the application that this process belongs to, as `Fronts` describes them."""

    def __init__(self) -> None:
        self._id = serve.get_replica_context().replica_id
        self.own = self._id.unique_id
        self._actors: dict[str, Any] = {}  # those that were asked before
        # Ray answers when its head node does. A thread that waits for it is none of those that requests need.
        self._thread = ThreadPoolExecutor(1, "fronts")

    async def ask(self, front: str, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_S):
                actor = await self._actor(front)
                return await actor.__ray_call__.remote(_answer, method, *args)
        except RayTaskError as e:
            if isinstance(e.cause, CallboardError):
                raise e.cause from None
            raise
        except (ValueError, ActorDiedError):  # Ray knows no actor of that name, or it has ended since
            self._actors.pop(front, None)
            raise gone(front) from None
        except (RayError, TimeoutError) as e:
            text = "The front that keeps this response does not answer now; ask again."
            raise ApiError(503, text, code="front_unavailable", retry_after_s=1.0) from e

    async def _actor(self, front: str) -> Any:
        if front not in self._actors:
            name = replace(self._id, unique_id=front).to_full_id_str()
            loop = asyncio.get_running_loop()
            self._actors[front] = await loop.run_in_executor(self._thread, ray.get_actor, name, _NAMESPACE)
        return self._actors[front]


class AskedStore:
    """A front's store as other fronts reach it: on the thread of its own event loop, whichever thread Ray calls on."""

    def __init__(self, store: ResponseStore) -> None:
        self._store, self._loop, self._thread = store, asyncio.get_running_loop(), threading.get_ident()

    def ask(self, method: str, *args: Any) -> Any:
        if threading.get_ident() == self._thread:
            return getattr(self._store, method)(*args)

        async def ask() -> Any:
            return getattr(self._store, method)(*args)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_ANSWER_S)


def _answer(replica: object, method: str, *args: Any) -> Any:
    """Runs in the process of the front that is asked."""
    front: Any = serve.get_replica_context().servable_object
    return front.responses.ask(method, *args)
