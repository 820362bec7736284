"""The engine's side of the links: accepts fronts, reads their requests, writes at most one frame a step to each.

Threads: one accepts, one reads each front and answers its reports and heartbeats, and the engine's step thread writes
all else. It never waits for a slow front: what the socket does not take at once is kept and tried again with the next
frame.
"""

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
from actors.wire.messages import (
    LEASE_S,
    Done,
    FromEngine,
    FromFront,
    Heartbeat,
    Report,
    SharedPrompts,
    Submit,
    Tokens,
    client_id,
    decode_from_front,
    encode,
)
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.process_meter import MEMORY
from actors.wire.transport import Address, FrameSocket, Listener, framed
from runtime.features.grammar_store import GrammarStore
from runtime.spec.types import CallboardError, GrammarUpdate

logger = logging.getLogger(__name__)

_MAX_BACKLOG = 64 << 20  # bytes that a front may leave unread
_serials = itertools.count()


class Stream:
    """One live request of one connection: the `owner` that the scheduler carries."""

    __slots__ = (
        "admitted_at", "arrived_at", "client_id", "connection", "key", "last_at", "last_step", "number",
        "request_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, number: int, request_id: str) -> None:
        self.connection, self.number, self.request_id = connection, number, request_id
        self.client_id = client_id(request_id)
        self.key = f"{connection.serial}.{number}"  # the scheduler's id: never that of a resubmission
        self.arrived_at = time.monotonic()
        self.admitted_at = 0.0  # 0: it has not been, yet
        self.last_step: int | None = None  # the engine's step that sampled its last token
        self.last_at = 0.0  # when that was


class Connection:
    """One front: its live streams, and the frame that the current step fills for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self.serial = next(_serials)
        self.streams: dict[int, Stream] = {}
        self.prompts, self.grammars = SharedPrompts(), GrammarStore()  # its reader's
        self.last_stream = 0  # the number of the last that it has submitted
        self.sent_adapters: dict[str, AdapterState] = {}  # by name, as of the last Status
        self.last_heard = time.monotonic()
        self.memory = 0.0  # resident bytes of its process, if it reports them here
        self.frame = Tokens()  # what this step gains, but for its columns
        self.stream_column, self.token_column = array("i"), array("i")
        self._backlog = bytearray()

    def flush(self, sampled_at: float) -> None:
        """Send what the step gathered, as one frame; `sampled_at` is by the wall clock."""
        frame, self.frame = self.frame, Tokens()
        frame.streams, frame.token_ids = self.stream_column.tobytes(), self.token_column.tobytes()
        frame.sampled_at = sampled_at
        self.stream_column, self.token_column = array("i"), array("i")
        self.send(frame)

    def send(self, message: FromEngine) -> None:
        """Queue a message and write what the socket takes; a front that lets too much pile up is cut off."""
        frame = framed(encode(message))
        with self._sending:
            self._backlog += frame
            self._write()

    def answer(self, number: int, error: str = "") -> None:
        """The thing that the front asked for with this number is done, or why it is not."""
        self.send(Done(number, error))

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
            if len(self._backlog) > _MAX_BACKLOG:
                self.close()
        except OSError:
            self._backlog.clear()  # its reader sees the end and reports it

    @property
    def has_backlog(self) -> bool:
        """Something waits for room in the socket."""
        return bool(self._backlog)

    @property
    def lease_expired(self) -> bool:
        """The front has live streams and has said nothing for LEASE_S."""
        return bool(self.streams) and self.is_silent

    @property
    def is_silent(self) -> bool:
        """The front has sent nothing for LEASE_S."""
        return time.monotonic() - self.last_heard > LEASE_S

    def close(self) -> None:
        """End the connection; its reader thread reports it as gone."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)


class LinkServer:
    """Lets fronts connect, from this node and others.

    `deliver(connection, message)` is called from the reader threads, in order for each connection: a new one with
    None, then its messages, then None again when it is gone. `report(figures)` is, too, and its answer sent.
    """

    def __init__(
        self,
        deliver: Callable[[Connection, FromFront | None], None],
        report: Callable[[MetricValues], Snapshot],
    ) -> None:
        self._deliver, self._report = deliver, report
        self._listener = Listener()
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def open(self, same_node: bool, host: str) -> Address:
        """An address for one connection; `host` is this node's, as others reach it."""
        return self._listener.invite("" if same_node else host)

    def _accept(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            _, front = accepted
            try:
                threading.Thread(target=self._read, args=(front,), name="link-read", daemon=True).start()
            except RuntimeError as e:  # threads are used up, which may pass: the front tries it again
                front.sock.close()
                logger.error("a front cannot connect for now: %s", e)

    def _read(self, front: FrameSocket) -> None:
        with front.sock:
            connection = Connection(front.sock)
            self._deliver(connection, None)
            try:
                while frames := front.receive():
                    connection.last_heard = time.monotonic()
                    for message in map(decode_from_front, frames):
                        if isinstance(message, Heartbeat):
                            connection.send(message)
                        elif isinstance(message, Report):
                            memory = message.figures.numbers.pop(MEMORY, {})
                            connection.memory = sum(memory.values())
                            connection.send(self._report(message.figures))
                        elif isinstance(message, GrammarUpdate):
                            connection.grammars.apply(message)
                        else:
                            if isinstance(message, Submit):
                                message = connection.prompts.restored(message)
                                message.request = connection.grammars.whole_request(message.request)
                            self._deliver(connection, message)
            except (CallboardError, msgspec.DecodeError, OSError):
                pass  # not a front of ours, or gone: nothing after this frame can be trusted
            except Exception:
                logger.exception("a link's reader failed; its connection ends")
            finally:
                self._deliver(connection, None)

    def close(self) -> None:
        """Let no more fronts in; connections end with their sockets."""
        self._listener.close()
