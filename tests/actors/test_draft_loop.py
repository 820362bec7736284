"""A draft's loop over real sockets: it reads engines that connect while it waits, and forgets those engines when they
leave."""

import socket
import threading
from functools import partial

import msgspec
import pytest

from actors.runners.draft import DraftLoop, SocketDraft
from actors.wire.transport import FrameSocket
from runtime.base.types import Grammar, Request, SamplingParams
from runtime.speculation.draft import DraftRequests, DraftTokens, OpenStream


class EchoCore:
    """Answers a frame with draft tokens for each stream that it closes."""

    def __init__(self):
        self.outbox, self.opened, self.forgotten, self.has_forgotten = {}, [], [], threading.Semaphore(0)

    def step(self) -> bool:
        return False

    def take(self, owner, told: DraftRequests) -> None:
        self.opened += told.opened
        self.outbox.setdefault(owner, []).extend(DraftTokens(stream, 0, []) for stream in told.closed)

    def forget(self, owner) -> None:
        self.forgotten.append(owner)
        self.has_forgotten.release()


def attach(loop: DraftLoop) -> SocketDraft:
    ours, theirs = socket.socketpair()
    loop.attach(FrameSocket(theirs))
    return SocketDraft(FrameSocket(ours))


def test_engines_connect_and_leave_while_it_waits():
    core = EchoCore()
    loop = DraftLoop(core, pytest.fail)
    for _ in range(3):  # descriptors are free again
        engines = [attach(loop) for _ in range(3)]
        for i, engine in enumerate(engines):
            engine.send(DraftRequests(closed=[i, i + 10]))
        for i, engine in enumerate(engines):
            assert engine.receive(5) == [DraftTokens(i, 0, []), DraftTokens(i + 10, 0, [])]
            assert engine.receive(0) is None
        for engine in engines:
            engine._draft.sock.close()
        for _ in engines:
            assert core.has_forgotten.acquire(timeout=60)
    assert len(core.forgotten) == 9
    assert not core.outbox


def test_a_draft_gets_each_grammar_once():
    core, grammars = EchoCore(), [Grammar(f"key {i}", f"{i}" * 100_000, "") for i in range(2)]
    loop, sizes = DraftLoop(core, pytest.fail), list[int]()
    requests = [Request("", [1], 1, SamplingParams(grammar=each)) for each in [*grammars, None, *grammars]]
    opened = [OpenStream(i, request, 3) for i, request in enumerate(requests)]

    def send(end: FrameSocket, frame: bytes, on_full) -> None:
        sizes.append(len(frame))
        FrameSocket.send(end, frame, on_full)

    for engine in (attach(loop), attach(loop)):
        engine._draft.send = partial(send, engine._draft)
        for closed in ([7], [8]):
            engine.send(DraftRequests(opened=opened, closed=closed))
            assert engine.receive(5) == [DraftTokens(*closed, 0, [])]
    assert [size > 100_000 for size in sizes] == [True, False, False] * 2
    assert core.opened == 4 * opened


def test_frames_that_arrive_together_are_read_together():
    ours, theirs = socket.socketpair()
    draft, encode = SocketDraft(FrameSocket(ours)), msgspec.msgpack.encode
    for i in range(3):
        FrameSocket(theirs).send(encode([DraftTokens(i, 0, [])]))
    assert draft.receive(5) == [DraftTokens(i, 0, []) for i in range(3)]
    theirs.close()
    with pytest.raises(ConnectionResetError):
        draft.receive(5)
    ours.close()
