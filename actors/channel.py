"""The step channel: plans to every rank, results of rank 0 back, in order, with nothing of Ray on the way.

Three executors (runtime.core.executor) for one engine core: `InProcess` around a runner of the same process,
`SocketExecutor` for runner processes, `RayRpc` as the fallback that needs nothing but Ray.

    engine                                     runner of rank r
    SocketExecutor.address(r) --- Ray call --> serve_steps(address, runner)
    accept()                  <-- secret ----- connect
    submit(plan)              --- plan ------>                       all ranks
    collect()                 <-- result -----                       rank 0 alone; any rank: a fault, or its end

One socket a rank: Unix SEQPACKET on the same node (14 us a round trip, wakes without spinning), TCP to another node.
Ranks other than 0 say nothing while all is well: their death shows as the end of their socket, which `collect` watches
beside rank 0's answer. Frames are runtime.core.plan's; nothing is ever unpickled from a socket.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from actors.frames import tune_tcp
from runtime.core.executor import Runner
from runtime.core.plan import StepPlan, StepResult, decode_plan, decode_result, encode_plan, encode_result
from runtime.core.types import CallboardError

logger = logging.getLogger(__name__)

_PACKET = 64 << 10  # bytes of a SEQPACKET message; below the kernel's default send buffer, whatever its setting
_MAX_FRAME = 256 << 20  # bytes; checked before anything is allocated
_LENGTH = struct.Struct("<I")
_SECRET_LEN = 32
_FAULT = b"CBE1"  # starts the frame of a runner that could not execute a plan; a sentence follows


class RunnersLost(CallboardError):
    """A rank is gone, or the channel was closed: the whole group must be rebuilt."""


class RunnerFault(CallboardError):
    """A rank raised while executing a plan; its state cannot be trusted any more."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where one rank connects to; it travels by a Ray call."""

    path: str  # of a Unix socket; empty: TCP
    host: str
    port: int
    rank: int
    secret: bytes  # the connection's first frame


class Wire(Protocol):
    """A socket that carries whole frames. `receive` returns None at the end of the connection."""

    sock: socket.socket

    def send(self, frame: bytes) -> None: ...

    def receive(self) -> bytes | None: ...


class _PacketWire:
    """Frames over SEQPACKET: packets of up to 64 KiB, the first byte says whether more follow."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, frame: bytes) -> None:
        at = 0
        while len(frame) - at >= _PACKET:
            self.sock.sendmsg((b"\1", frame[at : at + _PACKET - 1]))
            at += _PACKET - 1
        self.sock.sendmsg((b"\0", frame[at:] if at else frame))

    def receive(self) -> bytes | None:
        packet = self.sock.recv(_PACKET)
        if packet[:1] == b"\0":
            return packet[1:]
        parts = []
        size = 0
        while packet[:1] == b"\1":
            parts.append(packet[1:])
            size += len(packet)
            if size > _MAX_FRAME:
                raise CallboardError(f"A step frame exceeds {_MAX_FRAME} bytes.")
            packet = self.sock.recv(_PACKET)
        return b"".join((*parts, packet[1:])) if packet else None


class _StreamWire:
    """Frames over TCP, each after its length."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, frame: bytes) -> None:
        self.sock.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes | None:
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _MAX_FRAME:
            raise CallboardError(f"A step frame claims {size} bytes; the limit is {_MAX_FRAME}.")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes | None:
        data = self.sock.recv(size, socket.MSG_WAITALL)
        if len(data) == size:
            return data
        parts = bytearray(data)
        while len(parts) < size:
            part = self.sock.recv(size - len(parts), socket.MSG_WAITALL)
            if not part:
                return None
            parts += part
        return bytes(parts)


def _wire(sock: socket.socket) -> Wire:
    if sock.family == socket.AF_UNIX:
        return _PacketWire(sock)
    tune_tcp(sock)
    return _StreamWire(sock)


