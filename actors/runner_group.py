"""The actors that compute for one engine, its runners and its draft: how they are started, connected and replaced."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import zip_longest
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.draft import DraftActor, SocketDraft, StepTimes
from actors.executor import SocketExecutor
from actors.names import NAMESPACE, living_actors, new_name
from actors.placement import draft_options, runner_options
from actors.runner import ModelRunnerActor
from actors.transport import Listener
from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.executor import Executor
from runtime.core.types import CallboardError

logger = logging.getLogger(__name__)

_CONNECT_S = 30.0  # for a draft that has loaded its model to connect
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0  # between attempts to start a draft that does not start, doubling


class RunnerGroup:
    """The runners of one engine, by rank."""

    def __init__(self, config: EngineConfig, group: PlacementGroup, gpu: bool) -> None:
        self._config, self._group, self._gpu = config, group, gpu
        self.runners: list[Any] = []
        self._processes: list[int | None] = []

    def start(self) -> tuple[Executor, ModelInfo]:
        """A fresh group of runners, loaded and connected; what was left of the old one is killed."""
        config = self._config
        for runner, process in zip_longest(self.runners, self._processes):
            _kill(runner, process)
        self._processes = []
        actor: Any = ray.remote(**ModelRunnerActor.REMOTE)(ModelRunnerActor)
        self.runners = [
            actor.options(**runner_options(config, self._group, rank, self._gpu)).remote()
            for rank in range(config.tensor_parallel_size)
        ]
        infos: list[ModelInfo] = _all([r.load.remote(config, rank) for rank, r in enumerate(self.runners)])
        executor = SocketExecutor(len(self.runners))
        for runner in self.runners:  # a closed executor wakes whoever waits for it, here and in the step thread
            runner.wait_for_exit.remote().future().add_done_callback(lambda _: executor.close())
        for rank, runner in enumerate(self.runners):
            host, process = _reach(runner)
            self._processes.append(process)
            runner.attach.remote(executor.address(rank, host))
        executor.accept()
        return executor, infos[0]


class DraftKeeper:
    """The draft of one engine, its own or one that several share, and another one whenever that is lost."""

    def __init__(self, config: EngineConfig, group: PlacementGroup, gpu: bool, application: str) -> None:
        self._config, self._group, self._gpu, self._application = config, group, gpu, application
        self._lost = threading.Event()
        self._attached: Any = None  # the actor that the step thread asks
        self._process: int | None = None

    def load(self) -> None:
        """A draft actor with its model loaded; if engines share one, the oldest that lives."""
        actor: Any = ray.remote(**DraftActor.REMOTE)(DraftActor)
        options = draft_options(self._config, self._group, self._gpu)
        if not self._config.draft_shared:
            self.draft = actor.options(**options).remote()
        elif not (living := living_actors(f"{self._application}/draft#")):
            name = new_name(f"{self._application}/draft")
            mine = actor.options(**options, name=name, namespace=NAMESPACE).remote()
            oldest = living_actors(f"{self._application}/draft#")[0]  # another engine may have been faster
            self.draft = mine if oldest == name else ray.get_actor(oldest, NAMESPACE)
        else:
            self.draft = ray.get_actor(living[0], NAMESPACE)
        (self._step_us,) = _all([self.draft.load.remote(self._config)])

    def keep(self, attach: Callable[[SocketDraft, StepTimes], None]) -> None:
        """Connect to the loaded draft, and to another one whenever it is gone; `attach` is given each connection."""
        self._connect(attach)
        threading.Thread(target=self._replace, args=(attach,), name="draft-keeper", daemon=True).start()

    def kill(self) -> None:
        """Another draft takes the place of this one, which does not answer."""
        hung, self._attached = self._attached, None
        process, self._process = self._process, None
        if hung is not None:
            logger.error("the draft does not answer")
            _kill(hung, process)

    def _connect(self, attach: Callable[[SocketDraft, StepTimes], None]) -> None:
        try:
            host, process = _reach(self.draft)
        except RayError:
            self.load()
            host, process = _reach(self.draft)
        with closing(Listener()) as listener:
            self.draft.attach.remote(listener.invite(host))
            accepted = listener.accept(_CONNECT_S)
        if accepted is None:
            raise CallboardError(f"The draft did not connect within {_CONNECT_S:.0f} s.")
        self.draft.wait_for_exit.remote().future().add_done_callback(lambda _: self._lost.set())
        attach(SocketDraft(accepted[1]), self._step_us)
        if self._process is not None:
            os.close(self._process)
        self._attached, self._process = self.draft, process

    def _replace(self, attach: Callable[[SocketDraft, StepTimes], None]) -> None:
        pause = _RETRY_S
        while True:
            self._lost.wait()
            self._lost.clear()
            logger.warning("the draft is gone; starting another")
            try:
                self._connect(attach)
                pause = _RETRY_S
            except Exception as e:  # whatever it is: the engine goes on without a draft
                logger.warning("the draft did not start: %s", e)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)
                self._lost.set()


def host_address() -> str:
    """This node's address, as other nodes of the cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _reach(actor: Any) -> tuple[str, int | None]:
    """Where the actor reaches this process by TCP; on the same node an empty host, and a descriptor of its process."""
    ((node, pid),) = _all([actor.location.remote()])
    if node != ray.get_runtime_context().get_node_id():
        return host_address(), None
    with suppress(ProcessLookupError):  # its end is heard of soon
        return "", os.pidfd_open(pid)
    return "", None


def _kill(actor: Any, process: int | None) -> None:
    """End an actor. A process that is stopped or hangs does not hear what Ray tells it, and for some ten seconds would
    keep its place, which the next one needs."""
    ray.kill(actor)
    if process is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def _all(refs: list[Any]) -> list[Any]:
    """The results of Ray calls, waited for in a thread: `ray.get` would block the actor's event loop."""
    return [future.result() for future in [ref.future() for ref in refs]]
