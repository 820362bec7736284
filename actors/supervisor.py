"""The supervisor: keeps one engine actor alive from within the Serve replica that owns its placement group.

A dead engine is replaced by a new one, where the replicas' links find it: the newest of its name counts. An engine that
cannot be started three times in a row is given up: `failed` tells why, and Serve replaces the whole replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from actors.engine import EngineActor
from actors.frames import LinkAddress
from actors.link import EngineLink
from actors.names import NAMESPACE, living_actors, new_name
from actors.placement import engine_options
from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.types import CallboardError

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_PAUSE_S = 1.0  # between attempts to start an engine
_DRAIN_POLL_S = 0.1
DRAINING = "The server is shutting down and takes no new requests; try again later."


class Supervisor:
    """Starts the engine `name` and replaces it when it dies."""

    def __init__(self, config: EngineConfig, name: str, group: PlacementGroup, gpu: bool) -> None:
        self._config, self._name, self._group, self._gpu = config, name, group, gpu
        self.failed = ""
        self.num_restarts = 0

    async def start(self) -> None:
        """Returns when the engine is ready; raises CallboardError if its model cannot be loaded."""
        self._engine = await self._start_engine()
        self._watch = asyncio.create_task(self._keep_alive())

    async def drain(self, timeout_s: float) -> None:
        """Let the engine take no new requests, and wait until those that it has are done, at most `timeout_s`."""
        end = time.monotonic() + timeout_s
        with contextlib.suppress(RayError):  # a dead engine has nothing to finish
            await self._engine.drain.remote(DRAINING)
            while (await self._engine.num_live.remote()) and time.monotonic() < end:
                await asyncio.sleep(_DRAIN_POLL_S)

    async def _start_engine(self) -> Any:
        actor: Any = ray.remote(**EngineActor.REMOTE)(EngineActor)
        options = engine_options(self._group) | {"name": new_name(self._name), "namespace": NAMESPACE}
        application = self._name.partition("/")[0]
        start = self._config, self._group, self._gpu, os.getpid(), self.num_restarts, application
        engine = actor.options(**options).remote(*start)
        try:
            await engine.start.remote()
        except RayError as e:
            ray.kill(engine)
            raise plain_error(e) from e
        return engine

    async def _keep_alive(self) -> None:
        while True:
            try:
                await self._engine.forever.remote()
                ray.kill(self._engine)  # its process lives, its step thread does not
                why = "its step thread ended"
            except RayError as e:
                why = str(plain_error(e))
            logger.warning("engine %s is gone: %s; starting another", self._name, why)
            self.num_restarts += 1
            for failures in range(1, _MAX_FAILURES + 1):
                try:
                    self._engine = await self._start_engine()
                    break
                except CallboardError as e:
                    logger.warning("engine %s did not start (attempt %d): %s", self._name, failures, e)
                    reason = str(e)
                    await asyncio.sleep(_PAUSE_S)
            else:
                self.failed = f"The engine could not be restarted: {reason}"
                return


def plain_error(error: RayError) -> CallboardError:
    """The one sentence behind a failed Ray call, without its remote traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CallboardError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return CallboardError(lines[-1] if lines else type(cause).__name__)


def find_engine(name: str) -> Any:
    """The newest living engine actor `name`; raises CallboardError if there is none."""
    names = living_actors(name)
    if not names:
        raise CallboardError(f"There is no engine {name!r} in this Ray cluster.")
    return ray.get_actor(names[-1], NAMESPACE)


def link_to(name: str) -> EngineLink:
    """A link to the engine `name`, from a replica on any node."""

    async def find() -> tuple[LinkAddress, ModelInfo]:
        engine = await asyncio.to_thread(find_engine, name)
        node_id = ray.get_runtime_context().get_node_id()
        try:
            found: tuple[LinkAddress, ModelInfo] = await engine.open_link.remote(node_id)
        except RayError as e:
            raise plain_error(e) from e
        return found

    return EngineLink(find)
