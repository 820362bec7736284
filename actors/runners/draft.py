"""The draft actor: a process with a small model that proposes draft tokens (protocol: runtime/speculation/draft.py).

    engine's step thread                     draft's thread
    DraftClient - SocketDraft  --- DraftRequests -->  DraftLoop - DraftCore - ModelRunner
                               <-- Chains -

Frames are msgpack, over transport.py. A draft is a cache of its engines' state (C8): it is never restarted on its own,
it starts empty, and its faults cost only speed."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import msgspec

from actors.ray.process import SWITCH_INTERVAL_S, ModelActor, freeze_garbage
from actors.wire.transport import Address, FrameSocket, connect
from runtime.base.config import EngineConfig
from runtime.features.keyed_store import KeyedSender, KeyedStore
from runtime.speculation.draft import DraftCore, DraftRequests, DraftTokens

logger = logging.getLogger(__name__)

StepMicroseconds = tuple[tuple[int, float], ...]

_UNREAD_MS = 200  # a draft that does not read within this is dropped


class SocketDraft:
    """The engine's end of the socket to a draft (draft_client.DraftWire)."""

    def __init__(self, draft: FrameSocket) -> None:
        self._draft, self._sender = draft, KeyedSender()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[DraftTokens])
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(draft.sock, select.POLLIN)
        self._writable.register(draft.sock, select.POLLOUT)

    def send(self, requests: DraftRequests) -> None:
        values = [value for each in requests.opened for value in each.request.keyed.values()]
        message = self._encoder.encode(requests.with_keyed(lambda value: value.named))
        for frame in [*self._sender.frames(values), message]:
            self._draft.send(frame, self._make_room)

    def _make_room(self) -> None:
        if not self._writable.poll(_UNREAD_MS):
            raise TimeoutError("the draft does not read")

    def receive(self, timeout_s: float) -> list[DraftTokens] | None:
        if not self._readable.poll(timeout_s * 1000):
            return None
        frames = self._draft.receive()
        if not frames:
            raise ConnectionResetError("the draft has closed its connection")
        return [chain for frame in frames for chain in self._decoder.decode(frame)]


class DraftLoop:
    """The draft's thread: reads from all engines, computes, replies. A failed step ends the process."""

    def __init__(self, core: DraftCore, on_failure: Callable[[], None]) -> None:
        self._core, self._on_failure = core, on_failure
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(DraftRequests)
        self._engines: dict[int, FrameSocket] = {}  # connections by file descriptor, which names the engine in the core
        self._stores: dict[int, KeyedStore] = {}  # each engine connection's grammars
        self._epoll = select.epoll()
        threading.Thread(target=self._run, name="draft-step", daemon=True).start()

    def attach(self, engine: FrameSocket) -> None:
        """Serve one more engine until its connection ends. Any thread may call this."""
        self._stores[engine.sock.fileno()] = KeyedStore()
        self._engines[engine.sock.fileno()] = engine
        self._epoll.register(engine.sock, select.EPOLLIN)

    def _run(self) -> None:
        try:
            while True:
                busy = self._core.step()
                self._send_replies()
                for fd, _ in self._epoll.poll(0 if busy else None):
                    self._receive(fd)
                self._send_replies()  # reply before the next step: an engine takes a silent draft for hung
        except Exception:
            logger.exception("a draft's step failed")
            self._on_failure()

    def _send_replies(self) -> None:
        owner: Any
        for owner, chains in self._core.outbox.items():
            with suppress(OSError):  # the next receive detects its end
                self._engines[owner].send(self._encoder.encode(chains))
        self._core.outbox.clear()

    def _receive(self, fd: int) -> None:
        frames = []
        with suppress(OSError):
            frames = self._engines[fd].receive()
        for frame in frames:
            if not (store := self._stores[fd]).take(frame):
                self._core.take(fd, self._decoder.decode(frame).with_keyed(store.whole))
        if frames:
            return
        self._core.forget(fd)
        del self._stores[fd]
        self._engines.pop(fd).sock.close()


class DraftActor(ModelActor):
    """One draft model, for one engine or several."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0, "max_concurrency": 8}

    def __init__(self) -> None:
        super().__init__()
        self._loading = threading.Lock()
        self._loop: DraftLoop | None = None

    def load(self, config: EngineConfig) -> StepMicroseconds:
        """Load the draft model for an engine with `config`, once. Returns its step times (ModelInfo.step_us).

        Raises CallboardError if the model cannot be loaded or its vocabulary differs from the engine's."""
        with self._loading:
            if self._loop is None:
                with self._log.recording():
                    from runtime.assembly.draft import load_draft

                    self._log.note("libraries imported")
                    core = load_draft(config)
                    freeze_garbage()
                    self._log.note("ready")
                sys.setswitchinterval(SWITCH_INTERVAL_S)
                self._step_us = core.scheduler.info.step_us
                self._loop = DraftLoop(core, lambda: os._exit(1))
        return self._step_us

    def attach(self, address: Address) -> None:
        """Connect to an engine and serve it until the connection ends."""
        assert self._loop is not None, "load comes first"
        self._loop.attach(connect(address))