class SocketExecutor:
    """The engine's end of the sockets to `num_ranks` runners."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._secrets = [secrets.token_bytes(_SECRET_LEN) for _ in range(num_ranks)]
        self._directory = tempfile.mkdtemp(prefix="callboard-")  # mode 0700
        self._listeners = [self._listen(socket.AF_UNIX, socket.SOCK_SEQPACKET, os.path.join(self._directory, "step"))]
        self._wires: list[Wire] = []
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
            return Address(os.path.join(self._directory, "step"), "", 0, rank, self._secrets[rank])
        if len(self._listeners) == 1:
            self._listeners.append(self._listen(socket.AF_INET, socket.SOCK_STREAM, (host, 0)))
        return Address("", host, self._listeners[1].getsockname()[1], rank, self._secrets[rank])

    def accept(self, timeout_s: float = 30.0) -> None:
        """Wait until every rank has connected. Raises RunnersLost if one has not in time."""
        wires: dict[int, Wire] = {}
        deadline = time.monotonic() + timeout_s
        while len(wires) < self.num_ranks:
            ready, _, _ = select.select(self._listeners, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                missing = sorted(set(range(self.num_ranks)) - set(wires))
                raise RunnersLost(f"Ranks {missing} did not connect within {timeout_s:.0f} s.")
            sock, _ = ready[0].accept()
            rank, wire = self._admit(sock)
            if rank is None:
                sock.close()  # not one of ours; go on listening
            else:
                wires[rank] = wire
        self._wires = [wires[rank] for rank in range(self.num_ranks)]
        self._stop_listening()
        self._poll = select.poll()
        for wire in self._wires:
            self._poll.register(wire.sock, select.POLLIN)

    def _admit(self, sock: socket.socket) -> tuple[int | None, Wire]:
        wire = _wire(sock)
        sock.settimeout(2.0)
        try:
            said = wire.receive() or b""
        except (OSError, CallboardError):
            said = b""
        sock.settimeout(None)
        return next((r for r, s in enumerate(self._secrets) if hmac.compare_digest(s, said)), None), wire

    def submit(self, plan: StepPlan) -> None:
        frame = encode_plan(plan)
        for rank, wire in enumerate(self._wires):
            try:
                wire.send(frame)
            except OSError as e:
                raise self._lost(rank, str(e)) from e

    def collect(self) -> StepResult:
        if self.num_ranks > 1:
            self._wait_for_rank_0()
        try:
            frame = self._wires[0].receive()
        except OSError as e:
            raise self._lost(0, str(e)) from e
        return decode_result(self._checked(0, frame))

    def _wait_for_rank_0(self) -> None:
        """Until rank 0 answers; another rank has something to say only when it fails."""
        first = self._wires[0].sock.fileno()
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            for rank, wire in enumerate(self._wires):
                if rank and wire.sock.fileno() in ready:
                    try:
                        self._checked(rank, wire.receive())
                    except OSError as e:
                        raise self._lost(rank, str(e)) from e
            if first in ready:
                return

    def _checked(self, rank: int, frame: bytes | None) -> bytes:
        if frame is None:
            raise self._lost(rank, "its connection ended")
        if frame[: len(_FAULT)] == _FAULT:
            raise RunnerFault(f"The runner of rank {rank} failed: {frame[len(_FAULT) :].decode()}")
        return frame

    def _lost(self, rank: int, why: str) -> RunnersLost:
        return RunnersLost("The step channel was closed." if self._closed else f"Rank {rank} is gone: {why}.")

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """May be called from any thread, and twice: a blocked submit or collect then raises RunnersLost."""
        self._closed = True
        self._stop_listening()
        for wire in self._wires:
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_RDWR)


def connect(address: Address, timeout_s: float = 30.0) -> Wire:
    """The runner's end of its socket."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(address.path)
    else:
        sock = socket.create_connection((address.host, address.port), timeout_s)
        sock.settimeout(None)
    wire = _wire(sock)
    wire.send(address.secret)
    return wire


def serve_steps(address: Address, runner: Runner) -> None:
    """Execute plans until the engine goes away, or until one fails: the engine then gets the reason as one sentence,
    and this process's log the traceback."""
    wire = connect(address)
    with wire.sock, contextlib.suppress(OSError):
        while (frame := wire.receive()) is not None:
            try:
                result = runner.execute(decode_plan(frame))
            except Exception as e:
                logger.exception("a step failed")
                wire.send(_FAULT + f"{type(e).__name__}: {e}".splitlines()[0].encode())
                return
            if address.rank == 0:
                wire.send(encode_result(result))


class RayRpc:
    """Plans and results as Ray actor calls: 50 times a socket's cost, and nothing to set up."""

    def __init__(self, runners: list[Any]) -> None:
        """`runners` are handles of actors with `execute(bytes) -> bytes`, by rank."""
        self._runners = runners
        self._steps: deque[list[Any]] = deque()
        self._closed = False

    def submit(self, plan: StepPlan) -> None:
        frame = encode_plan(plan)
        self._steps.append([r.execute.remote(frame) for r in self._runners])

    def collect(self) -> StepResult:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return decode_result(ray.get(self._steps.popleft())[0])
        except RayTaskError as e:
            raise RunnerFault(f"A runner failed: {e.cause}") from e
        except RayError as e:
            raise RunnersLost(f"A rank is gone: {type(e).__name__}.") from e

    def close(self) -> None:
        """A blocked collect ends when the actors do, which is up to their owner."""
        self._steps.clear()
