"""The engine's side of the links: accepts fronts, reads their requests, writes at most one frame a step to each.

    thread          count           does
    link-accept     1               accepts fronts
    link-read       1 a front       reads the front's messages; answers its reports and heartbeats
    engine-step     1               writes all other messages

The step thread never waits for a slow front: a full socket leaves a backlog, which the next frame's write continues."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from array import array
from collections.abc import Callable

import msgspec

from actors.wire.adapter_entry import AdapterState
from actors.wire.engine_client import Refusal, RefusalCode
from actors.wire.link_messages import (
    LEASE_S,
    Done,
    FromEngine,
    FromFront,
    FrontFigures,
    Heartbeat,
    Refused,
    SharedPrompts,
    Submit,
    Tokens,
    client_id,
    decode_from_front,
    encode,
    submitted_stream,
)
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.process_meter import MEMORY
from actors.wire.transport import Address, FrameSocket, Listener, framed
from runtime.base.types import CallboardError
from runtime.features.keyed_store import KeyedStore

logger = logging.getLogger(__name__)

_MAX_BACKLOG = 64 << 20  # a front's unread bytes before its connection is closed
_serials = itertools.count()


class Connected:
    """A front has connected: the first message of its connection."""


class Disconnected:
    """The connection has ended: its last message."""


FromLink = FromFront | Connected | Disconnected


class EngineStream:
    """One live request of one connection: its state's `owner` in the scheduler."""

    __slots__ = (
        "admitted_at", "arrived_at", "client_id", "connection", "key", "last_at", "last_step", "number",
        "request_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, request_id: str) -> None:
        self.connection, self.number, self.request_id = connection, number, request_id
        self.client_id = client_id(request_id)
        self.key = f"{connection.serial}.{number}"  # the scheduler's id: a resubmission gets another one
        self.arrived_at = time.monotonic()
        self.admitted_at = 0.0  # 0 until it is admitted
        self.last_step: int | None = None  # the step that sampled its last token; None before the first
        self.last_at = 0.0  # the time of that step


class Connection:
    """One front: its live streams, and the frame of the current step."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self.serial = next(_serials)
        self.streams: dict[int, EngineStream] = {}
        self.prompts, self.store = SharedPrompts(), KeyedStore()  # used by its reader thread
        self.last_stream = 0  # the number of the last submitted one
        self.sent_adapters: dict[str, AdapterState] = {}  # adapters by name in the last Status
        self.last_received_at = time.monotonic()
        self.memory = 0.0  # resident bytes of its process, if it reports them
        self.frame = Tokens()  # the step's output without its columns
        self.stream_column, self.token_column = array("i"), array("i")
        self._backlog = bytearray()

    def flush(self, sampled_at: float) -> None:
        """Send the step's frame; `sampled_at` is a time of the wall clock."""
        frame, self.frame = self.frame, Tokens()
        frame.streams, frame.token_ids = self.stream_column.tobytes(), self.token_column.tobytes()
        frame.sampled_at = sampled_at
        self.stream_column, self.token_column = array("i"), array("i")
        self.send(frame)

    def send(self, message: FromEngine) -> None:
        """Queue a message, and write as much as the socket takes. Too large a backlog closes the connection."""
        frame = framed(encode(message))
        with self._sending:
            self._backlog += frame
            self._write()

    def answer(self, number: int, error: str = "", code: RefusalCode = "busy") -> None:
        """Report that the front's request with this number is done, or its error."""
        self.send(Done(number, error, code))

    def send_backlog(self) -> None:
        """Write as much of the backlog as the socket takes."""
        with self._sending:
            self._write()

    def _write(self) -> None:
        try:
            while self._backlog:
                sent = self._sock.send(self._backlog, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._backlog[:sent]
        except BlockingIOError:
            if len(self._backlog) > _MAX_BACKLOG:
                self.close()
        except OSError:
            self._backlog.clear()  # its reader sees the end and reports it

    @property
    def has_backlog(self) -> bool:
        """True if bytes wait for room in the socket."""
        return bool(self._backlog)

    @property
    def lease_expired(self) -> bool:
        """True if the front has live streams and has sent nothing for LEASE_S."""
        return bool(self.streams) and self.is_silent

    @property
    def is_silent(self) -> bool:
        """True if the front has sent nothing for LEASE_S."""
        return time.monotonic() - self.last_received_at > LEASE_S

    def close(self) -> None:
        """End the connection. Its reader thread delivers Disconnected."""
        with contextlib.suppress(OSError):  # the peer has closed it already
            self._sock.shutdown(socket.SHUT_RDWR)


class LinkServer:
    """Accepts connections of fronts on this node and others.

    The reader threads call `deliver(connection, message)`, in order for each connection: Connected, then the front's
    messages, then Disconnected. They also call `report(figures)`, and send its result to the front."""

    def __init__(
        self, deliver: Callable[[Connection, FromLink], None], report: Callable[[MetricValues], Snapshot]
    ) -> None:
        self._deliver, self._report = deliver, report
        self._listener = Listener()
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def open(self, same_node: bool, host: str) -> Address:
        """Return an address for one connection; `host` is this node's address for other nodes."""
        return self._listener.invite("" if same_node else host)

    def _accept(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            _, front = accepted
            try:
                threading.Thread(target=self._read, args=(front,), name="link-read", daemon=True).start()
            except RuntimeError as e:  # no more threads; this may pass, and the front retries
                front.sock.close()
                logger.error("a front cannot connect for now: %s", e)

    def _read(self, front: FrameSocket) -> None:
        with front.sock:
            connection = Connection(front.sock)
            self._deliver(connection, Connected())
            try:
                while frames := front.receive():
                    connection.last_received_at = time.monotonic()
                    for frame in frames:
                        if connection.store.take(frame) or (message := self._message(connection, frame)) is None:
                            continue
                        if isinstance(message, Heartbeat):
                            connection.send(message)
                        elif isinstance(message, FrontFigures):
                            memory = message.figures.numbers.pop(MEMORY, {})
                            connection.memory = sum(memory.values())
                            connection.send(self._report(message.figures))
                        else:
                            self._deliver(connection, message)
            except (msgspec.DecodeError, OSError) as e:  # a foreign or lost front: later frames cannot be trusted
                logger.warning("the link of a front ends: %s: %s", type(e).__name__, e)
            except Exception:
                logger.exception("a link's reader failed; its connection ends")
            finally:
                self._deliver(connection, Disconnected())

    def _message(self, connection: Connection, frame: bytearray) -> FromFront | Heartbeat | FrontFigures | None:
        """Decode a frame. A Submit that cannot be read is refused, since frames have their lengths: None."""
        try:
            message: FromFront | Heartbeat | FrontFigures = decode_from_front(frame)
            if isinstance(message, Submit):
                message = connection.prompts.restored(message)
                message.request = message.request.with_keyed(connection.store.whole)
            return message
        except (CallboardError, msgspec.DecodeError) as e:
            if (stream := submitted_stream(frame)) is None:
                raise
            logger.warning("a front's request cannot be read: %s", e)
            connection.prompts.forget()
            text = f"The engine cannot read the request ({str(e).rstrip('.')}); check its values."
            connection.send(Refused(stream, text, Refusal.NEVER))
            return None

    def close(self) -> None:
        """Accept no more fronts. Connections end with their sockets."""
        self._listener.close()
