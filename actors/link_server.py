"""The engine's side of the links: accepts replicas, reads their requests, writes at most one frame a step to each.

Threads: one accepts, one reads each replica and answers its reports and heartbeats, and the engine's step thread writes
all else. It never waits for a slow replica: what the socket does not take at once is kept and tried again with the next
frame.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable

from actors.messages import (
    LEASE_S,
    MAX_FRAME,
    PREFIX,
    Abort,
    AbortById,
    Ended,
    Heartbeat,
    LinkAddress,
    Refused,
    Report,
    Status,
    Submit,
    Tokens,
    decode_from_replica,
    encode,
    receive,
    tune_tcp,
)
from actors.metrics import MetricValues, Snapshot
from runtime.core.types import CallboardError, PromptLogprobs, TokenLogprobs

logger = logging.getLogger(__name__)

_SECRET_LEN = 32
_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 64  # at once; a replica's takes milliseconds
_ACCEPT_RETRY_S = 0.1
_serials = itertools.count()


class Stream:
    """One live request of one connection: the `owner` that the scheduler carries."""

    __slots__ = (
        "admitted_at", "arrived_at", "connection", "key", "last_at", "num_accepted", "num_guessed", "number",
        "request_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, request_id: str) -> None:
        self.connection, self.number, self.request_id = connection, number, request_id
        self.key = f"{connection.serial}.{number}"  # the scheduler's id: never that of a resubmission
        self.arrived_at = time.monotonic()
        self.admitted_at = 0.0  # 0: it has not been, yet
        self.last_at = 0.0  # when its last token was sampled; the very object that the step has. 0: it has none, yet
        self.num_guessed = self.num_accepted = 0  # of its guesses, as far as its replica was told

    def tell_verified(self, num_guessed: int, num_accepted: int) -> None:
        """So many guesses have been verified by now, and so many were right; what is new goes into the frame."""
        if num_guessed > self.num_guessed:
            new = self.number, num_guessed - self.num_guessed, num_accepted - self.num_accepted
            self.connection.verified.append(new)
            self.num_guessed, self.num_accepted = num_guessed, num_accepted


class Connection:
    """One replica: its live streams, and the frame that the current step fills for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self.serial = next(_serials)
        self.streams: dict[int, Stream] = {}
        self.last_heard = time.monotonic()
        self.sampled_at = 0.0  # the tokens of this frame, by the wall clock
        self._backlog = bytearray()
        self._clear()

    def _clear(self) -> None:
        self.stream_column, self.token_column = array("i"), array("i")
        self.ended: list[Ended] = []
        self.started: list[tuple[int, int, float, float]] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
        self.verified: list[tuple[int, int, int]] = []
        self.accepted: list[tuple[int, bool]] = []

    def flush(self) -> None:
        """Send what the step gathered, as one frame."""
        self.send(
            Tokens(
                self.stream_column.tobytes(),
                self.token_column.tobytes(),
                self.ended,
                self.started,
                self.logprobs,
                self.sampled_at,
                self.prompt_logprobs,
                self.verified,
                self.accepted,
            )
        )
        self._clear()

    def send(self, message: Tokens | Refused | Status | Snapshot | Heartbeat) -> None:
        """Queue a message and write what the socket takes; a replica that lets 64 MiB pile up is cut off."""
        frame = encode(message)
        with self._sending:
            self._backlog += frame
            self._write()

    def send_backlog(self) -> None:
        """Write what the socket takes of what was queued."""
        with self._sending:
            self._write()

    def _write(self) -> None:
        try:
            while self._backlog:
                sent = self._sock.send(self._backlog, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._backlog[:sent]
        except BlockingIOError:
            if len(self._backlog) > MAX_FRAME:
                self.close()
        except OSError:
            self._backlog.clear()  # its reader sees the end and reports it

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for the socket."""
        return bool(self._backlog)

    @property
    def lease_expired(self) -> bool:
        """Whether its lease has run out: live streams and not a word for LEASE_S."""
        return bool(self.streams) and time.monotonic() - self.last_heard > LEASE_S

    def close(self) -> None:
        """End the connection; its reader thread reports it as gone."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)


class LinkServer:
    """Listens on a Unix socket, and on TCP once a replica of another node asks.

    `deliver(connection, message)` is called from the reader threads, in order for each connection: a new one with
    None, then its messages, then None again when it is gone. `report(figures)` is, too, and its answer sent.
    """

    def __init__(
        self,
        deliver: Callable[[Connection, Submit | Abort | AbortById | None], None],
        report: Callable[[MetricValues], Snapshot],
    ) -> None:
        self._deliver, self._report = deliver, report
        self._secrets: set[bytes] = set()
        self._handshaking: dict[socket.socket, None] = {}  # connections that have not told a secret yet
        self._handshaking_lock = threading.Lock()
        self._closed = False
        # An abstract name: no file that outlives a killed engine. Anyone on this host may connect; the secret decides.
        self._name = f"\0callboard-{secrets.token_hex(8)}"
        self._unix = self._listen(socket.AF_UNIX, self._name)
        self._tcp: socket.socket | None = None

    def _listen(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), name="link-accept", daemon=True).start()
        return listener

    def open(self, same_node: bool, host: str) -> LinkAddress:
        """An address good for one connection; `host` is this node's, for a replica on another one."""
        secret = secrets.token_bytes(_SECRET_LEN)
        self._secrets.add(secret)
        if same_node:
            return LinkAddress(self._name, "", 0, secret)
        if self._tcp is None:
            self._tcp = self._listen(socket.AF_INET, (host, 0))
        return LinkAddress("", host, self._tcp.getsockname()[1], secret)

    def _accept(self, listener: socket.socket) -> None:
        """What keeps a replica out now, as files or threads that are used up do, may pass: the door stays open."""
        said = ""
        while not self._closed:
            try:
                sock, _ = listener.accept()
                try:
                    self._make_room(sock)
                    threading.Thread(target=self._read, args=(sock,), name="link-read", daemon=True).start()
                    said = ""
                except RuntimeError:
                    self._handshaking.pop(sock, None)
                    sock.close()
                    raise
            except (OSError, RuntimeError) as e:
                if not self._closed and said != (said := str(e)):
                    logger.error("no replica can connect for now: %s", e)
                time.sleep(_ACCEPT_RETRY_S)

    def _make_room(self, sock: socket.socket) -> None:
        """Those without the secret may take neither all files nor all threads: the oldest of too many is cut off."""
        with self._handshaking_lock:
            self._handshaking[sock] = None
            if len(self._handshaking) > _MAX_HANDSHAKES:
                oldest = next(iter(self._handshaking))
                del self._handshaking[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _admit(self, sock: socket.socket) -> bool:
        """Whether the first frame is a secret that was handed out and not used yet."""
        sock.settimeout(_HANDSHAKE_S)
        prefix = sock.recv(PREFIX.size, socket.MSG_WAITALL)
        if prefix != PREFIX.pack(_SECRET_LEN):
            return False
        said = sock.recv(_SECRET_LEN, socket.MSG_WAITALL)
        known = next((s for s in list(self._secrets) if hmac.compare_digest(s, said)), None)
        if known is None:
            return False
        self._secrets.discard(known)
        sock.settimeout(None)
        if sock.family == socket.AF_INET:
            tune_tcp(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        return True

    def _read(self, sock: socket.socket) -> None:
        with sock:
            try:
                if not self._admit(sock):
                    return
            except OSError:
                return
            finally:
                with self._handshaking_lock:
                    self._handshaking.pop(sock, None)
            connection = Connection(sock)
            self._deliver(connection, None)
            try:
                while (body := receive(sock)) is not None:
                    connection.last_heard = time.monotonic()
                    message = decode_from_replica(body)
                    if isinstance(message, Heartbeat):
                        connection.send(message)
                    elif isinstance(message, Report):
                        connection.send(self._report(message.figures))
                    else:
                        self._deliver(connection, message)
            except CallboardError:
                pass  # not a replica of ours: nothing after this frame can be trusted
            except Exception:
                logger.exception("a link's reader failed; its connection ends")
            finally:
                self._deliver(connection, None)

    def close(self) -> None:
        """Stop listening; connections end with their sockets."""
        self._closed = True
        for listener in (self._unix, self._tcp):
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # else the thread would stay in accept()
                listener.close()
