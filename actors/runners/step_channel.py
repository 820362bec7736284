"""The step channel: plans to every rank, and rank 0's results back, in order, without Ray.

`SocketExecutor` is the executor (runtime.core.executor) for runner processes, as `InProcess` is for a runner in the
engine's own process.

    engine                                     runner of rank r
    SocketExecutor.address(r) --- Ray call --> serve_steps(connect(address), runner, r)
    accept()                  --- sockets ---> each rank: sockets to its followers
    submit(plan)              --- plan ------> rank 0 --> ranks 1 and 2 --> ranks 3 to 6 ...
    collect()                 <-- result -----                       rank 0 only; any rank: a fault, or its end

Each rank has one connection (transport.py), which carries the frames of runtime.core.plan. Ranks pass plans on to their
followers, so a step costs the engine one write and one wake-up for any number of ranks. A rank on another machine gets
its plans from the engine itself. Ranks other than 0 send only faults. The end of its socket shows a rank's death,
and the engine polls all sockets whenever it waits.

All waiting is in the kernel. The engine never waits for one rank alone. A rank that does not read its plan may itself
wait for a dead rank, or for the engine to read a result."""

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

from actors.runners.plan_wire import PlanReader, PlanWriter
from actors.wire.transport import Address, FrameSocket, Listener
from runtime.base.types import CallboardError
from runtime.core.executor import Runner
from runtime.core.plan import StepPlan, StepResult, decode_result, encode_result

logger = logging.getLogger(__name__)

_FAULT = b"CBE1"  # begins a runner's last frame after it failed to execute a plan; a sentence follows

_Launched = queue.SimpleQueue[Callable[[], StepResult] | None]  # None at the end


