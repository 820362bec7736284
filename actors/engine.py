"""The engine actor: the process of one model replica's step loop, and the owner of its runners and its draft."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.draft import DraftActor, DraftKeeper, SocketDraft
from actors.engine_loop import EngineLoop
from actors.environment import freeze_garbage
from actors.executor import SocketExecutor
from actors.messages import EngineLoading
from actors.names import NAMESPACE, living_actors, new_name
from actors.placement import draft_options, runner_options
from actors.runner import SWITCH_INTERVAL_S, ModelRunnerActor
from actors.transport import Address, Listener
from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.executor import Executor
from runtime.core.types import CallboardError

logger = logging.getLogger(__name__)

_CONNECT_S = 30.0  # for a draft that has loaded its model to connect


class EngineActor:
    """The engine's process: owns the runner actors, which therefore die with it."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0}

    def __init__(
        self,
        config: EngineConfig,
        group: PlacementGroup,
        gpu: bool,
        supervisor_pid: int,
        num_restarts: int,
        application: str,
    ) -> None:
        self._supervisor_pid, self._num_restarts, self._application = supervisor_pid, num_restarts, application
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._config, self._group, self._gpu = config, group, gpu
        self._runners: list[Any] = []
        self._attached: Any = None  # the draft actor that the step thread asks
        self._loaded = False

    async def start(self) -> ModelInfo:
        """Load the model. Raises CallboardError with the sentence of the runner that could not."""
        if self._config.has_draft_model:  # before the runner, which takes what memory is left
            await asyncio.to_thread(self._load_draft)
        self._loop = await asyncio.to_thread(EngineLoop, self._config, self._start_runners, self._num_restarts)
        if self._config.has_draft_model:
            self._keeper = await asyncio.to_thread(DraftKeeper, self._start_draft)
        self._loaded = True
        self._watch = asyncio.create_task(self._check_progress())
        freeze_garbage()
        return self._loop.info

    async def open_link(self, node_id: str) -> tuple[Address, ModelInfo]:
        """An address for one connection of a replica on `node_id`; raises EngineLoading while there is none."""
        if not self._loaded:
            phases = await self.phases()
            last = phases[-1].splitlines()[0].partition(" s  ")[2] if phases else "starting the model runners"
            raise EngineLoading(f"The engine is loading its model ({last}).")
        same_node = node_id == ray.get_runtime_context().get_node_id()
        return self._loop.links.open(same_node, _host()), self._loop.info

    async def health(self) -> str:
        """Empty when healthy, else one sentence."""
        return self._loop.health()

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine, and its process id."""
        return {**self._loop.stats(), "pid": os.getpid()}

    async def num_live(self) -> int:
        """Requests that run or wait."""
        return len(self._loop.core.scheduler.requests)

    async def phases(self) -> list[str]:
        """How the runner of rank 0 started: the plan of its memory, and seconds."""
        lines: list[str] = await self._runners[0].phases.remote() if self._runners else []
        return lines

    async def runner_pids(self) -> list[int]:
        """Process ids of the runners, by rank."""
        return [pid for _, pid in await asyncio.gather(*(r.location.remote() for r in self._runners))]

    async def draft_pid(self) -> int:
        """Process id of the draft model's actor."""
        _, pid = await self._draft.location.remote()
        return int(pid)

    async def supervisor_pid(self) -> int:
        """Process id of the supervising replica."""
        return self._supervisor_pid

    async def abort(self, request_id: str) -> None:
        """End a request by its id, or all choices of one; an unknown one is no error."""
        self._loop.abort(request_id)

    async def drain(self, reason: str) -> None:
        """Take no new requests from now on: the replicas answer 503 for `reason`. Live ones go on."""
        await asyncio.wrap_future(self._loop.drain(reason))

    async def wait_for_exit(self) -> None:
        """Returns when the step thread has ended, which it never should; fails when this process dies."""
        await asyncio.to_thread(self._loop.join)

    async def _check_progress(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self._loop.check_progress():
                os._exit(1)  # the supervisor starts another engine, and the links resubmit
            if self._attached is not None and self._loop.draft is not None and self._loop.draft.is_hung:
                logger.error("the draft does not answer")
                hung, self._attached = self._attached, None
                ray.kill(hung)

    def _start_runners(self) -> tuple[Executor, ModelInfo]:
        """A fresh group of runners, loaded and connected; what was left of the old one is killed."""
        config = self._config
        for runner in self._runners:
            ray.kill(runner)
        actor: Any = ray.remote(**ModelRunnerActor.REMOTE)(ModelRunnerActor)
        self._runners = [
            actor.options(**runner_options(config, self._group, rank, self._gpu)).remote()
            for rank in range(config.tensor_parallel_size)
        ]
        infos: list[ModelInfo] = _all([r.load.remote(config, rank) for rank, r in enumerate(self._runners)])
        executor = SocketExecutor(len(self._runners))
        for runner in self._runners:  # a closed executor wakes whoever waits for it, here and in the step thread
            runner.wait_for_exit.remote().future().add_done_callback(lambda _: executor.close())
        here = ray.get_runtime_context().get_node_id()
        where = _all([r.location.remote() for r in self._runners])
        for rank, (runner, (node, _)) in enumerate(zip(self._runners, where, strict=True)):
            runner.attach.remote(executor.address(rank, "" if node == here else _host()))
        executor.accept()
        return executor, infos[0]

    def _load_draft(self) -> None:
        """A draft actor with its model loaded; if engines share one, the oldest that lives."""
        actor: Any = ray.remote(**DraftActor.REMOTE)(DraftActor)
        options = draft_options(self._config, self._group, self._gpu)
        if not self._config.draft_shared:
            self._draft = actor.options(**options).remote()
        elif not (living := living_actors(f"{self._application}/draft#")):
            name = new_name(f"{self._application}/draft")
            mine = actor.options(**options, name=name, namespace=NAMESPACE).remote()
            oldest = living_actors(f"{self._application}/draft#")[0]  # another engine may have been faster
            self._draft = mine if oldest == name else ray.get_actor(oldest, NAMESPACE)
        else:
            self._draft = ray.get_actor(living[0], NAMESPACE)
        (self._draft_us,) = _all([self._draft.load.remote(self._config)])

    def _start_draft(self, on_loss: Callable[[], None]) -> None:
        """Connect to the draft, or to a new one if that is gone."""
        try:
            ((node, _),) = _all([self._draft.location.remote()])
        except RayError:
            self._load_draft()
            ((node, _),) = _all([self._draft.location.remote()])
        here = ray.get_runtime_context().get_node_id()
        with closing(Listener(socket.SOCK_SEQPACKET)) as listener:
            self._draft.attach.remote(listener.invite("" if node == here else _host()))
            accepted = listener.accept(_CONNECT_S)
        if accepted is None:
            raise CallboardError(f"The draft did not connect within {_CONNECT_S:.0f} s.")
        self._draft.wait_for_exit.remote().future().add_done_callback(lambda _: on_loss())
        self._loop.attach_draft(SocketDraft(accepted[1]), self._draft_us)
        self._attached = self._draft


def _host() -> str:
    """This node's address, as other nodes of the cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _all(refs: list[Any]) -> list[Any]:
    """The results of Ray calls, waited for in a thread: `ray.get` would block the actor's event loop."""
    return [future.result() for future in [ref.future() for ref in refs]]
