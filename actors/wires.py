"""Sockets between two processes of one engine that carry whole frames, and how they meet.

    engine                                     a runner, a draft
    Meeting.address(rank)  --- Ray call --->   connect(address)
    accept()               <-- secret -----

Unix SEQPACKET on the same node (14 us a round trip, wakes without spinning), TCP to another node. Nothing is ever
unpickled from a socket.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from actors.messages import tune_tcp

_PACKET = 64 << 10  # bytes of a SEQPACKET message; below the kernel's default send buffer, whatever its setting
_SEND_BUFFER = 4 << 20  # bytes; the kernel clamps it to net.core.wmem_max
_MAX_FRAME = 256 << 20  # bytes; checked before anything is allocated
_LENGTH = struct.Struct("<I")
_MORE, _LAST = b"\1", b"\0"  # first byte of a packet
_SECRET_LEN = 32

OnFull = Callable[[], None]


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


class Meeting:
    """Where `num_ranks` processes connect to, once. Any thread may close it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._secrets = [secrets.token_bytes(_SECRET_LEN) for _ in range(num_ranks)]
        self._directory = tempfile.mkdtemp(prefix="callboard-")  # mode 0700
        self._path = os.path.join(self._directory, "step")
        self._listeners = [self._listen(socket.AF_UNIX, socket.SOCK_SEQPACKET, self._path)]
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

    def accept(self, timeout_s: float) -> dict[int, Wire]:
        """The wires of the ranks that have connected: all of them, unless the time is over or the meeting closed.

        Whoever connects without a secret is dropped, and cannot hold up the ranks by saying nothing."""
        try:
            return self._meet(time.monotonic() + timeout_s)
        finally:
            for listener in self._listeners:
                listener.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """A blocked `accept` returns."""
        self._closed = True
        shutil.rmtree(self._directory, ignore_errors=True)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)

    def _meet(self, deadline: float) -> dict[int, Wire]:
        """The wires of the ranks that connected until `deadline` or `close`."""
        wires: dict[int, Wire] = {}
        sockets = {listener.fileno(): listener for listener in self._listeners}  # and those who have said nothing yet
        poll = select.poll()
        for fd in sockets:
            poll.register(fd, select.POLLIN)
        while len(wires) < self._num_ranks:
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