class RunnersLost(CallboardError):
    """The group of runners must be replaced: `rank` is gone, or it failed to execute a plan and its state is unknown.

    `rank` is None if the channel was closed."""

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
        self._sockets: list[FrameSocket] = []  # sockets by rank
        self._direct_ranks: list[int] = []  # ranks that get plans from the engine; each passes them on
        self._ranks: dict[int, int] = {}  # ranks by file descriptor
        self._poll = select.poll()
        self._results: deque[bytearray] = deque()  # received from rank 0, not collected yet
        self._fault: RunnersLost | None = None  # raised after these results
        self._closed: RunnersLost | None = None  # why the channel is closed; None while it is open

    def address(self, rank: int, host: str = "") -> Address:
        """Return the address for `rank`; `host` is this node's address, for a rank on another node."""
        address = self._listener.invite(host)
        self._invited[address] = rank
        return address

    def accept(self, timeout_s: float = 30.0) -> None:
        """Wait until every rank has connected. Raises RunnersLost after the timeout, or on `close`."""
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
            self.close()  # again: the first call had no sockets to shut

    def _hand_out_relays(self) -> None:
        """Connect the ranks of this machine in a binary tree, along which plans are passed on.

        Sockets cannot be passed to ranks on other machines."""
        local = [rank for rank, end in enumerate(self._sockets) if end.sock.family == socket.AF_UNIX]
        relays: dict[int, list[socket.socket]] = {rank: [] for rank in local}
        for place, rank in enumerate(local[1:]):
            upper, lower = socket.socketpair()
            relays[local[place // 2]].append(upper)
            relays[rank].append(lower)  # a rank's first socket leads up, the others lead down
        self._direct_ranks = [rank for rank in range(self.num_ranks) if rank not in local[1:]]
        for rank, end in enumerate(self._sockets):
            sockets = relays.get(rank, [])
            with contextlib.suppress(OSError):  # `collect` detects this rank's end
                socket.send_fds(end.sock, [bytes([rank in self._direct_ranks])], [sock.fileno() for sock in sockets])
            for sock in sockets:
                sock.close()

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks. Raises RunnersLost like `collect`."""
        frames = self._writer.frames(plan)
        for rank in self._direct_ranks:
            try:
                for frame in frames:
                    self._sockets[rank].send(frame, partial(self._make_room, rank))
            except OSError as e:
                raise self._lost(rank, str(e)) from e

    def collect(self) -> StepResult:
        """Wait for the next result. Raises RunnersLost if a rank is gone, or failed to execute its plan."""
        while not self._results:
            if self._fault is not None:
                raise self._fault
            if self.num_ranks == 1:
                self._receive(0)  # its recv blocks: poll is not needed
            else:
                for fd, _ in self._poll.poll():
                    self._receive(self._ranks[fd])
        return decode_result(self._results.popleft())

    @property
    def closed(self) -> RunnersLost | None:
        """Why the channel is closed; None while it is open."""
        return self._closed

    def has_result(self) -> bool:
        """True if `collect` would return or raise at once, or a rank has sent something."""
        return bool(self._results) or self._fault is not None or bool(self._poll.poll(0))

    def _make_room(self, rank: int) -> None:
        """Wait until the socket of `rank` has room. Receive from all ranks meanwhile."""
        sock = self._sockets[rank].sock
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            for fd, events in self._poll.poll():
                if events & ~select.POLLOUT:
                    self._receive(self._ranks[fd])
        finally:
            self._poll.modify(sock, select.POLLIN)
        if self._fault is not None:
            raise self._fault

    def _receive(self, rank: int) -> None:
        try:
            frames = self._sockets[rank].receive()
        except OSError as e:
            raise self._lost(rank, str(e)) from e
        if not frames:
            raise self._lost(rank, "its connection ended")
        if frames[-1].startswith(_FAULT):  # its last frame
            sentence = frames.pop()[len(_FAULT) :].decode()
            self._fault = RunnersLost(f"The runner of rank {rank} failed: {sentence}", rank)
        self._results += frames

    def _lost(self, rank: int, why: str) -> RunnersLost:
        return self._closed or RunnersLost(f"Rank {rank} is gone: {why}.", rank)

    def close(self, why: RunnersLost | None = None) -> None:
        """Close the channel, from any thread, once or more. Blocked calls raise the first `why`.

        Sockets are shut down, not closed: another thread may wait on their descriptors."""
        self._closed = self._closed or why or RunnersLost("The step channel was closed.")
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.sock.shutdown(socket.SHUT_RDWR)


def serve_steps(engine: FrameSocket, runner: Runner, rank: int = 0) -> None:
    """Execute plans until the connection ends or a plan fails. The engine gets the fault as one sentence; the log of
    this process gets the traceback.

    With an asynchronous runner this thread launches each plan when it arrives, and a second thread waits for the
    results and sends them in order. So the GPU has the next plan while a step runs."""
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
                        with contextlib.suppress(OSError):  # the engine detects its end
                            follower.send(frame)
                    if failed.is_set():
                        continue  # the engine must close first: a close with unread plans would lose the fault
                    try:
                        if (plan := reader.decode(frame)) is None:
                            continue
                        step = runner.launch(plan)
                    except Exception as e:
                        failed.set()
                        step = partial(_raise, e)  # sent in order, after the earlier results
                    finish(step)
            if plans is not engine:  # the upper rank is gone; wait until the engine ends this rank too
                engine.receive()
        except OSError as e:
            logger.info("the engine's socket failed: %s", e)
    for end in {plans, *followers}:
        end.sock.close()
    steps.put(None)


def _take_relays(engine: FrameSocket) -> tuple[FrameSocket, list[FrameSocket]]:
    """Wait for the relay sockets. Returns the source of plans, and this rank's followers."""
    try:
        is_direct, fds, _, _ = socket.recv_fds(engine.sock, 1, 3)
    except OSError:  # the engine is gone, which the next receive detects
        return engine, []
    relays = [FrameSocket(socket.socket(fileno=fd)) for fd in fds]
    return (relays[0], relays[1:]) if is_direct == b"\0" else (engine, relays)


def _send_results(steps: _Launched, answer: Callable[[Callable[[], StepResult]], bool]) -> None:
    """Answer each launched step until one fails or the engine is gone."""
    while (wait := steps.get()) is not None and answer(wait):
        pass


def _send_result(rank: int, engine: FrameSocket, failed: threading.Event, wait: Callable[[], StepResult]) -> bool:
    """Wait for a step. Send its fault, or (rank 0) its result. Returns False after the last answer."""
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
    """Return the first line of an error, with its type unless it is a CallboardError."""
    first = next(iter(str(error).splitlines()), "").removesuffix(".")
    return f"{first}." if isinstance(error, CallboardError) else f"{type(error).__name__}: {first}."
