"""Connections that carry whole frames between two processes, and the handshake that opens them.

    listening process                              connecting process
    Listener.invite(host)    --- Ray call --->     connect(address), connect_stream(address, ...)
    Listener.accept()        <-- secret -----

Every connection begins with its invitation's secret, which is compared before anything else is read. Nothing is
unpickled from a socket. The byte stream runs over a Unix socket on one node (12 us a round trip, without spinning), and
over TCP between nodes. This module's users define the frames' contents."""

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
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20  # bytes; checked before memory is allocated
_CHUNK = 64 << 10  # bytes in one read
_LARGE_CHUNK = 1 << 20  # bytes in one read of a large frame
_SEND_BUFFER = 4 << 20  # bytes; the kernel clamps it to net.core.wmem_max
_LENGTH = struct.Struct("<I")  # stands before each frame
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group
_SECRET_LEN = 32
_HANDSHAKE_S = 10.0  # limit until a connection has sent its secret
_MAX_HANDSHAKES = 64  # handshakes at the same time; an invited process needs milliseconds
_ACCEPT_RETRY_S = 0.5  # seconds between attempts while accept fails


@dataclass(frozen=True, slots=True)
class Address:
    """The address for one connection of an invited process. A Ray call carries it."""

    endpoint: str | tuple[str, int]  # a Unix socket's path, or host and port
    secret: bytes = field(repr=False)  # the first bytes on the connection

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_UNIX if isinstance(self.endpoint, str) else socket.AF_INET


# ---- frames -----------------------------------------------------------------------------------------------------


def head_of(frame: bytes | bytearray) -> bytes:
    """Return the frame's length, which stands before it on a stream."""
    return _LENGTH.pack(len(frame))


def framed(frame: bytes | bytearray) -> bytes:
    """Return the frame as it stands on a stream."""
    return head_of(frame) + frame


class FrameCutter:
    """Cuts the bytes of a connection into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that the incomplete frame lacks; 0 before its length has arrived."""
        has_length = len(self._data) >= _LENGTH.size
        return _LENGTH.size + _LENGTH.unpack_from(self._data)[0] - len(self._data) if has_length else 0

    def cut(self, data: bytes) -> list[bytearray]:
        """Add `data` and return the complete frames. Raises OSError at a length above the limit."""
        buffer, at, frames = self._data, 0, []
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if size > MAX_FRAME:
                raise OSError(errno.EMSGSIZE, f"a frame of {size} bytes exceeds the limit of {MAX_FRAME}")
            start = at + _LENGTH.size
            if len(buffer) < start + size:
                break
            at = start + size
            frames.append(buffer[start:at])
        del buffer[:at]
        return frames


class FrameSocket:
    """The blocking end of a connection. Both ends raise OSError when it fails."""

    def __init__(self, sock: socket.socket) -> None:
        _tune(sock)
        self.sock = sock
        self._cutter = FrameCutter()

    def send(self, frame: bytes | bytearray, on_full: Callable[[], None] | None = None) -> None:
        """Write `frame`. On a full socket, block, or call `on_full` until there is room."""
        flags = 0 if on_full is None else socket.MSG_DONTWAIT
        head, rest = head_of(frame), memoryview(frame)
        while head or rest:
            try:
                sent = self.sock.sendmsg((head, rest), (), flags)
                head, rest = head[sent:], rest[max(0, sent - len(head)) :]
            except BlockingIOError:
                assert on_full is not None, "a blocking socket raises no BlockingIOError"
                on_full()

    def receive(self) -> list[bytearray]:
        """Return all complete frames, after waiting for one. Returns none at the end of the connection."""
        while data := self.sock.recv(max(_CHUNK, min(self._cutter.missing, _LARGE_CHUNK))):
            if frames := self._cutter.cut(data):
                return frames
        return []


