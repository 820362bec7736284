"""Frames over real sockets: whole frames, limits, strangers and secrets."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runners.step_channel import RunnersLost, SocketExecutor, serve_steps
from actors.wire import transport
from actors.wire.transport import Address, connect
from tests.support.engine.executor_group import (
    HOSTS,
    Runner,
    plan_of,
)


def pair(kind: str) -> tuple[transport.FrameSocket, transport.FrameSocket]:
    if kind == "unix":
        a, b = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            a = socket.create_connection(listener.getsockname())
            b, _ = listener.accept()
    return transport.FrameSocket(a), transport.FrameSocket(b)


KINDS = pytest.mark.parametrize("kind", ["unix", "tcp"])
chunks = st.builds(lambda n, more: max(0, n * transport._CHUNK + more), st.integers(0, 40), st.integers(-6, 2))


@KINDS
@given(st.lists(chunks | st.integers(0, 200), min_size=1, max_size=6))
def test_frames_of_any_size_keep_their_bounds(kind, sizes):
    a, b = pair(kind)
    frames = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    sender = threading.Thread(target=lambda: ([a.send(f) for f in frames], a.sock.close()))
    sender.start()
    received = []
    while whole := b.receive():
        received += whole
    assert received == frames
    sender.join()
    b.sock.close()


@KINDS
def test_a_truncated_frame_ends_the_connection(kind):
    a, b = pair(kind)
    a.sock.send(transport._LENGTH.pack(1000) + bytes(100))
    a.sock.close()
    assert b.receive() == []
    b.sock.close()


@KINDS
def test_an_oversize_frame_is_refused_before_it_is_read(kind, monkeypatch):
    monkeypatch.setattr(transport, "MAX_FRAME", 1 << 20)
    for head in (transport._LENGTH.pack((1 << 32) - 1), transport._LENGTH.pack((1 << 20) + 1)):
        a, b = pair(kind)
        a.sock.send(head)
        with pytest.raises(OSError, match="exceeds the limit of 1048576"):
            b.receive()
        a.sock.close()
        b.sock.close()


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 50)))
def test_a_stream_cut_anywhere_yields_whole_frames(frames, cuts):
    stream, cutter, found = b"".join(map(transport.framed, frames)), transport.FrameCutter(), []
    for size in [*cuts, len(stream)]:
        found += cutter.cut(stream[:size])
        stream = stream[size:]
    assert found == frames


@given(st.binary(max_size=200))
def test_random_bytes_yield_bounded_frames_or_an_error(data):
    found = []
    with contextlib.suppress(OSError):  # a length above the limit
        found = transport.FrameCutter().cut(data)
    assert sum(4 + len(frame) for frame in found) <= len(data)


def dial(address: Address) -> socket.socket:
    sock = socket.socket(address.family)
    sock.connect(address.endpoint)
    sock.settimeout(60)
    return sock


@HOSTS
def test_strangers_are_dropped_without_delay_for_others(host):
    executor = SocketExecutor(1)
    address = executor.address(0, host)
    silent, wrong, short = (dial(address) for _ in range(3))
    wrong.sendall(b"x" * 32)
    short.sendall(b"x")
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(executor.accept, 200)  # seconds; a stranger that blocks others fails the test
        assert wrong.recv(1) == b""
        assert not accepted.done()
        serving = pool.submit(serve_steps, connect(address), Runner())
        accepted.result(100)
        executor.submit(plan_of(0))
        assert executor.collect().step_id == 0
        for sock in (silent, short):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        executor.close()
        serving.result(60)


def test_a_secret_opens_one_connection_and_is_not_printed():
    executor = SocketExecutor(2)
    first, second = executor.address(0), executor.address(1)
    assert first.secret != second.secret
    assert repr(first.secret) not in repr(first)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(executor.accept, 200)  # seconds; a stranger that blocks others fails the test
        rank_0 = connect(first)
        again = connect(first)
        assert again.receive() == []
        rank_1 = connect(second)
        accepted.result(60)
    executor.close()
    assert rank_0.receive() == []
    assert rank_1.receive() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_are_disconnected_before_their_first_byte():
    executor = SocketExecutor(1)
    address = executor.address(0)
    answer, told = os.pipe()
    if (pid := os.fork()) == 0:  # a child, because a process belongs to one user
        with contextlib.suppress(OSError):  # it may be disconnected while it sends
            os.setuid(65534)
            sock = dial(address)
            sock.sendall(address.secret)
            os.write(told, sock.recv(1))
        os._exit(0)
    with pytest.raises(RunnersLost, match="did not connect"):
        executor.accept(1)
    os.waitpid(pid, 0)
    os.set_blocking(answer, False)
    with pytest.raises(BlockingIOError):  # nothing was sent to it
        os.read(answer, 1)
    os.close(answer)
    os.close(told)


def test_ranks_that_do_not_connect_in_time_are_named():
    executor = SocketExecutor(3)
    wire = connect(executor.address(1))
    with pytest.raises(RunnersLost, match=r"Ranks \[0, 2\] did not connect within 0 s") as error:
        executor.accept(0.05)
    assert error.value.rank == 0
    wire.sock.close()
