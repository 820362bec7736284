"""The engine actor: the process of one replica's step loop. It owns the replica's runners and draft."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.util.placement_group import PlacementGroup

from actors.engine.autoscaling import EngineFigures
from actors.engine.loop import EngineLoop
from actors.ray.names import default_weight_store, drafts_of, engine_id
from actors.ray.process import SWITCH_INTERVAL_S, freeze_garbage
from actors.runners.runner_group import DraftKeeper, RunnerGroup, host_address
from actors.wire.engine_client import Idleness, WeightsRefused
from actors.wire.link_messages import EngineLoading
from actors.wire.process_meter import ProcessMeter
from actors.wire.transport import Address
from actors.wire.weight_calls import A, WeightCall
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.loading.resolve import with_known_draft

_CHECK_S = 1.0  # seconds between checks of the runners, the steps and the draft
_LOADING_S = 1.0  # seconds between progress reports to a front that waits for the model


class EngineActor:
    """The engine's process. It owns the runner actors, which therefore die with it."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0}

    def __init__(
        self, config: EngineConfig, group: PlacementGroup, gpu: bool, num_restarts: int, model: str, supervisor: int
    ) -> None:
        """`model` is the part of the name that the model's engines share, `supervisor` the supervisor's process id."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if config.weight_updates and config.weight_store is None:
            config = replace(config, weight_store=default_weight_store(model))
        config = with_known_draft(config)
        self._config, self._num_restarts, self._supervisor = config, num_restarts, supervisor
        self.runners = RunnerGroup(config, group, gpu)
        self.draft = DraftKeeper(config, group, gpu, drafts_of(model)) if config.has_draft_model else None
        self._loaded = asyncio.Event()
        self._keep_s = -1.0  # see Idleness

    async def start(self) -> ModelInfo:
        """Load the model. Raises CallboardError with the sentence of the runner that failed."""
        if self.draft is not None:  # before the runner, which takes all remaining memory
            await asyncio.to_thread(self.draft.load)
        self._loop = await asyncio.to_thread(
            EngineLoop,
            self._config,
            self.runners.start,
            self.runners.load_adapter,
            self.runners.set_sleep,
            self.runners.call_all,
            self._num_restarts,
            self._pause_file(),
        )
        self._loop.meter.processes = ProcessMeter(self._local_processes)
        if self.draft is not None:
            await asyncio.to_thread(self.draft.keep, self._loop.attach_draft)
        self._loaded.set()
        self._watch = in_background(asyncio.create_task(self._check_progress()), "the check of the engine's progress")
        freeze_garbage()
        return self._loop.info

    def _pause_file(self) -> Path | None:
        """The file of `EngineWeights`. A restarted engine has the same id; ids of other servers differ."""
        folder, name = self._config.weight_store, ray.get_runtime_context().get_actor_name()
        return None if folder is None or name is None else Path(folder, f"paused-{engine_id(name)}")

    async def open_link(self, node_id: str) -> tuple[Address, ModelInfo]:
        """Wait until the model is loaded; return an address for one connection of a front on `node_id`, and the model.

        Raises EngineLoading after _LOADING_S."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._loaded.wait(), _LOADING_S)
        if not self._loaded.is_set():
            phases = await self.phases()
            last = phases[-1].splitlines()[0].partition(" s  ")[2] if phases else "starting the model runners"
            raise EngineLoading(f"The engine is loading its model ({last}).")
        same_node = node_id == ray.get_runtime_context().get_node_id()
        return self._loop.links.open(same_node, host_address()), self._loop.info

    async def pid(self) -> int:
        """Return the id of this process, also while the model loads."""
        return os.getpid()

    async def health(self) -> str | None:
        """Return None if the engine takes requests, else one sentence with the reason."""
        return self._loop.health() if self._loaded.is_set() else "The engine is loading its model."

    async def stats(self) -> dict[str, Any]:
        """Return counters and gauges of the engine, and its process id."""
        return {**self._loop.stats(), "pid": os.getpid()}

    async def figures(self) -> EngineFigures:
        """Return the load and the limits, for the scaling policy."""
        return replace(self._loop.figures(), keep_s=self._keep_s)

    async def keep(self, seconds: float | None) -> Idleness:
        """Let this engine end after this idle time from now on, unless it is None."""
        if seconds is not None:
            self._keep_s = seconds
        return Idleness(self._loop.figures().idle_s if self._loaded.is_set() else 0.0, self._keep_s)

    def _local_processes(self) -> list[tuple[str, int]]:
        """Return role and id of this engine's living processes on this machine."""
        own = [("engine", os.getpid()), ("supervisor", self._supervisor)]
        draft = self.draft.local_pid if self.draft is not None else None
        runners = [("runner", pid) for pid in self.runners.local_pids]
        return [*own, *runners, *([("draft", draft)] if draft is not None else [])]

    async def num_live(self) -> int:
        """Return the number of requests that run or wait."""
        return len(self._loop.core.scheduler.requests) if self._loaded.is_set() else 0

    async def phases(self) -> list[str]:
        """Return rank 0's startup log: its phases in seconds, and its memory plan."""
        lines: list[str] = await self.runners.runners[0].phases.remote() if self.runners.runners else []
        return lines

    async def weights(self, call: WeightCall[A]) -> A:
        """Update the weights (actors/engine/weights.py). Raises WeightsRefused and CallboardError."""
        if not self._loaded.is_set():
            raise WeightsRefused("The engine is loading its model; try again later.", "unavailable")
        return await asyncio.wrap_future(self._loop.weights.call(call))

    async def drain(self, reason: str) -> None:
        """Take no new requests. Fronts use other engines, or wait for one to start, or answer 503 with `reason`.

        Live requests continue."""
        if self._loaded.is_set():  # Serve may end a replica that starts another engine
            await asyncio.wrap_future(self._loop.drain(reason))

    async def wait_for_exit(self) -> None:
        """Return when the step thread has ended, which is a fault. The call fails when this process dies."""
        await asyncio.to_thread(self._loop.join)

    async def _check_progress(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.runners.check()
            if not self._loop.check_progress():
                os._exit(1)  # the supervisor starts another engine, and the links resubmit
            if self.draft is not None and self._loop.draft is not None and self._loop.draft.is_hung:
                # The call needs Ray's head node; the next checks must not wait for it.
                killing = asyncio.get_running_loop().run_in_executor(None, self.draft.kill)
                in_background(killing, "the end of a draft that hangs")
