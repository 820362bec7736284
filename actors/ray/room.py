"""Room for a model that wakes up: while Ray lacks its resources, idle engines of other models end.

The least recently used model ends first, and busy ones are waited for. Ray's accounts decide: an engine's placement
group reserves its processes' planned memory, or GPUs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import ray
from ray.exceptions import RayError

from actors.ray.placement import has_room
from actors.ray.private import free_resources
from actors.wire.engine_client import Idleness

logger = logging.getLogger("ray.serve")

_POLL_S = 0.5  # seconds between two looks at Ray's accounts
_WATCH_S = 2.0  # seconds between two looks for a model without engines
_IDLE_S = 1.0  # an engine that has just started gets its first request within this


class Sleeper(Protocol):
    """The engines of a model, as `EngineGroup` has them."""

    def engines(self) -> list[str]:
        """Return the ids of the connected engines."""
        ...

    async def keep(self, seconds: float | None) -> list[Idleness]:
        """Let the engines end after this idle time, unless it is None. Returns their idle times."""
        ...


def next_to_end(idle: Mapping[str, Sequence[Idleness]]) -> str | None:
    """Return the least recently used model among the idle ones; None if all have requests.

    A model that a client wants to keep forever ends last."""
    found = {
        model: (any(math.isinf(each.keep_s) for each in engines), -min(each.idle_s for each in engines))
        for model, engines in idle.items()
        if engines and all(each.idle_s >= _IDLE_S for each in engines)
    }
    return min(found, key=lambda model: found[model], default=None)


class Room:
    """Makes room for one model at the cost of others."""

    def __init__(self, others: Mapping[str, Sleeper], is_short: Callable[[str], Awaitable[bool]]) -> None:
        """`others` are the models that may sleep. `is_short` is true while Ray lacks resources for a model."""
        self._others, self._is_short = others, is_short
        self.waits: dict[str, str] = {}  # why a model waits, by its name

    def wait_of(self, model: str) -> str:
        """Return why a model waits, empty if it does not."""
        return self.waits.get(model, "")

    async def make(self, model: str) -> None:
        """End idle engines of other models while `model` lacks resources. Runs until it is cancelled."""
        ending: str | None = None
        try:
            while True:
                await asyncio.sleep(_POLL_S)
                if ending is not None and self._others[ending].engines():
                    continue
                ending = None
                if not await self._is_short(model):
                    self.waits.pop(model, None)
                    continue
                ending = await self._end_another(model)
        finally:
            self.waits.pop(model, None)

    async def watch(self, model: str, engines: Sleeper, needs: str) -> None:
        """Note while Ray lacks `needs` for the first engine of `model`. Runs until it is cancelled."""
        while True:
            with suppress(RayError):  # the head is away
                if not engines.engines() and await self._is_short(model):
                    self._note(model, f"waits for a machine with {needs}")
                else:
                    self.waits.pop(model, None)
            await asyncio.sleep(_WATCH_S)

    async def _end_another(self, model: str) -> str | None:
        """Let another model end and return its name; None if all are busy."""
        idle = {name: await group.keep(None) for name, group in self._others.items() if name != model}
        if (other := next_to_end(idle)) is None:
            if busy := [name for name, engines in idle.items() if engines]:
                self._note(model, f"waits for memory; {', '.join(busy)} must be idle first")
            return None
        seconds = min(each.idle_s for each in idle[other])
        self._note(model, f"waits for memory; {other}, idle for {seconds:.0f} s, ends first")
        await self._others[other].keep(0.0)
        return other

    def _note(self, model: str, sentence: str) -> None:
        if self.waits.get(model) != sentence:
            logger.info("%s %s.", model, sentence)
        self.waits[model] = sentence


async def lacks_resources(replicas: str, wanted: list[dict[str, float]]) -> bool:
    """True if a placement group of these replicas is pending and no machine has room for it.

    `replicas` begins their names in Serve, and `wanted` has their bundles."""

    def look() -> bool:
        table = ray.util.placement_group_table()
        pending = any(each["state"] == "PENDING" and each["name"].startswith(replicas) for each in table.values())
        return pending and not has_room(wanted, free_resources())

    return await asyncio.to_thread(look)
