"""A draft's loop over real sockets: it reads engines that connect while it waits, and forgets those engines when they
leave."""

import socket
import threading

import msgspec
import pytest

from actors.runners.draft import DraftLoop, SocketDraft
from actors.wire.transport import FrameSocket
from runtime.speculation.draft import DraftRequests, DraftTokens


class EchoCore:
    """Answers a frame with draft tokens for each stream that it closes."""

    def __init__(self):
        self.outbox, self.forgotten, self.has_forgotten = {}, [], threading.Semaphore(0)

    def step(self) -> bool:
        return False

    def take(self, owner, told: DraftRequests) -> None:
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
