"""The actors that compute for one engine, its runners and its draft: starts, connects and replaces them."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import closing, suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, NoReturn

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from actors.ray.directory import plain_error
from actors.ray.names import NAMESPACE, living_actors, new_name, titled
from actors.ray.placement import draft_options, runner_options
from actors.runners.draft import DraftActor, SocketDraft, StepMicroseconds
from actors.runners.rank_weights import P, T
from actors.runners.runner import ModelRunnerActor
from actors.runners.step_channel import RunnersLost, SocketExecutor
from actors.wire.transport import FrameSocket, Listener
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.core.executor import Executor

logger = logging.getLogger(__name__)

_STARTS = 2  # attempts, if ranks are lost meanwhile
_WATCH_S = 1.0  # seconds between checks of the ranks while they load
_BEGIN_S = 300.0  # limit until a rank's process reports its id; until then a stopped process looks like a slow one
_SLEEP_S = 300.0  # limit until a rank has copied its weights and sleeps or wakes; after this it hangs
_CONNECT_S = 30.0  # limit until a draft that has loaded its model connects
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0  # pause between a draft's failed starts, doubling


class LocalProcess:
    """A process of this machine, held by a descriptor: its id may be reused after its end."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if the process has ended."""
        self.pid, self._fd = pid, os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._fd)
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        return bool(self._end.poll(0))

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process, and it has not been continued."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state == "T"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


