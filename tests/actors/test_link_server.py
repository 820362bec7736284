"""The engine's socket: strangers, exhausted files and broken frames must not disturb the links of others."""

import asyncio
import errno
import socket
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from actors.wire import transport
from actors.wire.link_messages import AbortById, Heartbeat, Report, Submit, decode_from_engine, encode
from actors.wire.metrics import MetricValues
from runtime.core.requests import requests_of
from runtime.spec.types import FinishReason, SamplingParams
from tests.support.engine.fake_runner import sequential
from tests.support.engine.links import Engine, eventually, link_to, only_link, read, request


@pytest.fixture
async def engine():
    engine = Engine()
    yield engine
    engine.loop.close()


def replica_of(engine):
    """A connection like a replica's, to write any frame to."""
    return transport.connect(engine.loop.links.open(True, ""))


def num_readers():
    return sum(thread.name == "link-read" for thread in threading.enumerate())


async def answer(engine, i):
    """The answer over a link of its own."""
    group = link_to(engine)
    await asyncio.wait_for(group.start(), 60)
    tokens, reason, _ = await asyncio.wait_for(read(group, request(i)), 5)
    group.close()
    return tokens, reason


@pytest.mark.parametrize("what", ["files", "threads"])
async def test_the_server_accepts_without_free_files_or_threads(engine, monkeypatch, what):
    failures = [3]
    accept, start = socket.socket.accept, threading.Thread.start

    def fail_of(error, fails, works):
        def call(self):
            if fails(self) and failures[0]:
                failures[0] -= 1
                raise error
            return works(self)

        return call

    full = OSError(errno.EMFILE, "Too many open files")
    no_thread = RuntimeError("can't start new thread")
    if what == "files":
        monkeypatch.setattr(socket.socket, "accept", fail_of(full, lambda _: True, accept))
    else:
        monkeypatch.setattr(
            threading.Thread, "start", fail_of(no_thread, lambda thread: thread.name == "link-read", start)
        )
    assert await answer(engine, 0) == sequential(request(0), 512)
    await eventually(lambda: not failures[0])
    assert await answer(engine, 1) == sequential(request(1), 512)


async def test_strangers_cannot_block_a_replica(engine, monkeypatch):
    monkeypatch.setattr(transport, "_MAX_HANDSHAKES", 8)
    before = num_readers()
    path = engine.loop.links.open(True, "").endpoint
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    try:
        for stranger in strangers:
            stranger.connect(path)
        for stranger in strangers[:32]:  # the oldest are cut off, so that silent connections use few files
            stranger.settimeout(60)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        assert await answer(engine, 0) == sequential(request(0), 512)
        assert num_readers() - before <= 1
    finally:
        for stranger in strangers:
            stranger.close()
    await eventually(lambda: num_readers() == before)


async def test_a_reader_that_fails_ends_its_connection_and_no_other(engine, monkeypatch, caplog):
    group = link_to(engine)
    await group.start()
    engine.runners[-1].delay_s = 0.005
    reading = asyncio.create_task(read(group, request(0, max_tokens=100)))
    await eventually(lambda: engine.loop.stats()["running"] == 1)
    replica = replica_of(engine)
    with replica.sock:
        replica.send(encode(Submit(1, request(1, max_tokens=400), resumed=False)))
        await eventually(lambda: engine.loop.stats()["running"] == 2)
        monkeypatch.setattr(engine.loop.links, "_report", lambda figures: 1 / 0)
        replica.send(encode(Report(MetricValues())))
        await eventually(lambda: engine.loop.stats()["connections"] == 1)
        assert engine.loop.stats()["streams"] == [1]
    assert "division by zero" in caplog.text
    assert (await reading)[:2] == sequential(request(0, max_tokens=100), 512)
    group.close()


