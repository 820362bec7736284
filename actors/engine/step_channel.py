"""The step channel: plans to every rank, results of rank 0 back, in order, with nothing of Ray on the way.

`SocketExecutor` is the executor (runtime.core.executor) of runner processes, as `InProcess` is that of a runner in the
engine's own.

    engine                                     runner of rank r
    SocketExecutor.address(r) --- Ray call --> serve_steps(connect(address), runner, r)
    accept()                  --- sockets ---> each rank: to those that it passes plans on to
    submit(plan)              --- plan ------> rank 0 --> ranks 1 and 2 --> ranks 3 to 6 ...
    collect()                 <-- result -----                       rank 0 alone; any rank: a fault, or its end

One connection a rank (transport.py), with runtime.core.plan's frames. Ranks other than 0 say nothing while all is well,
and plans are passed on from rank to rank, so a step costs the engine one write and one wake-up however many ranks there
are. Their death shows as the end of their socket, which the engine watches whenever it waits. A rank on another machine
gets its plans from the engine itself.

Whoever waits, waits in the kernel, and the engine never waits for one rank alone: a rank that does not read its plan
may itself wait for a rank that died, or for the engine to read a result.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from actors.wire.plan_wire import PlanReader, PlanWriter
from actors.wire.transport import Address, FrameSocket, Listener
from runtime.core.executor import Runner
from runtime.core.plan import StepPlan, StepResult, decode_result, encode_result
from runtime.spec.types import CallboardError

logger = logging.getLogger(__name__)

_FAULT = b"CBE1"  # starts the frame of a runner that could not execute a plan; a sentence follows

_Launched = queue.SimpleQueue[Callable[[], StepResult] | None]  # None: the engine is gone


class RunnersLost(CallboardError):
    """The group of runners must be rebuilt: `rank` is gone, or could not execute a plan, so that its state cannot be
    trusted any more. None: the channel was closed."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SocketExecutor:
    """The engine's end of the sockets to `num_ranks` runners. One thread submits and collects; any may close."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._writer = PlanWriter()
        self._listener = Listener()
        self._invited: dict[Address, int] = {}  # ranks
        self._sockets: list[FrameSocket] = []  # by rank
        self._told: list[int] = []  # ranks that get plans from here; others get theirs from one of these
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._poll = select.poll()
        self._results: deque[bytearray] = deque()  # rank 0's that were heard and not collected yet
        self._fault: RunnersLost | None = None  # told after these results
        self._closed: RunnersLost | None = None  # why nothing is carried any more

    def address(self, rank: int, host: str = "") -> Address:
        """Where `rank` connects to; `host` is this node's address, for a rank on another node."""
        address = self._listener.invite(host)
        self._invited[address] = rank
        return address

    def accept(self, timeout_s: float = 30.0) -> None:
        """Wait until every rank has connected. Raises RunnersLost if one has not in time, or on `close`."""
        deadline, connected = time.monotonic() + timeout_s, dict[int, FrameSocket]()
        while len(connected) < self.num_ranks:
            if (accepted := self._listener.accept(deadline - time.monotonic())) is None:
                break
            connected[self._invited[accepted[0]]] = accepted[1]
        self._listener.close()
        if missing := [rank for rank in range(self.num_ranks) if rank not in connected]:
            if self._closed:
                raise self._closed
            raise RunnersLost(f"Ranks {missing} did not connect within {timeout_s:.0f} s.", missing[0])
        for rank, end in sorted(connected.items()):
            self._ranks[end.sock.fileno()] = rank
            self._poll.register(end.sock, select.POLLIN)
            self._sockets.append(end)
        self._hand_out_relays()
        if self._closed:
            self.close()  # again: the first time there were no sockets to shut

    def _hand_out_relays(self) -> None:
        """The ranks of this machine become a binary tree, with a socket from each to those that it passes plans on to.
        Sockets cannot be handed to ranks elsewhere."""
        local = [rank for rank, end in enumerate(self._sockets) if end.sock.family == socket.AF_UNIX]
        relays: dict[int, list[socket.socket]] = {rank: [] for rank in local}
        for place, rank in enumerate(local[1:]):
            upper, lower = socket.socketpair()
            relays[local[place // 2]].append(upper)
            relays[rank].append(lower)  # its first one: it comes after its own upper rank in the tree
        self._told = [rank for rank in range(self.num_ranks) if rank not in local[1:]]
        for rank, end in enumerate(self._sockets):
            sockets = relays.get(rank, [])
            with contextlib.suppress(OSError):  # who is gone is noticed by its end
                socket.send_fds(end.sock, [bytes([rank in self._told])], [sock.fileno() for sock in sockets])
            for sock in sockets:
                sock.close()

    def submit(self, plan: StepPlan) -> None:
        """Raises RunnersLost, as `collect` does."""
        frame = self._writer.encode(plan)
        for rank in self._told:
            try:
                self._sockets[rank].send(frame, partial(self._make_room, rank))
            except OSError as e:
                raise self._lost(rank, str(e)) from e

    def collect(self) -> StepResult:
        """Raises RunnersLost when any rank is gone, or could not execute its plan."""
        while not self._results:
            if self._fault is not None:
                raise self._fault
            if self.num_ranks == 1:
                self._hear(0)  # its recv blocks: no need to poll
            else:
                for fd, _ in self._poll.poll():
                    self._hear(self._ranks[fd])
        return decode_result(self._results.popleft())

    @property
    def closed(self) -> RunnersLost | None:
        """Why nothing is carried any more; None while it is open."""
        return self._closed

    def has_result(self) -> bool:
        """True if `collect` would return, or raise, at once, or some rank has something to say."""
        return bool(self._results) or self._fault is not None or bool(self._poll.poll(0))

    def _make_room(self, rank: int) -> None:
        """Wait until `rank` reads its plan, listening to all ranks meanwhile."""
        sock = self._sockets[rank].sock
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            for fd, events in self._poll.poll():
                if events & ~select.POLLOUT:
                    self._hear(self._ranks[fd])
        finally:
            self._poll.modify(sock, select.POLLIN)
        if self._fault is not None:
            raise self._fault

    def _hear(self, rank: int) -> None:
        try:
            frames = self._sockets[rank].receive()
        except OSError as e:
            raise self._lost(rank, str(e)) from e
        if not frames:
            raise self._lost(rank, "its connection ended")
        if frames[-1].startswith(_FAULT):  # its last words
            sentence = frames.pop()[len(_FAULT) :].decode()
            self._fault = RunnersLost(f"The runner of rank {rank} failed: {sentence}", rank)
        self._results += frames

    def _lost(self, rank: int, why: str) -> RunnersLost:
        return self._closed or RunnersLost(f"Rank {rank} is gone: {why}.", rank)

    def close(self, why: RunnersLost | None = None) -> None:
        """May be called from any thread, and twice: a blocked accept, submit or collect then raises RunnersLost, the
        first `why` that was given.

        Sockets are shut, not closed: another thread may be waiting on their descriptors."""
        self._closed = self._closed or why or RunnersLost("The step channel was closed.")
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.sock.shutdown(socket.SHUT_RDWR)


def serve_steps(engine: FrameSocket, runner: Runner, rank: int = 0) -> None:
    """Execute plans until the engine goes away, or until one fails: the engine then gets the reason as one sentence,
    and this process's log the traceback.

    With an asynchronous runner this thread launches each plan as soon as it arrives, and another one waits for the
    results, in order, and sends them: a plan is on its way to the GPU while the step before it still runs there."""
    plans, followers = _take_relays(engine)
    reader = PlanReader()
    steps: _Launched = queue.SimpleQueue()
    failed = threading.Event()
    answer = partial(_send_result, rank, engine, failed)
    if runner.asynchronous:
        threading.Thread(target=_send_results, args=(steps, answer), name="runner-results", daemon=True).start()
    finish = steps.put if runner.asynchronous else answer
    with engine.sock:
        try:
            while frames := plans.receive():
                for frame in frames:
                    for follower in followers:
                        with contextlib.suppress(OSError):  # the engine notices its end
                            follower.send(frame)
                    if failed.is_set():
                        continue  # the engine closes first: to close with a plan unread would lose the fault
                    try:
                        step = runner.launch(reader.decode(frame))
                    except Exception as e:
                        failed.set()
                        step = partial(_raise, e)  # told in its turn, after the results before it
                    finish(step)
            if plans is not engine:  # whoever has passed them on is gone, and the engine will end this rank, too
                engine.receive()
        except OSError as e:
            logger.info("the engine's socket failed: %s", e)
    for end in {plans, *followers}:
        end.sock.close()
    steps.put(None)


def _take_relays(engine: FrameSocket) -> tuple[FrameSocket, list[FrameSocket]]:
    """Where plans come from, and who gets them from this rank; when all ranks are there."""
    try:
        is_told, fds, _, _ = socket.recv_fds(engine.sock, 1, 3)
    except OSError:  # the engine is gone, as whoever reads from it notices
        return engine, []
    relays = [FrameSocket(socket.socket(fileno=fd)) for fd in fds]
    return (relays[0], relays[1:]) if is_told == b"\0" else (engine, relays)


def _send_results(steps: _Launched, answer: Callable[[Callable[[], StepResult]], bool]) -> None:
    """Answer every launched step; until one fails or the engine is gone."""
    while (wait := steps.get()) is not None and answer(wait):
        pass


def _send_result(rank: int, engine: FrameSocket, failed: threading.Event, wait: Callable[[], StepResult]) -> bool:
    """Wait for a step and send its result, from rank 0, or its fault. False: it was the last answer."""
    try:
        try:
            result = wait()
        except Exception as e:
            failed.set()
            logger.exception("a step failed")
            engine.send(_FAULT + _sentence(e).encode(errors="replace"))
            return False
        if rank == 0:
            engine.send(encode_result(result))
        return True
    except OSError as e:
        logger.info("the engine's socket failed: %s", e)
        return False


def _raise(error: Exception) -> NoReturn:
    raise error


def _sentence(error: BaseException) -> str:
    """The first line of an error; a fault that is no CallboardError is named, since its text may say little."""
    first = next(iter(str(error).splitlines()), "").removesuffix(".")
    return f"{first}." if isinstance(error, CallboardError) else f"{type(error).__name__}: {first}."
