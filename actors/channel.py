"""The step channel: plans to every rank, results of rank 0 back, in order, with nothing of Ray on the way.

Three executors (runtime.core.executor) for one engine core: `InProcess` around a runner of the same process,
`SocketExecutor` for runner processes, `RayRpc` as the fallback that needs nothing but Ray.

    engine                                     runner of rank r
    SocketExecutor.address(r) --- Ray call --> serve_steps(address, runner)
    accept()                  <-- secret ----- connect
    submit(plan)              --- plan ------>                       all ranks
    collect()                 <-- result -----                       rank 0 alone; any rank: a fault, or its end

One socket a rank: Unix SEQPACKET on the same node (14 us a round trip, wakes without spinning), TCP to another node.
Ranks other than 0 say nothing while all is well, so a step costs one wake-up of the engine however many ranks there
are; their death shows as the end of their socket, which the engine watches whenever it waits. Frames are
runtime.core.plan's; nothing is ever unpickled from a socket.

Whoever waits, waits in the kernel, and the engine never waits for one rank alone: a rank that does not read its plan
may itself wait for a rank that died, or for the engine to read a result.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import queue
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from actors.frames import tune_tcp
from runtime.core.executor import Runner
from runtime.core.plan import StepPlan, StepResult, decode_plan, decode_result, encode_plan, encode_result
from runtime.core.types import CallboardError

logger = logging.getLogger(__name__)

_PACKET = 64 << 10  # bytes of a SEQPACKET message; below the kernel's default send buffer, whatever its setting
_SEND_BUFFER = 4 << 20  # bytes; the kernel clamps it to net.core.wmem_max
_MAX_FRAME = 256 << 20  # bytes; checked before anything is allocated
_LENGTH = struct.Struct("<I")
_MORE, _LAST = b"\1", b"\0"  # first byte of a packet
_SECRET_LEN = 32
_FAULT = b"CBE1"  # starts the frame of a runner that could not execute a plan; a sentence follows

OnFull = Callable[[], None]
_Launched = queue.SimpleQueue[Callable[[], StepResult] | None]  # None: the engine is gone


class GroupFailed(CallboardError):
    """The group of runners must be rebuilt, because of `rank` (None: the channel was closed)."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RunnersLost(GroupFailed):
    """A rank is gone, or the channel was closed."""


class RunnerFault(GroupFailed):
    """A rank raised while executing a plan; its state cannot be trusted any more."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where one rank connects to; it travels by a Ray call."""

    path: str  # of a Unix socket; empty: TCP
    host: str
    port: int
    rank: int
    secret: bytes = field(repr=False)  # the first bytes on the connection


class Wire(Protocol):
    """A connected socket that carries whole frames; both ends raise OSError when it fails."""

    sock: socket.socket

    def send(self, frame: bytes, on_full: OnFull | None = None) -> None:
        """Write `frame`. A full socket blocks, or calls `on_full` until there is room."""
        ...

    def receive(self) -> bytes | None:
        """The next frame, or None at the end of the connection."""
        ...


def _write(sock: socket.socket, parts: Iterable[bytes | memoryview], on_full: OnFull | None) -> int:
    if on_full is None:
        return sock.sendmsg(parts)
    while True:
        try:
            return sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            on_full()


def _too_large(size: int) -> OSError:
    return OSError(errno.EMSGSIZE, f"a step frame of {size} bytes exceeds the limit of {_MAX_FRAME}")


class _PacketWire:
    """Frames over SEQPACKET, cut into packets whose first byte says whether more follow."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def send(self, frame: bytes, on_full: OnFull | None = None) -> None:
        rest = memoryview(frame)
        while len(rest) >= _PACKET:
            _write(self.sock, (_MORE, rest[: _PACKET - 1]), on_full)
            rest = rest[_PACKET - 1 :]
        _write(self.sock, (_LAST, rest), on_full)

    def receive(self) -> bytes | None:
        packet = self.sock.recv(_PACKET)
        if packet[:1] == _LAST:
            return packet[1:]
        parts, size = [], 0
        while packet[:1] == _MORE:
            parts.append(packet[1:])
            size += len(packet)
            if size > _MAX_FRAME:
                raise _too_large(size)
            packet = self.sock.recv(_PACKET)
        return b"".join((*parts, packet[1:])) if packet else None


class _StreamWire:
    """Frames over TCP, each after its length."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        tune_tcp(sock)

    def send(self, frame: bytes, on_full: OnFull | None = None) -> None:
        rest = memoryview(_LENGTH.pack(len(frame)) + frame)
        while rest:
            rest = rest[_write(self.sock, (rest,), on_full) :]

    def receive(self) -> bytes | None:
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _MAX_FRAME:
            raise _too_large(size)
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes | None:
        data = self.sock.recv(size, socket.MSG_WAITALL)  # a signal may still cut it short
        while len(data) < size:
            part = self.sock.recv(size - len(data), socket.MSG_WAITALL)
            if not part:
                return None
            data += part
        return data


def _wire(sock: socket.socket) -> Wire:
    return _PacketWire(sock) if sock.family == socket.AF_UNIX else _StreamWire(sock)