async def test_figures_of_all_fronts_add_up(engine):
    group = link_to(engine)
    await group.start()
    connection = only_link(group)._connection
    figures = MetricValues()
    for value in (3, 1500):
        figures.histogram("vllm:request_prompt_tokens").observe(value)
    for _ in range(2):
        snapshots = await group.report({"0": figures})
    total = snapshots["0"].figures.histograms["vllm:request_prompt_tokens"]
    assert dict(total.cumulative())["5.0"] == 2
    assert sum(total.counts) == 4
    assert only_link(group)._connection is connection
    group.close()


async def test_a_heartbeat_is_answered_while_the_step_thread_is_busy(engine):
    """The engine itself finds a step that hangs (step_timeout_s), so its replicas must not leave it during a long
    one."""
    engine.runners[-1].hang = True
    replica = replica_of(engine)
    with replica.sock:
        replica.send(encode(Submit(1, request(0), resumed=False)))
        await eventually(lambda: engine.loop.stats()["running"] == 1)
        replica.send(encode(Heartbeat()))
        messages = []
        while not any(isinstance(message, Heartbeat) for message in messages):
            messages = map(decode_from_engine, await asyncio.wait_for(asyncio.to_thread(replica.receive), 60))


@pytest.mark.parametrize("name", ["cmpl-my-own-id-0", "cmpl-my-own-id", "my-own-id"])
async def test_an_abort_by_id_reads_no_other_stream(engine, monkeypatch, name):
    group = link_to(engine)
    await group.start()
    engine.runners[-1].delay_s = 0.01
    others = [replace(request(i, max_tokens=30), request_id=f"cmpl-other{i}-0") for i in range(10)]
    mine = replace(request(3, max_tokens=400), request_id="cmpl-my-own-id-0")
    reading = [asyncio.create_task(read(group, r)) for r in (*others, mine)]
    await eventually(lambda: len(engine.loop.core.scheduler.requests) == 11)
    looked_at, means = [], AbortById.means
    monkeypatch.setattr(AbortById, "means", lambda self, i: looked_at.append(i) or means(self, i))
    group.abort(name)
    group.abort("unknown")
    assert (await reading[-1])[1] is FinishReason.ABORT
    assert set(looked_at) == {mine.request_id}
    for other, task in zip(others, reading, strict=False):
        assert (await task)[:2] == sequential(other, 512)
    assert not engine.loop.requests._by_id
    group.close()


async def test_choices_send_their_prompt_once(engine, monkeypatch):
    group = link_to(engine)
    await group.start()
    connection, sizes = only_link(group)._connection, []
    write = connection.transport.write
    sending = Mock(write=lambda frame: (sizes.append(len(frame)), write(frame)))
    monkeypatch.setattr(connection, "transport", sending)
    submitted, add = [], engine.loop.core.add
    monkeypatch.setattr(engine.loop.core, "add", lambda req, owner: (submitted.append(req), add(req, owner))[1])
    prompt, params = [1, 2, 3] * 100, SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    choices = requests_of(map(str, range(4)), prompt, params, 4, prediction=tuple(prompt))
    (other,) = requests_of(iter("o"), list(prompt), params)
    answers = await asyncio.gather(*(read(group, choice) for choice in (*choices, other)))
    assert [tokens for tokens, _, _ in answers] == [sequential(choice, 512)[0] for choice in (*choices, other)]
    assert {id(request.token_ids) for request in submitted[:4]} == {id(submitted[0].token_ids)}
    assert {id(request.prediction) for request in submitted[:4]} == {id(submitted[0].prediction)}
    assert submitted[4].prediction == ()
    first, *repeated, last = [size for size in sizes if size > 20]  # others are heartbeats
    assert len(repeated) == 3
    assert max(repeated) + len(prompt) // 2 < min(first, last)
    group.close()


async def test_a_first_request_that_repeats_another_ends_its_link(engine):
    replica = replica_of(engine)
    with replica.sock:
        replica.send(encode(Submit(1, request(0), resumed=False, repeats=True)))
        while await asyncio.wait_for(asyncio.to_thread(replica.receive), 60):
            pass
    assert not engine.loop.core.scheduler.requests