def _tune(sock: socket.socket) -> None:
    """Set buffer sizes and, for TCP, no delay and keepalives.

    Keepalives detect a lost host within seconds instead of the kernel's 15 minutes."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


# ---- connecting -------------------------------------------------------------------------------------------------


def connect(address: Address, timeout_s: float = 30.0) -> FrameSocket:
    """Connect to the process that issued the address, and return the blocking end."""
    sock = socket.socket(address.family)
    sock.settimeout(timeout_s)
    sock.connect(address.endpoint)
    sock.settimeout(None)
    sock.sendall(address.secret)
    return FrameSocket(sock)


Receiver = TypeVar("Receiver", bound=asyncio.Protocol)


async def connect_stream(address: Address, make: Callable[[], Receiver]) -> Receiver:
    """Connect to the process that issued the address, and return the asyncio end."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(address.family)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address.endpoint)
        _tune(sock)
        create = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        transport, receiver = await create(make, sock=sock)
    except BaseException:
        sock.close()
        raise
    transport.write(address.secret)
    return receiver


class Listener:
    """The listening end for invited processes. One thread accepts; any thread may invite or close.

    Its name is abstract, so that its process's death leaves no file behind. Every process on this host can connect
    to an abstract name. Other users' connections are closed at once, and the secret decides about the rest."""

    def __init__(self) -> None:
        self._invited: dict[bytes, Address] = {}  # invitations by secret; each admits one connection
        self._pending: dict[
            int, tuple[socket.socket, float]
        ] = {}  # connections before their secret, and their deadlines
        self._listening: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        self._accepting = threading.Lock()
        self._closed = False
        self._path = f"\0callboard-{secrets.token_hex(8)}"
        self._listen(socket.AF_UNIX, self._path)
        self._tcp: socket.socket | None = None

    def _listen(self, family: int, endpoint: str | tuple[str, int]) -> socket.socket:
        listener = socket.socket(family)
        listener.bind(endpoint)
        listener.listen()
        self._listening[listener.fileno()] = listener
        self._epoll.register(listener, select.EPOLLIN)
        return listener

    def invite(self, host: str = "") -> Address:
        """Return an address for one connection; `host` is this node's address, for a process on another node."""
        secret = secrets.token_bytes(_SECRET_LEN)
        if host and self._tcp is None:
            self._tcp = self._listen(socket.AF_INET, (host, 0))
        address = Address(self._tcp.getsockname() if host and self._tcp is not None else self._path, secret)
        self._invited[secret] = address
        return address

    def accept(self, timeout_s: float = math.inf) -> tuple[Address, FrameSocket] | None:
        """Wait for the next connection; return it with the address that its process was given.

        Returns None after the timeout or when the listener is closed. Errors such as exhausted file descriptors may
        pass, so accept is retried."""
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
                        logger.error("no process can connect for now: %s", e)
                        time.sleep(_ACCEPT_RETRY_S)
        return None

    def _greet(self, listener: socket.socket) -> None:
        """Accept a connection that has not sent its secret. Above the limit of these, close the oldest.

        So strangers can occupy neither threads nor all file descriptors."""
        sock, _ = listener.accept()
        if listener.family == socket.AF_UNIX:
            _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.getuid():
                sock.close()
                return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _SECRET_LEN)  # TCP: readable when the secret is whole
        self._pending[sock.fileno()] = sock, time.monotonic() + _HANDSHAKE_S
        self._epoll.register(sock, select.EPOLLIN)
        if len(self._pending) > _MAX_HANDSHAKES:
            self._refuse(next(iter(self._pending)))

    def _refuse(self, fd: int) -> None:
        self._pending.pop(fd)[0].close()  # this ends its registration too

    def _admit(self, fd: int) -> tuple[Address, FrameSocket] | None:
        """Read the secret of a new connection, and return the connection if it is valid, else close it."""
        sock, _ = self._pending[fd]
        received = b""
        with contextlib.suppress(OSError):
            received = sock.recv(_SECRET_LEN, socket.MSG_DONTWAIT)
        secret = next((s for s in list(self._invited) if hmac.compare_digest(s, received)), None)
        if secret is None:
            self._refuse(fd)
            return None
        del self._pending[fd]
        self._epoll.unregister(fd)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return self._invited.pop(secret), FrameSocket(sock)

    def close(self) -> None:
        """Accept no more connections: a blocked `accept` returns None. Accepted connections stay open."""
        self._closed = True
        for listener in list(self._listening.values()):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        with self._accepting:  # the shutdown has woken it
            for sock in (*self._listening.values(), *(sock for sock, _ in self._pending.values())):
                sock.close()
            self._epoll.close()
