"""Connections that carry whole frames between two processes, and how the two find each other.

    who listens                                    who connects
    Listener.invite(host)    --- Ray call --->     connect(address), connect_stream(address, ...)
    Listener.accept()        <-- secret -----

Every connection begins with the secret of its invitation, which is compared before anything else is read; nothing is
ever unpickled from a socket. On one node that is a Unix socket, SEQPACKET for steps (14 us a round trip, wakes without
spinning) and a stream for links; to another node it is TCP. What a frame means is up to its users (runtime.core.plan,
runtime.core.draft, messages.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import math
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20  # bytes; checked before anything is allocated
_PACKET = 64 << 10  # bytes of a SEQPACKET message; below the kernel's default send buffer, whatever its setting
_SEND_BUFFER = 4 << 20  # bytes; the kernel clamps it to net.core.wmem_max
_LENGTH = struct.Struct("<I")  # stands before each frame of a stream
_MORE, _LAST = b"\1", b"\0"  # first byte of a packet
_SECRET_LEN = 32
_HANDSHAKE_S = 10.0  # for a connection to tell its secret
_MAX_HANDSHAKES = 64  # at once; an invited process needs milliseconds
_ACCEPT_RETRY_S = 0.5  # while nobody can be accepted

OnFull = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where one invited process connects to, once; it travels by a Ray call."""

    kind: socket.SocketKind  # SOCK_SEQPACKET or SOCK_STREAM
    endpoint: str | tuple[str, int]  # the path of a Unix socket, or host and port
    secret: bytes = field(repr=False)  # the first bytes on the connection

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_UNIX if isinstance(self.endpoint, str) else socket.AF_INET


# ---- frames -----------------------------------------------------------------------------------------------------


class FrameSocket(Protocol):
    """A connected blocking socket that carries whole frames; both ends raise OSError when it fails."""

    sock: socket.socket

    def send(self, frame: bytes, on_full: OnFull | None = None) -> None:
        """Write `frame`. A full socket blocks, or calls `on_full` until there is room."""
        ...

    def receive(self) -> bytes | None:
        """The next frame, or None at the end of the connection."""
        ...


def framed(frame: bytes) -> bytes:
    """The frame as it stands on a stream: after its length."""
    return _LENGTH.pack(len(frame)) + frame


def _too_large(size: int) -> OSError:
    return OSError(errno.EMSGSIZE, f"a frame of {size} bytes exceeds the limit of {MAX_FRAME}")


def _write(sock: socket.socket, parts: Iterable[bytes | memoryview], on_full: OnFull | None) -> int:
    if on_full is None:
        return sock.sendmsg(parts)
    while True:
        try:
            return sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            on_full()


class _PacketSocket:
    """Frames over SEQPACKET, cut into packets whose first byte says whether more follow."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

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
            if size > MAX_FRAME:
                raise _too_large(size)
            packet = self.sock.recv(_PACKET)
        return b"".join((*parts, packet[1:])) if packet else None


class _StreamSocket:
    """Frames over a byte stream, each after its length."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, frame: bytes, on_full: OnFull | None = None) -> None:
        rest = memoryview(framed(frame))
        while rest:
            rest = rest[_write(self.sock, (rest,), on_full) :]

    def receive(self) -> bytes | None:
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_FRAME:
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