class SocketExecutor:
    """The engine's end of the sockets to `num_ranks` runners. One thread submits and collects; any may close."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._secrets = [secrets.token_bytes(_SECRET_LEN) for _ in range(num_ranks)]
        self._directory = tempfile.mkdtemp(prefix="callboard-")  # mode 0700
        self._path = os.path.join(self._directory, "step")
        self._listeners = [self._listen(socket.AF_UNIX, socket.SOCK_SEQPACKET, self._path)]
        self._wires: list[Wire] = []
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._poll = select.poll()
        self._results: deque[bytes] = deque()  # rank 0's, heard while a plan waited for room
        self._closed = False

    @staticmethod
    def _listen(family: int, kind: int, address: str | tuple[str, int]) -> socket.socket:
        listener = socket.socket(family, kind)
        listener.bind(address)
        listener.listen()
        return listener

    def address(self, rank: int, host: str = "") -> Address:
        """Where `rank` connects to; `host` is this node's address, for a rank on another node."""
        if not host:
            return Address(self._path, "", 0, rank, self._secrets[rank])
        if len(self._listeners) == 1:
            self._listeners.append(self._listen(socket.AF_INET, socket.SOCK_STREAM, (host, 0)))
        return Address("", host, self._listeners[1].getsockname()[1], rank, self._secrets[rank])

    def accept(self, timeout_s: float = 30.0) -> None:
        """Wait until every rank has connected. Raises RunnersLost if one has not in time, or on `close`.

        Whoever connects without a secret is dropped, and cannot hold up the ranks by saying nothing."""
        try:
            wires = self._meet(time.monotonic() + timeout_s)
        finally:
            for listener in self._listeners:
                listener.close()
            shutil.rmtree(self._directory, ignore_errors=True)
        if missing := [rank for rank in range(self.num_ranks) if rank not in wires]:
            if self._closed:
                raise self._lost(None, "")
            raise RunnersLost(f"Ranks {missing} did not connect within {timeout_s:.0f} s.", missing[0])
        for rank, wire in sorted(wires.items()):
            self._ranks[wire.sock.fileno()] = rank
            self._poll.register(wire.sock, select.POLLIN)
            self._wires.append(wire)
        if self._closed:
            self.close()  # again: the first time there were no wires to shut

    def _meet(self, deadline: float) -> dict[int, Wire]:
        """The wires of the ranks that connected until `deadline` or `close`."""
        wires: dict[int, Wire] = {}
        sockets = {listener.fileno(): listener for listener in self._listeners}  # and those who have said nothing yet
        poll = select.poll()
        for fd in sockets:
            poll.register(fd, select.POLLIN)
        while len(wires) < self.num_ranks:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if self._closed or not ready:
                break
            for fd, _ in ready:
                sock = sockets[fd]
                if sock in self._listeners:
                    sock, _ = sock.accept()
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _SECRET_LEN)  # TCP: readable when whole
                    sockets[sock.fileno()] = sock
                    poll.register(sock, select.POLLIN)
                    continue
                poll.unregister(fd)
                del sockets[fd]
                rank = self._rank_of(sock)
                if rank is None or rank in wires:
                    sock.close()
                else:
                    wires[rank] = _wire(sock)
        for sock in sockets.values():
            sock.close()
        return wires

    def _rank_of(self, sock: socket.socket) -> int | None:
        """Whose secret waits on the new connection."""
        try:
            said = sock.recv(_SECRET_LEN, socket.MSG_DONTWAIT)
        except OSError:
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return next((rank for rank, secret in enumerate(self._secrets) if hmac.compare_digest(secret, said)), None)

    def submit(self, plan: StepPlan) -> None:
        """Raises RunnersLost or RunnerFault, as `collect` does."""
        frame = encode_plan(plan)
        for rank, wire in enumerate(self._wires):
            try:
                wire.send(frame, partial(self._make_room, rank))
            except OSError as e:
                raise self._lost(rank, str(e)) from e

    def collect(self) -> StepResult:
        """Raises RunnersLost when any rank is gone, RunnerFault when one could not execute its plan."""
        while not self._results:
            if self.num_ranks == 1:
                self._hear(0)  # its recv blocks: no need to poll
            else:
                for fd, _ in self._poll.poll():
                    self._hear(self._ranks[fd])
        return decode_result(self._results.popleft())

    def _make_room(self, rank: int) -> None:
        """Wait until `rank` reads its plan, listening to all ranks meanwhile."""
        sock = self._wires[rank].sock
        self._poll.modify(sock, select.POLLIN | select.POLLOUT)
        try:
            for fd, events in self._poll.poll():
                if events & ~select.POLLOUT:
                    self._hear(self._ranks[fd])
        finally:
            self._poll.modify(sock, select.POLLIN)

    def _hear(self, rank: int) -> None:
        try:
            frame = self._wires[rank].receive()
        except OSError as e:
            raise self._lost(rank, str(e)) from e
        if frame is None:
            raise self._lost(rank, "its connection ended")
        if frame[: len(_FAULT)] == _FAULT:
            raise RunnerFault(f"The runner of rank {rank} failed: {frame[len(_FAULT) :].decode()}", rank)
        self._results.append(frame)

    def _lost(self, rank: int | None, why: str) -> RunnersLost:
        if self._closed:
            return RunnersLost("The step channel was closed.")
        return RunnersLost(f"Rank {rank} is gone: {why}.", rank)

    def close(self) -> None:
        """May be called from any thread, and twice: a blocked accept, submit or collect then raises RunnersLost.

        Sockets are shut, not closed: another thread may be waiting on their descriptors."""
        self._closed = True
        shutil.rmtree(self._directory, ignore_errors=True)
        for sock in (*self._listeners, *(wire.sock for wire in self._wires)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def connect(address: Address, timeout_s: float = 30.0) -> Wire:
    """The runner's end of its socket."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(address.path)
    else:
        sock = socket.create_connection((address.host, address.port), timeout_s)
        sock.settimeout(None)
    sock.sendall(address.secret)
    return _wire(sock)


def serve_steps(address: Address, runner: Runner) -> None:
    """Execute plans until the engine goes away, or until one fails: the engine then gets the reason as one sentence,
    and this process's log the traceback.

    With an asynchronous runner this thread launches each plan as soon as it arrives, and another one waits for the
    results, in order, and sends them: a plan is on its way to the GPU while the step before it still runs there."""
    wire = connect(address)
    steps: _Launched = queue.SimpleQueue()
    failed = threading.Event()
    answer = partial(_send_result, address.rank, wire, failed)
    if runner.asynchronous:
        threading.Thread(target=_send_results, args=(steps, answer), name="runner-results", daemon=True).start()
    finish = steps.put if runner.asynchronous else answer
    with wire.sock:
        try:
            while (frame := wire.receive()) is not None:
                if failed.is_set():
                    continue  # the engine closes first: to close with a plan unread would lose the fault
                try:
                    step = runner.launch(decode_plan(frame))
                except Exception as e:
                    failed.set()
                    step = partial(_raise, e)  # told in its turn, after the results before it
                finish(step)
        except OSError as e:
            logger.info("the engine's socket failed: %s", e)
    steps.put(None)


def _send_results(steps: _Launched, answer: Callable[[Callable[[], StepResult]], bool]) -> None:
    """Answer every launched step; until one fails or the engine is gone."""
    while (wait := steps.get()) is not None and answer(wait):
        pass


def _send_result(rank: int, wire: Wire, failed: threading.Event, wait: Callable[[], StepResult]) -> bool:
    """Wait for a step and send its result, from rank 0, or its fault. False: it was the last answer."""
    try:
        try:
            result = wait()
        except Exception as e:
            failed.set()
            logger.exception("a step failed")
            wire.send(_FAULT + _sentence(e).encode(errors="replace"))
            return False
        if rank == 0:
            wire.send(encode_result(result))
        return True
    except OSError as e:
        logger.info("the engine's socket failed: %s", e)
        return False


def _raise(error: Exception) -> NoReturn:
    raise error


def _sentence(error: BaseException) -> str:
    """What it says in its first line; a fault that is no CallboardError is named, since its text may say little."""
    first = next(iter(str(error).splitlines()), "").removesuffix(".")
    return f"{first}." if isinstance(error, CallboardError) else f"{type(error).__name__}: {first}."


class RayRpc:
    """Plans and results as Ray actor calls: 50 times a socket's cost, and nothing to set up."""

    def __init__(self, runners: list[Any]) -> None:
        """`runners` are handles of actors with `execute(bytes) -> bytes`, by rank."""
        self._runners = runners
        self._steps: deque[Future[bytes]] = deque()  # rank 0's results
        self._news: queue.SimpleQueue[tuple[int, Future[bytes]] | None] = queue.SimpleQueue()  # None: closed

    def submit(self, plan: StepPlan) -> None:
        frame = encode_plan(plan)
        calls = [runner.execute.remote(frame).future() for runner in self._runners]
        self._steps.append(calls[0])
        for rank, call in enumerate(calls):
            call.add_done_callback(partial(self._tell, rank))

    def _tell(self, rank: int, call: Future[bytes]) -> None:
        self._news.put((rank, call))

    def collect(self) -> StepResult:
        """Raises RunnersLost when any rank is gone, RunnerFault when one could not execute its plan."""
        oldest = self._steps.popleft()
        while not oldest.done() or not self._news.empty():
            news = self._news.get()
            if news is None:
                self._news.put(None)
                raise RunnersLost("The step channel was closed.")
            _rpc_result(*news)
        return decode_result(_rpc_result(0, oldest))

    def close(self) -> None:
        """May be called from any thread: a collect, blocked or to come, raises RunnersLost."""
        self._news.put(None)


def _rpc_result(rank: int, call: Future[bytes]) -> bytes:
    from ray.exceptions import RayError, RayTaskError

    try:
        return call.result()
    except RayTaskError as e:
        raise RunnerFault(f"The runner of rank {rank} failed: {_sentence(e.cause)}", rank) from e
    except RayError as e:
        raise RunnersLost(f"Rank {rank} is gone: {type(e).__name__}.", rank) from e
