"""The engine's socket: strangers, exhausted files and broken frames must not disturb the links of others."""

import asyncio
import errno
import socket
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from actors.engine.live_requests import LiveRequests
from actors.wire import transport
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import (
    AbortById,
    FrontFigures,
    Heartbeat,
    Refused,
    SharedPrompts,
    Submit,
    Tokens,
    decode_from_engine,
    encode,
)
from actors.wire.metrics import MetricValues
from runtime.base.types import FinishReason, Grammar, Request, SamplingParams
from runtime.core.requests import requests_of
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


POISON = [
    {"priority": 1.5},
    {"token_ids": [1.5]},
    {"token_ids": [True]},
    {"cache_salt": None},
    {"params": {"max_tokens": 1.5}},
    {"params": {"stop_token_ids": (1.5,)}},
    {"params": {"temperature": -1.0}},
    {"params": {"grammar": Grammar("unknown", "", "")}},
]


def poisoned(fields):
    """A request with values that no check has seen."""
    params = request(0).params
    for name, value in fields.get("params", {}).items():
        object.__setattr__(params, name, value)
    return replace(request(0), **({**fields, "params": params}))


@pytest.mark.parametrize("fields", POISON, ids=str)
async def test_a_request_that_cannot_be_read_is_refused(engine, caplog, monkeypatch, fields):
    monkeypatch.setattr(Request, "named", property(lambda request: request))
    group = link_to(engine)
    await asyncio.wait_for(group.start(), 5)
    engine.runners[-1].delay_s = 0.005
    reading = asyncio.create_task(read(group, request(1, max_tokens=60)))
    await eventually(lambda: engine.loop.stats()["running"] == 1)
    connections = list(engine.loop._connections)
    monkeypatch.setattr(only_link(group)._connection.sender, "frames", lambda _: [])
    for _ in range(3):
        with pytest.raises(EngineRefusal, match="cannot read the request") as refusal:
            await asyncio.wait_for(read(group, poisoned(fields)), 5)
        assert refusal.value.reason is Refusal.NEVER
    assert "a front's request cannot be read" in caplog.text
    assert list(engine.loop._connections) == connections
    assert (await reading)[:2] == sequential(request(1, max_tokens=60), 512)
    group.close()


async def test_no_prompt_is_shared_after_an_unread_request(engine):
    replica = replica_of(engine)
    with replica.sock:
        first, second, third = requests_of(Request("", [1, 2, 3], 3, SamplingParams(ignore_eos=True)), iter("abc"), 3)
        prompts = SharedPrompts()
        for number, each in enumerate((request(0), replace(first, priority=1.5), second), 1):
            message = Submit(number, each, resumed=False)
            replica.send(encode(prompts.reduced(message)))
            prompts.sent(message)
        replica.send(encode(Submit(4, third, resumed=False)))
        refused, ended = set(), set()
        while ended != {1, 4} or refused != {2, 3}:
            for frame in await asyncio.to_thread(replica.receive):
                message = decode_from_engine(frame)
                refused |= {message.stream} if isinstance(message, Refused) else set()
                ended |= {e.stream for e in message.ended} if isinstance(message, Tokens) else set()


async def test_a_request_that_cannot_be_sent_fails_alone(engine):
    engine.loop.close()
    engine.loop = None
    group = link_to(engine)
    starting = asyncio.create_task(group.start())
    await asyncio.sleep(0)
    group.info = engine.info
    wrong = replace(request(0), seed=2**70)
    reading = [asyncio.create_task(read(group, each)) for each in (wrong, request(1), wrong)]
    await eventually(lambda: group.num_streams == 3)
    engine.restart()
    for unsent in (reading[0], reading[2], asyncio.create_task(read(group, replace(request(0), cache_salt="\ud800")))):
        with pytest.raises(EngineRefusal, match="The request cannot be sent"):
            await asyncio.wait_for(unsent, 5)
    assert (await asyncio.wait_for(reading[1], 5))[:2] == sequential(request(1), 512)
    await starting
    group.close()


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_a_request_on_lost_connections_ends(engine, monkeypatch, is_accepted):
    """An engine lives, and cuts every connection with this request."""
    submit = LiveRequests.submit

    def cut(self, connection, message, draining):
        if is_accepted:
            submit(self, connection, message, draining)
        connection.close()

    group = link_to(engine, Engine())
    await asyncio.wait_for(group.start(), 5)
    await eventually(lambda: len(group.engines()) == 2)
    good = (await read(group, request(1)))[:2]
    monkeypatch.setattr(LiveRequests, "submit", cut)
    _, reason, last = await asyncio.wait_for(read(group, request(0)), 60)
    assert reason is FinishReason.ERROR
    assert last.error.startswith("The connections to engines ended too often while they served this request")
    monkeypatch.setattr(LiveRequests, "submit", submit)
    assert (await asyncio.wait_for(read(group, request(1)), 60))[:2] == good
    group.close()


async def test_the_reason_of_a_cut_link_is_logged(engine, caplog):
    replica = replica_of(engine)
    with replica.sock:
        await eventually(lambda: engine.loop.stats()["connections"] == 1)
        replica.send(b"\xc1 no message")
        await eventually(lambda: engine.loop.stats()["connections"] == 0)
    await eventually(lambda: "the link of a front ends: " in caplog.text)


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
        replica.send(encode(FrontFigures(MetricValues())))
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
    transport = connection.transport
    sending = Mock(wraps=transport)
    sending.writelines = lambda parts: (sizes.append(sum(map(len, parts))), transport.writelines(parts))
    monkeypatch.setattr(connection, "transport", sending)
    submitted, add = [], engine.loop.core.add
    monkeypatch.setattr(engine.loop.core, "add", lambda req, owner: (submitted.append(req), add(req, owner))[1])
    prompt, params = [1, 2, 3] * 100, SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    asked = Request("", prompt, len(prompt), params, prediction=tuple(prompt))
    choices = requests_of(asked, map(str, range(4)), 4)
    (other,) = requests_of(replace(asked, token_ids=list(prompt), prediction=()), iter("o"))
    answers = await asyncio.gather(*(read(group, choice) for choice in (*choices, other)))
    assert [tokens for tokens, _, _ in answers] == [sequential(choice, 512)[0] for choice in (*choices, other)]
    assert {id(request.token_ids) for request in submitted[:4]} == {id(submitted[0].token_ids)}
    assert {id(request.prediction) for request in submitted[:4]} == {id(submitted[0].prediction)}
    assert submitted[4].prediction == ()
    first, *repeated, last = [size for size in sizes if size > 20]  # others are heartbeats
    assert len(repeated) == 3
    assert max(repeated) + len(prompt) // 2 < min(first, last)
    group.close()


async def test_a_first_request_that_repeats_another_is_refused(engine):
    replica = replica_of(engine)
    with replica.sock:
        replica.send(encode(Submit(1, request(0), resumed=False, repeats=True)))
        refused = []
        while not refused:
            frames = map(decode_from_engine, await asyncio.to_thread(replica.receive))
            refused = [message for message in frames if isinstance(message, Refused)]
    assert refused[0].reason is Refusal.NEVER
    assert not engine.loop.core.scheduler.requests
