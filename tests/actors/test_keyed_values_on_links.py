"""Grammars and images over real sockets: each is sent once on a connection, and again after links break."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from actors.engine.queue_limits import HeldRequests, QueueLimits
from actors.front.link import _Connection
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import Submit
from runtime.base.config import EngineConfig
from runtime.base.images import Image, ImageInfo, ImageSpan
from runtime.base.types import Grammar
from runtime.core.scheduler import Scheduler
from runtime.features.keyed_store import KeyedStore, KeyedUpdate
from runtime.policy.queue_sizes import KeyedBytes
from tests.support.engine.fake_runner import IMAGE, sequential
from tests.support.engine.image_runner import ImageRunner
from tests.support.engine.links import INFO, Engine, SlowRunner, eventually, link_to, read, request
from tests.support.engine.whole import whole_scheduler

CONFIG = EngineConfig(block_size=4, max_num_seqs=16)
GRAMMARS = [Grammar(f"key {i}", f"{i}" * 100_000, "") for i in range(3)]
EMBEDDING = 40_000  # bytes of pixels for each
IMAGES = [Image(bytes([i]) * 16, ((200, 200),), bytes([i]) * 3 * EMBEDDING) for i in range(3)]
IMAGE_INFO = replace(INFO, images=ImageInfo(IMAGE, 6, 6))  # two images
KINDS = pytest.mark.parametrize("values", [GRAMMARS, IMAGES], ids=["grammars", "images"])


class CountingRunner(ImageRunner, SlowRunner):
    """Counts the bytes of its plans, and checks that values arrive whole."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(CONFIG, IMAGE_INFO)
        self.delay_s, self.num_bytes = delay_s, 0

    def submit(self, plan) -> None:
        super().submit(plan)
        self.num_bytes += sum(map(len, self.queue[-1]))

    def begin(self, plan) -> None:
        for each in plan.encodings:
            each.image = structs.replace(each.image, pixels=each.image.pixels[::EMBEDDING])
        super().begin(plan)

    def collect(self):
        result = super().collect()
        assert all(value.num_bytes >= 100_000 for value in self.reader.store.values.values())
        return result


def engine_of(delay_s: float, **config) -> Engine:
    return Engine(info=IMAGE_INFO, start=lambda: CountingRunner(delay_s), **config)


def bound(i: int, value: Grammar | Image, **params):
    plain = request(i, **params)
    if isinstance(value, Grammar):
        return replace(plain, params=replace(plain.params, grammar=value))
    parts = plain.token_ids[:1], [IMAGE] * 3, plain.token_ids[1:2], [IMAGE] * 3, plain.token_ids[2:]
    tokens = [token for part in parts for token in part]
    spans = tuple(ImageSpan(begin, 3, value, (1, 1, 3)) for begin in (1, 5))
    return replace(plain, token_ids=tokens, prompt_len=len(tokens), images=spans)


@pytest.fixture
def sent(monkeypatch):
    """Frames from links to engines. All requests must reach a scheduler whole."""
    frames: list[bytes] = []
    send, add = _Connection.send, Scheduler.add

    def note(connection, frame) -> None:
        frames.append(frame)
        send(connection, frame)

    def check(scheduler, request, *args):
        assert request.keyed
        assert all(value.num_bytes >= 100_000 for value in request.keyed.values())
        return add(scheduler, request, *args)

    monkeypatch.setattr(_Connection, "send", note)
    monkeypatch.setattr(Scheduler, "add", check)
    return frames


def updates(frames: list[bytes]) -> list[list[str]]:
    """The keys of the values in each update."""
    found = [msgspec.msgpack.decode(frame, type=KeyedUpdate) for frame in frames if KeyedStore().take(frame)]
    return [[value.key for value in update.added] for update in found]


@KINDS
async def test_a_value_is_sent_once_for_all_choices(sent, values):
    engine = engine_of(0.001)
    group = link_to(engine)
    await group.start()
    for _ in range(2):
        requests = [bound(i, values[i % 2], max_tokens=8) for i in range(24)]
        got = await asyncio.gather(*(read(group, each) for each in requests))
        assert [tokens for tokens, _, _ in got] == [sequential(each, 512)[0] for each in requests]
    assert updates(sent) == [[values[0].key], [values[1].key]]
    assert sum(map(len, sent)) < 300_000
    (runner,) = engine.runners
    assert 200_000 < runner.num_bytes < 300_000
    group.close()
    engine.loop.close()


