"""The callers of a replica's handle: how a call was made, and whether its caller still lives.

In Serve's default transport a replica learns neither: its stream goes on when the caller has died."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from types import FrameType
from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]

from runtime.background import in_background

_POLL_S = 2.0  # seconds between two looks at Ray's list of processes

Caller = tuple[str, str]  # node and worker, as hexadecimal ids


class HandleCall(NamedTuple):
    """The call that runs the current method."""

    is_streamed: bool  # True if the caller wants a generator: handle.options(stream=True)
    caller: Caller | None  # None if the caller's router names none


def current_call() -> HandleCall:
    """Return the call of the running method; called before its first await."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (metadata := frame.f_locals.get("request_metadata")) is not None:
            return HandleCall(metadata.is_streaming, getattr(metadata, "caller", None))
        frame = frame.f_back
    return HandleCall(False, None)


class Callers:
    """Watches the processes with calls that run here."""

    def __init__(self) -> None:
        self._calls: dict[Caller, set[asyncio.Future[None]]] = defaultdict(set)
        self._polling: asyncio.Task[None] | None = None

    async def end(self, caller: Caller | None) -> None:
        """Return when this process has ended; never if it is None."""
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if caller is None:
            return await call
        self._calls[caller].add(call)
        if self._polling is None or self._polling.done():
            self._polling = in_background(asyncio.create_task(self._poll()), "watching the callers of handles")
        try:
            await call
        finally:
            self._calls[caller].discard(call)

    async def _poll(self) -> None:
        while self._calls:
            await asyncio.sleep(_POLL_S)
            self._calls = defaultdict(set, {caller: calls for caller, calls in self._calls.items() if calls})
            for caller in await asyncio.to_thread(_dead, [*self._calls]):
                for call in self._calls[caller]:
                    call.set_result(None)


def _dead(callers: list[Caller]) -> list[Caller]:
    """Return the callers with an ended process or node. While Ray's head is away, none has."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    living = {node["NodeID"] for node in nodes if node["Alive"]}
    return [(node, worker) for node, worker in callers if node not in living or not _lives(worker)]


def _lives(worker: str) -> bool:
    found = state._connect_and_get_accessor().get_worker_info(ray.WorkerID.from_hex(worker))
    return found is None or WorkerTableData.FromString(found).is_alive
