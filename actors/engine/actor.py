"""The engine actor: the process of one model replica's step loop, and the owner of its runners and its draft."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.engine.autoscaling import EngineFigures
from actors.engine.loop import EngineLoop
from actors.engine.runner_group import DraftKeeper, RunnerGroup, host_address
from actors.ray.process import SWITCH_INTERVAL_S, freeze_garbage
from actors.wire.messages import EngineLoading
from actors.wire.process_meter import ProcessMeter
from actors.wire.transport import Address
from runtime.spec.config import EngineConfig, ModelInfo

_CHECK_S = 1.0  # between two looks at the runners, the steps and the draft
_LOADING_S = 1.0  # a front that waits for the model to be loaded hears this often how far it is


class EngineActor:
    """The engine's process: owns the runner actors, which therefore die with it."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0}

    def __init__(
        self,
        config: EngineConfig,
        group: PlacementGroup,
        gpu: bool,
        num_restarts: int,
        application: str,
        supervisor: int,
    ) -> None:
        """`supervisor` is the id of its process, which is on this machine."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._config, self._num_restarts, self._supervisor = config, num_restarts, supervisor
        self.runners = RunnerGroup(config, group, gpu)
        self.draft = DraftKeeper(config, group, gpu, application) if config.has_draft_model else None
        self._loaded = asyncio.Event()

    async def start(self) -> ModelInfo:
        """Load the model. Raises CallboardError with the sentence of the runner that could not."""
        if self.draft is not None:  # before the runner, which takes what memory is left
            await asyncio.to_thread(self.draft.load)
        self._loop = await asyncio.to_thread(
            EngineLoop,
            self._config,
            self.runners.start,
            self.runners.load_adapter,
            self.runners.set_sleep,
            self._num_restarts,
        )
        self._loop.meter.processes = ProcessMeter(self._local_processes)
        if self.draft is not None:
            await asyncio.to_thread(self.draft.keep, self._loop.attach_draft)
        self._loaded.set()
        self._watch = asyncio.create_task(self._check_progress())
        freeze_garbage()
        return self._loop.info

    async def open_link(self, node_id: str) -> tuple[Address, ModelInfo]:
        """An address for one connection of a front on `node_id`, as soon as the model is loaded; raises EngineLoading
        when that takes a while."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._loaded.wait(), _LOADING_S)
        if not self._loaded.is_set():
            phases = await self.phases()
            last = phases[-1].splitlines()[0].partition(" s  ")[2] if phases else "starting the model runners"
            raise EngineLoading(f"The engine is loading its model ({last}).")
        same_node = node_id == ray.get_runtime_context().get_node_id()
        return self._loop.links.open(same_node, host_address()), self._loop.info

    async def pid(self) -> int:
        """The id of this process, also while the model is loaded."""
        return os.getpid()

    async def health(self) -> str | None:
        """None when it takes requests, else one sentence that says why not."""
        return self._loop.health() if self._loaded.is_set() else "The engine is loading its model."

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine, and its process id."""
        return {**self._loop.stats(), "pid": os.getpid()}

    async def figures(self) -> EngineFigures:
        """The load and the limits that the policy of scaling asks for."""
        return self._loop.figures()

    async def processes(self) -> list[tuple[str, str, int]]:
        """Role, node and id of the engine's process and of those that compute for it, as far as they live."""
        found = [("engine", ray.get_runtime_context().get_node_id(), os.getpid())]
        actors = [("runner", runner) for runner in self.runners.runners]
        if self.draft is not None:
            actors.append(("draft", self.draft.draft))
        for role, actor in actors:
            with suppress(RayError):
                found.append((role, *(await actor.location.remote())))
        return found

    def _local_processes(self) -> list[tuple[str, int]]:
        """Role and id of each process of this engine that is on this machine, as far as they live."""
        own = [("engine", os.getpid()), ("supervisor", self._supervisor)]
        draft = self.draft.local_pid if self.draft is not None else None
        runners = [("runner", pid) for pid in self.runners.local_pids]
        return [*own, *runners, *([("draft", draft)] if draft is not None else [])]

    async def num_live(self) -> int:
        """Requests that run or wait."""
        return len(self._loop.core.scheduler.requests) if self._loaded.is_set() else 0

    async def phases(self) -> list[str]:
        """How the runner of rank 0 started: the plan of its memory, and seconds."""
        lines: list[str] = await self.runners.runners[0].phases.remote() if self.runners.runners else []
        return lines

    async def drain(self, reason: str) -> None:
        """Take no new requests from now on: the fronts answer 503 for `reason`, unless there are other engines or one
        can be started. Live ones go on."""
        if self._loaded.is_set():  # Serve may end a replica that starts another engine
            await asyncio.wrap_future(self._loop.drain(reason))

    async def wait_for_exit(self) -> None:
        """Returns when the step thread has ended, which it never should; fails when this process dies."""
        await asyncio.to_thread(self._loop.join)

    async def _check_progress(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.runners.check()
            if not self._loop.check_progress():
                os._exit(1)  # the supervisor starts another engine, and the links resubmit
            if self.draft is not None and self._loop.draft is not None and self._loop.draft.is_hung:
                # Ray's head node has to answer, and the next looks must not wait for it.
                self._killing = asyncio.get_running_loop().run_in_executor(None, self.draft.kill)