@KINDS
async def test_streams_keep_their_values_through_deaths_and_moves(sent, values):
    """A link that breaks, runners that are lost, an engine that dies while another takes its streams."""
    engines = [engine_of(0.002) for _ in range(2)]
    group = link_to(*engines)
    await group.start()
    await eventually(lambda: len(group.engines()) == 2)
    requests = [bound(i, values[i % 3], max_tokens=150) for i in range(6)]
    reading = asyncio.gather(*(read(group, each) for each in requests))
    for event in ("runners", "link", "engine"):
        before = sum(e.loop.core.scheduler.stats.steps for e in engines if e.loop)
        await eventually(
            lambda before=before: sum(e.loop.core.scheduler.stats.steps for e in engines if e.loop) > before + 5, 20
        )
        busy = next(engine for engine in engines if engine.loop.core.has_work)
        if event == "runners":
            busy.runners[-1].dead = "The runner was killed."
            await eventually(lambda busy=busy: busy.loop.num_rebuilds == 1, 20)
        elif event == "link":
            for connection in list(busy.loop._connections):
                connection.close()
        else:
            busy.die()
    got = await reading
    assert [tokens for tokens, _, _ in got] == [sequential(each, 512)[0] for each in requests]
    assert sum(map(len, updates(sent))) > 3
    group.close()
    for engine in engines:
        if engine.loop is not None:
            engine.loop.close()


@KINDS
@pytest.mark.parametrize("dies", ["front", "front and engine"])
async def test_another_front_takes_up_a_stream(sent, values, dies):
    """It sends the values again, on its own connection."""
    engine, asked = engine_of(0.01), replace(bound(0, values[0], max_tokens=60), keeps_output=True, seed=7)
    first = link_to(engine)
    await first.start()
    stream, num_tokens = first.generate(asked), 0
    while num_tokens < 20:
        num_tokens += len((await anext(stream)).token_ids)
    first.close()
    if dies != "front":
        engine.die()
        engine.restart()
    second = link_to(engine)
    await second.start()
    tokens, reason, _ = await read(second, replace(asked, resumes=True))
    assert (tokens, reason) == sequential(asked, 512)
    assert updates(sent) == [[values[0].key]] * 2
    second.close()
    engine.loop.close()


@KINDS
async def test_the_queue_refuses_requests_beyond_its_bytes(values):
    engine = engine_of(0.02, max_num_seqs=1, max_queued_bytes=250_000)
    group = link_to(engine)
    await group.start()
    reading = [asyncio.create_task(read(group, bound(i, values[0]))) for i in range(4)]
    await eventually(lambda: engine.loop.stats()["waiting"] == 3)
    reading.append(asyncio.create_task(read(group, bound(4, values[1]))))
    await eventually(lambda: engine.loop.stats()["waiting"] == 4)
    size = values[2].num_bytes + 4 * bound(5, values[2]).num_tokens
    text = rf"this one has {size}, above its limit of 250000 \(max_queued_bytes\)"
    with pytest.raises(EngineRefusal, match=text) as e:
        await read(group, bound(5, values[2]))
    assert e.value.reason is Refusal.BUSY
    for task in reading:
        task.cancel()
    group.close()
    engine.loop.close()


def test_one_interval_makes_no_rate():
    config = EngineConfig(block_size=4)
    limits = QueueLimits(config, whole_scheduler(config, INFO), HeldRequests(None, KeyedBytes()))
    waits = []
    for at in (0.0, 50.0, 51.0, 52.0, 53.0, 54.0):
        limits.finished(at)
        waits.append(limits._retry_after_s(1))
    assert waits[:3] == [1.0] * 3
    assert 10 < waits[3] < 20
    assert waits[5] < waits[4] < waits[3]


def test_an_empty_queue_takes_a_request_of_any_size():
    config = EngineConfig(block_size=4, max_queued_bytes=10)
    limits = QueueLimits(config, whole_scheduler(config, INFO), HeldRequests(None, KeyedBytes()))
    assert limits.refusal(Submit(1, bound(0, GRAMMARS[0]), False)) is None
