"""The engines of an application as Ray knows them: which there are, and how to connect to one."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.names import NAMESPACE, living_actors
from actors.transport import Address
from runtime.core.config import ModelInfo
from runtime.core.types import CallboardError


class RayDirectory:
    """The living engine actors whose names begin with `prefix`; used from a process on any node."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    async def engines(self) -> list[str]:
        """Their names, oldest first."""
        return await asyncio.to_thread(living_actors, self._prefix)

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        """An address for one connection, and the engine's model; raises CallboardError if it has none now."""
        engine: Any = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        try:
            found: tuple[Address, ModelInfo] = await engine.open_link.remote(ray.get_runtime_context().get_node_id())
        except RayError as e:
            raise plain_error(e) from e
        return found


def find_engines(prefix: str) -> list[Any]:
    """The living engine actors whose names begin with `prefix`, oldest first."""
    return [ray.get_actor(name, NAMESPACE) for name in living_actors(prefix)]


def plain_error(error: RayError) -> CallboardError:
    """The one sentence behind a failed Ray call, without its remote traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CallboardError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return CallboardError(lines[-1] if lines else type(cause).__name__)