class Ranks:
    """One start's runners, by rank. They start together and end together.

    Their processes, handles, sockets and secrets are their own, so messages of other starts never reach them."""

    def __init__(self, runners: list[Any]) -> None:
        self.runners = runners
        self._processes: dict[int, LocalProcess] = {}  # processes by rank; on this machine only
        self._stopped: set[int] = set()  # ranks that were stopped at the last check
        self.executor = SocketExecutor(len(runners))

    def start(self, config: EngineConfig) -> ModelInfo:
        """Load the model and connect, in phases that all ranks begin together.

        Raises RunnersLost if a rank ends or stops meanwhile, and CallboardError if the model cannot be loaded."""
        executor, every_rank = self.executor, range(len(self.runners))
        places = self.call_all("location", within_s=_BEGIN_S)
        hosts = [self._locate(rank, *place) for rank, place in enumerate(places)]
        handles = self.call_all("join", *((config, rank) for rank in every_rank))
        offers: list[ModelInfo] = self.call_all("load", *((handles,) for _ in every_rank))
        num_kv_blocks = agreed_blocks(offers)
        info: ModelInfo = self.call_all("open", *((num_kv_blocks,) for _ in every_rank))[0]
        for runner in self.runners:  # a closed executor wakes its waiters, here and in the step thread
            runner.wait_for_exit.remote().future().add_done_callback(lambda _: executor.close())
        self.call_all("attach", *((executor.address(rank, hosts[rank]),) for rank in every_rank))
        executor.accept()
        return info

    def call_all(
        self, phase: str, *arguments: tuple[Any, ...], within_s: float = math.inf, while_open: bool = False
    ) -> list[Any]:
        """Call a method on all ranks at once, and return the results by rank.

        Args:
        arguments: each rank's arguments; none if the method takes none.
        within_s: time until a rank without an answer counts as lost.
        while_open: raise RunnersLost when the step channel closes, as it does if a rank hangs in a step.

        Raises RunnersLost at once if a rank is lost, though others may still wait for it."""
        end = time.monotonic() + within_s
        per_rank = arguments or [()] * len(self.runners)
        futures = [getattr(r, phase).remote(*args).future() for r, args in zip(self.runners, per_rank, strict=True)]
        running = set(futures)
        while running:
            done, running = wait(running, _WATCH_S, FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
            if (running or failed) and (lost := self._find_lost_soon() if failed else self.find_lost()) is not None:
                raise lost
            if failed:
                self._raise(failed[0].exception(), futures.index(failed[0]))
            if running and while_open and self.executor.closed is not None:
                raise self.executor.closed
            if running and time.monotonic() > end:
                late = min(map(futures.index, running))
                raise RunnersLost(f"Rank {late} has not answered within {within_s:.0f} s.", late)
        return [future.result() for future in futures]

    def _raise(self, error: BaseException | None, rank: int) -> NoReturn:
        if isinstance(error, RayActorError):
            raise RunnersLost(f"Rank {rank} is gone: {plain_error(error)}", rank)
        assert isinstance(error, RayError), "the base of all errors of Ray"
        sentence = plain_error(error)
        raise sentence if len(self.runners) == 1 else CallboardError(f"Rank {rank}: {sentence}")

    def find_lost(self, sure: bool = False) -> RunnersLost | None:
        """Return the loss of the first ended or stopped rank; None if all run.

        Called every second. Unless `sure`, a rank counts as stopped only if the last call found it stopped too."""
        for rank, process in list(self._processes.items()):
            if process.has_ended:
                return RunnersLost(f"Rank {rank} is gone: its process has ended.", rank)
        stopped = {rank for rank, process in list(self._processes.items()) if process.is_stopped}
        before, self._stopped = self._stopped, stopped
        if found := stopped if sure else stopped & before:
            return RunnersLost(f"Rank {min(found)} is stopped by a signal.", min(found))
        return None

    def _find_lost_soon(self) -> RunnersLost | None:
        """Call `find_lost` for up to _WATCH_S: other ranks may fail before the process of a killed rank has ended."""
        end = time.monotonic() + (_WATCH_S if len(self.runners) > 1 else 0.0)
        while (lost := self.find_lost(sure=True)) is None and time.monotonic() < end:
            time.sleep(_WATCH_S / 20)
        return lost

    def _locate(self, rank: int, node: str, pid: int) -> str:
        """Return the host by which a rank reaches this process; empty on the same machine."""
        host, process = _host_and_process(node, pid)
        if process is not None:
            self._processes[rank] = process
        return host

    @property
    def local_pids(self) -> list[int]:
        """The ids of the processes that are on this machine."""
        return [process.pid for process in list(self._processes.values())]

    def kill(self) -> None:
        """End all ranks, hung ones too."""
        self.executor.close()
        for rank, runner in enumerate(self.runners):
            _kill(runner, self._processes.pop(rank, None))


class RunnerGroup:
    """The runners of one engine, replaced when they are lost."""

    def __init__(self, config: EngineConfig, group: PlacementGroup, gpu: bool) -> None:
        self._config, self._group, self._gpu = config, group, gpu
        self._ranks: Ranks | None = None

    @property
    def runners(self) -> list[Any]:
        """The actors, by rank."""
        return self._ranks.runners if self._ranks is not None else []

    @property
    def local_pids(self) -> list[int]:
        """The ids of the processes that are on this machine."""
        return self._ranks.local_pids if self._ranks is not None else []

    def start(self) -> tuple[Executor, ModelInfo]:
        """Kill the old runners; return a fresh group, loaded and connected.

        If a rank is lost meanwhile, all start once more. Raises CallboardError if the model cannot be loaded."""
        for attempt in count(1):
            if self._ranks is not None:
                self._ranks.kill()
            self._ranks = Ranks(self._make_runners())
            try:
                info = self._ranks.start(self._config)
                return self._ranks.executor, info
            except CallboardError as e:
                self._ranks.kill()  # the others may wait for the one that failed
                if attempt == _STARTS or not isinstance(e, RunnersLost):
                    raise
                logger.warning("the runners are started again: %s", e)
        raise AssertionError("unreachable")

    def load_adapter(self, index: int, path: str, digest: str) -> None:
        """Load an adapter on all runners while they serve. Raises CallboardError, or RunnersLost if they are lost."""
        self.call_all(ModelRunnerActor.load_adapter, index, path, digest)

    def call_all(self, method: Callable[Concatenate[Any, P], T], *arguments: P.args, **by_name: P.kwargs) -> list[T]:
        """Call a method of all runners.

        Returns the results by rank. Raises CallboardError, or RunnersLost if they are lost."""
        ranks = self._ranks
        if ranks is None:
            raise RunnersLost("There are no runners.")
        return ranks.call_all(method.__name__, *[arguments for _ in ranks.runners], while_open=True)

    def set_sleep(self, level: int) -> None:
        """Put all runners to sleep (1), end them (2), or wake them (0). Asleep, they may get no plan.

        Raises CallboardError, or RunnersLost if they are lost."""
        ranks = self._ranks
        if ranks is None:
            raise RunnersLost("There are no runners.")
        if level == 2:
            self._ranks = None
            ranks.kill()
        else:
            ranks.call_all("sleep" if level else "wake", within_s=_SLEEP_S)

    def _make_runners(self) -> list[Any]:
        ranks = range(self._config.tensor_parallel_size)
        options = [runner_options(self._config, self._group, rank, self._gpu) for rank in ranks]
        actors = [titled(ModelRunnerActor, "runner", rank=rank) for rank in ranks]
        return [actor.options(**per_rank).remote() for actor, per_rank in zip(actors, options, strict=True)]

    def check(self) -> None:
        """Close the step channel if a rank is lost. Called every second while the runners serve.

        No other check finds a rank that stops between its last collective operation and its answer."""
        if (ranks := self._ranks) is not None and (lost := ranks.find_lost()) is not None:
            ranks.executor.close(lost)


def agreed_blocks(offers: list[ModelInfo]) -> int:
    """Return the number of KV blocks that fits all ranks. Raises CallboardError if their models differ otherwise."""
    first = offers[0]
    for rank, offer in enumerate(offers):
        for f in fields(offer):
            own, other = getattr(first, f.name), getattr(offer, f.name)
            if f.name != "num_kv_blocks" and own != other:
                raise CallboardError(
                    f"Rank {rank} has loaded another model than rank 0: its {f.name} is {other}, not {own}; give all "
                    "ranks the same files, settings and devices."
                )
    return min(offer.num_kv_blocks for offer in offers)


class DraftKeeper:
    """One engine's draft, its own or a shared one, replaced when it is lost.

    The connection's end shows the loss. No Ray call to the draft stays open: each would occupy one of its threads,
    also after the calling engine's death."""

    def __init__(self, config: EngineConfig, group: PlacementGroup, gpu: bool, shared_name: str) -> None:
        """`shared_name` is the name of a draft that engines share."""
        self._config, self._group, self._gpu, self._shared_name = config, group, gpu, shared_name
        self._attached: Any = None  # the actor that serves the step thread; None while it is replaced
        self._process: LocalProcess | None = None

    @property
    def local_pid(self) -> int | None:
        """The id of its process; None on another machine, or if another engine started it."""
        process = self._process
        return process.pid if process is not None and self._is_own else None

    def load(self) -> None:
        """Start a draft actor and load its model. If engines share one, use the oldest living draft."""
        shared = f"{self._shared_name}/shared" if self._config.draft_shared else None
        actor = titled(DraftActor, "draft", shared)
        options = draft_options(self._config, self._group, self._gpu)
        self._is_own = True
        if not self._config.draft_shared:
            self.draft = actor.options(**options).remote()
        elif not (living := living_actors(f"{self._shared_name}#")):
            name = new_name(self._shared_name)
            mine = actor.options(**options, name=name, namespace=NAMESPACE).remote()
            oldest = living_actors(f"{self._shared_name}#")[0]  # another engine may have started one first
            self._is_own = oldest == name
            self.draft = mine if self._is_own else ray.get_actor(oldest, NAMESPACE)
        else:
            self._is_own = False
            self.draft = ray.get_actor(living[0], NAMESPACE)
        (self._step_us,) = _wait_all([self.draft.load.remote(self._config)])

    def keep(self, attach: Callable[[SocketDraft, StepMicroseconds], None]) -> None:
        """Connect to the loaded draft, and to each replacement. `attach` gets every connection."""
        connection = self._connect(attach)
        threading.Thread(target=self._replace, args=(attach, connection), name="draft-keeper", daemon=True).start()

    def kill(self) -> None:
        """Kill a draft that does not answer. The keeper's thread then starts another."""
        hung, self._attached = self._attached, None
        process, self._process = self._process, None
        if hung is not None:
            logger.error("the draft does not answer")
            _kill(hung, process)

    def _connect(self, attach: Callable[[SocketDraft, StepMicroseconds], None]) -> FrameSocket:
        try:
            (place,) = _wait_all([self.draft.location.remote()])
        except RayError:
            self.load()
            (place,) = _wait_all([self.draft.location.remote()])
        host, process = _host_and_process(*place)
        with closing(Listener()) as listener:
            self.draft.attach.remote(listener.invite(host))
            accepted = listener.accept(_CONNECT_S)
        if accepted is None:
            raise CallboardError(f"The draft did not connect within {_CONNECT_S:.0f} s.")
        connection = accepted[1]
        attach(SocketDraft(connection), self._step_us)
        self._attached, self._process = self.draft, process
        return connection

    def _replace(self, attach: Callable[[SocketDraft, StepMicroseconds], None], connection: FrameSocket) -> None:
        while True:
            _wait_for_end(connection)
            logger.warning("the draft is gone; starting another")
            connection = self._connect_again(attach)

    def _connect_again(self, attach: Callable[[SocketDraft, StepMicroseconds], None]) -> FrameSocket:
        pause = _RETRY_S
        while True:
            try:
                return self._connect(attach)
            except Exception as e:  # any failure: the engine continues without a draft
                logger.warning("the draft did not start: %s", e)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY_S)


def _wait_for_end(connection: FrameSocket) -> None:
    """Wait until the other end closes. Another thread reads the data."""
    end = select.poll()
    end.register(connection.sock, select.POLLRDHUP)
    end.poll()


def host_address() -> str:
    """Return the address by which other nodes of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _host_and_process(node: str, pid: int) -> tuple[str, LocalProcess | None]:
    """Return the host by which an actor reaches this process. On the same node: an empty host, and its process."""
    if node != ray.get_runtime_context().get_node_id():
        return host_address(), None
    with suppress(ProcessLookupError):  # Ray reports its end soon
        return "", LocalProcess(pid)
    return "", None


def _kill(actor: Any, process: LocalProcess | None) -> None:
    """End an actor. A stopped or hung process ignores Ray, and would keep its resources for some ten seconds."""
    if process is not None:
        process.kill()
    ray.kill(actor)


def _wait_all(refs: list[Any]) -> list[Any]:
    """Wait for Ray calls in this thread, and return their results: `ray.get` would block the actor's event loop."""
    return [future.result() for future in [ref.future() for ref in refs]]
