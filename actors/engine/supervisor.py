"""The supervisor: keeps one engine actor alive from within the Serve replica that owns its placement group.

The supervisor replaces a dead or frozen engine, and fronts find the new one in the directory. After three failed starts
in a row it gives up: `failed` has the reason, and Serve replaces the whole replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.engine.actor import EngineActor
from actors.engine.autoscaling import EngineFigures
from actors.ray.directory import announce_engine, has_healthy_engine, plain_error
from actors.ray.names import NAMESPACE, model_of, new_name, titled
from actors.ray.placement import engine_options
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_PAUSE_S = 1.0  # seconds between attempts to start an engine
_DRAIN_POLL_S = 0.1
_HEALTH_PERIOD_S = 1.0
_HEALTH_TIMEOUT_S = 10.0  # an engine without an answer is frozen; its streams left it long before
_START_TIMEOUT_S = 60.0  # the same while it loads its model, which slows its answers
_FIGURES_TIMEOUT_S = 1.0
STOPPED = "The server stopped before this answer was complete; send the request again later."
DRAINING = "The server is shutting down and takes no new requests; try again later."


class Supervisor:
    """Starts the engine `name`, and replaces it when it dies."""

    def __init__(self, config: EngineConfig, name: str, group: PlacementGroup, gpu: bool) -> None:
        self._config, self._name, self._group, self._gpu = config, name, group, gpu
        self.failed: str | None = None  # why starts have failed for good; None while they succeed
        self.num_restarts = 0
        self._engine: Any = None  # until the first start

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises CallboardError if its model cannot be loaded."""
        self._engine = await self._start_engine()
        self._watch = asyncio.create_task(self._keep_alive())
        self._watch.add_done_callback(self._unwatched)

    async def drain(self, timeout_s: float) -> None:
        """Drain the engine: it takes no new requests. Wait until its requests end, at most `timeout_s`.

        During a model swap the old engine serves until its fronts disconnect, at most half of `timeout_s`."""
        if self._engine is None:
            return
        with contextlib.suppress(RayError, TimeoutError):  # a dead engine has nothing to finish
            async with asyncio.timeout(timeout_s):
                end = time.monotonic() + timeout_s / 2
                while time.monotonic() < end and await self._is_being_replaced():
                    if not (await self._engine.stats.remote())["connections"]:
                        break
                    await asyncio.sleep(_DRAIN_POLL_S)
                await self._engine.drain.remote(DRAINING)
                while await self._engine.num_live.remote():
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def _is_being_replaced(self) -> bool:
        """True if another model's engine takes requests, and no other engine with this model does."""
        model = model_of(self._name) + "/"
        if await has_healthy_engine(model, except_for=self._name):
            return False
        return await has_healthy_engine(model_of(model_of(self._name)) + "/", except_for=model)  # its deployment

    async def figures(self) -> EngineFigures | None:
        """Return the load of the engine; None while it restarts or is frozen."""
        try:
            found: EngineFigures = await asyncio.wait_for(self._engine.figures.remote(), _FIGURES_TIMEOUT_S)
        except (RayError, TimeoutError):
            return None
        return found

    async def _start_engine(self) -> Any:
        actor = titled(EngineActor, "engine", self._name)
        options = engine_options(self._group) | {"name": new_name(self._name), "namespace": NAMESPACE}
        start = self._config, self._group, self._gpu, self.num_restarts, model_of(self._name), os.getpid()
        # In a thread: the call registers a name with Ray's head node, and blocks while the head node is away.
        engine = await asyncio.to_thread(lambda: actor.options(**options).remote(*start))
        announcing = asyncio.create_task(asyncio.to_thread(announce_engine, self._name.partition("/")[0]))
        in_background(announcing, "the announcement of an engine")
        try:
            self._pid = await engine.pid.remote()
            await self._while_answering(engine, engine.start.remote(), _START_TIMEOUT_S)
        except RayError as e:
            await _kill(engine)
            raise plain_error(e) from e
        except CallboardError:
            await _kill(engine)
            raise
        return engine

    def _unwatched(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("the supervisor of engine %s has failed", self._name, exc_info=error)
            self.failed = f"The engine's supervisor failed: {type(error).__name__}: {error}"

    async def _while_answering(self, engine: Any, call: Awaitable[object], timeout_s: float) -> None:
        """Wait for a call to an engine, and check meanwhile that its process answers.

        Raises the RayError of the call, and CallboardError if the process does not answer for `timeout_s`."""
        end = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((end,), timeout=_HEALTH_PERIOD_S))[0]:
                await asyncio.wait_for(engine.health.remote(), timeout_s)
        except TimeoutError:
            # Ray cannot end a stopped process. Supervisor and engine share a bundle, so they share a node.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            raise CallboardError(f"The engine's process has not answered for {timeout_s:g} s.") from None
        finally:
            end.cancel()
        await end

    async def _loss(self) -> str:
        """Wait until the engine must be replaced, and return the reason."""
        try:
            await self._while_answering(self._engine, self._engine.wait_for_exit.remote(), _HEALTH_TIMEOUT_S)
        except RayError as e:
            return str(plain_error(e))
        except CallboardError as e:
            return str(e)
        return "its step thread ended"

    async def _keep_alive(self) -> None:
        while True:
            why = await self._loss()
            logger.warning("engine %s is gone: %s; starting another", self._name, why)
            await _kill(self._engine)
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


async def _kill(engine: Any) -> None:
    """Kill an actor, in a thread: the call waits for Ray's head node."""
    await asyncio.to_thread(ray.kill, engine)