class FrameProtocol(asyncio.Protocol):
    """The asyncio end of a stream. A subclass says what becomes of a frame."""

    transport: asyncio.WriteTransport

    def __init__(self) -> None:
        self._data = bytearray()
        self.heard = False  # something has come since this was last looked at

    @abstractmethod
    def frame_received(self, frame: bytearray) -> None:
        """A whole frame has come."""

    def send(self, frame: bytes) -> None:
        """Never blocks: what the socket does not take is kept."""
        self.transport.write(framed(frame))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._data += data
        buffer, at = self._data, 0
        while len(buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if size > MAX_FRAME:
                raise _too_large(size)
            start = at + _LENGTH.size
            end = start + size
            if len(buffer) < end:
                break
            self.frame_received(buffer[start:end])
            at = end
        del buffer[:at]


def _tune(sock: socket.socket) -> None:
    """Room for what a step sends; over TCP no delay, and a peer whose host is gone is noticed in seconds, not after the
    kernel's 15 minutes."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def frame_socket(sock: socket.socket) -> FrameSocket:
    """The blocking end of a connected socket."""
    _tune(sock)
    return _PacketSocket(sock) if sock.type == socket.SOCK_SEQPACKET else _StreamSocket(sock)


# ---- connecting -------------------------------------------------------------------------------------------------


def connect(address: Address, timeout_s: float = 30.0) -> FrameSocket:
    """The blocking end of a connection to who has given the address."""
    sock = socket.socket(address.family, address.kind)
    sock.settimeout(timeout_s)
    sock.connect(address.endpoint)
    sock.settimeout(None)
    sock.sendall(address.secret)
    return frame_socket(sock)


Receiver = TypeVar("Receiver", bound=FrameProtocol)


async def connect_stream(address: Address, make: Callable[[], Receiver]) -> Receiver:
    """The asyncio end of a connection to who has given the address."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(address.family, address.kind)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address.endpoint)
        _tune(sock)
        create = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        _, receiver = await create(make, sock=sock)
    except BaseException:
        sock.close()
        raise
    receiver.transport.write(address.secret)
    return receiver


class Listener:
    """Where invited processes connect to; it keeps strangers out. One thread accepts, any may invite or close.

    A SEQPACKET one has a socket file that no other user can reach. That of streams lives as long as its process, whose
    death must leave no file behind, so its name is abstract: anyone on this host may connect, the secret decides."""

    def __init__(self, kind: socket.SocketKind) -> None:
        self._kind = kind
        self._invited: dict[bytes, Address] = {}  # by secret; each is good for one connection
        self._pending: dict[int, tuple[socket.socket, float]] = {}  # connections without a secret yet, and their ends
        self._listening: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        self._accepting = threading.Lock()
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="callboard-") if kind == socket.SOCK_SEQPACKET else ""  # mode 0700
        self._path = os.path.join(self._folder, "step") if self._folder else f"\0callboard-{secrets.token_hex(8)}"
        self._listen(socket.AF_UNIX, kind, self._path)
        self._tcp: socket.socket | None = None

    def _listen(self, family: int, kind: int, endpoint: str | tuple[str, int]) -> socket.socket:
        listener = socket.socket(family, kind)
        listener.bind(endpoint)
        listener.listen()
        self._listening[listener.fileno()] = listener
        self._epoll.register(listener, select.EPOLLIN)
        return listener

    def invite(self, host: str = "") -> Address:
        """An address for one connection; `host` is this node's own, for a process on another node."""
        secret = secrets.token_bytes(_SECRET_LEN)
        if not host:
            address = Address(self._kind, self._path, secret)
        else:
            if self._tcp is None:
                self._tcp = self._listen(socket.AF_INET, socket.SOCK_STREAM, (host, 0))
            address = Address(socket.SOCK_STREAM, self._tcp.getsockname(), secret)
        self._invited[secret] = address
        return address

    def accept(self, timeout_s: float = math.inf) -> tuple[Address, FrameSocket] | None:
        """The next process that has connected, and the address that it was given; None when the time is over or the
        listener is closed.

        What keeps everybody out, as files that are used up do, may pass: it is tried again."""
        deadline = time.monotonic() + timeout_s
        with self._accepting:
            while not self._closed and (now := time.monotonic()) <= deadline:
                while self._pending and self._pending[oldest := next(iter(self._pending))][1] <= now:
                    self._refuse(oldest)
                until = min(deadline, self._pending[next(iter(self._pending))][1]) if self._pending else deadline
                try:
                    for fd, _ in self._epoll.poll(None if until == math.inf else max(0.0, until - now), 1):
                        if fd in self._listening:
                            self._greet(self._listening[fd])
                        elif (accepted := self._admit(fd)) is not None:
                            return accepted
                except OSError as e:
                    if not self._closed:
                        logger.error("nobody can connect for now: %s", e)
                        time.sleep(_ACCEPT_RETRY_S)
        return None

    def _greet(self, listener: socket.socket) -> None:
        """A stranger may take neither a thread nor, with others of his kind, all files: the oldest of too many goes."""
        sock, _ = listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _SECRET_LEN)  # TCP: readable when the secret is whole
        self._pending[sock.fileno()] = sock, time.monotonic() + _HANDSHAKE_S
        self._epoll.register(sock, select.EPOLLIN)
        if len(self._pending) > _MAX_HANDSHAKES:
            self._refuse(next(iter(self._pending)))

    def _refuse(self, fd: int) -> None:
        self._pending.pop(fd)[0].close()  # which ends its registration, too

    def _admit(self, fd: int) -> tuple[Address, FrameSocket] | None:
        """The process whose secret waits on a new connection; any other is cut off."""
        sock, _ = self._pending[fd]
        said = b""
        with contextlib.suppress(OSError):
            said = sock.recv(_SECRET_LEN, socket.MSG_DONTWAIT)
        secret = next((s for s in list(self._invited) if hmac.compare_digest(s, said)), None)
        if secret is None:
            self._refuse(fd)
            return None
        del self._pending[fd]
        self._epoll.unregister(fd)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return self._invited.pop(secret), frame_socket(sock)

    def close(self) -> None:
        """Let nobody in any more; a blocked `accept` returns None. Connections that were accepted go on."""
        self._closed = True
        for listener in list(self._listening.values()):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        with self._accepting:  # the shutdown has woken it
            for sock in (*self._listening.values(), *(sock for sock, _ in self._pending.values())):
                sock.close()
            self._epoll.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
