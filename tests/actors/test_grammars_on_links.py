"""Grammars from fronts to engines to runners, over real sockets: each text is sent once, even after links break."""

import asyncio
from dataclasses import replace

import pytest

from actors.engine.queue_limits import HeldRequests, QueueLimits
from actors.front.link import EngineLink
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import Submit, encode
from runtime.base.config import EngineConfig
from runtime.base.types import Grammar, GrammarUpdate
from tests.support.engine.fake_runner import sequential
from tests.support.engine.links import INFO, Engine, SlowRunner, eventually, link_to, read, request
from tests.support.engine.whole import whole_scheduler

CONFIG = EngineConfig(block_size=4, max_num_seqs=16)
GRAMMARS = [Grammar(f"key {i}", f"{i}" * 100_000, "") for i in range(3)]


class GrammarRunner(SlowRunner):
    """Checks that each of its slots has a whole grammar."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(CONFIG, INFO, delay_s)
        self.num_bytes = 0

    def submit(self, plan) -> None:
        super().submit(plan)
        self.num_bytes += len(self.queue[-1])

    def collect(self):
        result = super().collect()
        assert all(grammar.num_bytes >= 100_000 for grammar in self.reader._grammars.grammars.values())
        return result


def bound(i: int, grammar: Grammar, **params):
    plain = request(i, **params)
    return replace(plain, params=replace(plain.params, grammar=grammar))


@pytest.fixture
def sent(monkeypatch):
    """Messages of links, by engine."""
    messages: dict[str, list] = {}
    send = EngineLink._send

    def note(link, message) -> None:
        messages.setdefault(link.engine, []).append(message)
        send(link, message)

    monkeypatch.setattr(EngineLink, "_send", note)
    return messages


def updates(messages: list) -> list[list[str]]:
    return [[grammar.key for grammar in m.added] for m in messages if isinstance(m, GrammarUpdate)]


async def test_a_grammar_is_sent_once_for_all_choices(sent):
    engine = Engine(start=lambda: GrammarRunner(0.001))
    group = link_to(engine)
    await group.start()
    for _ in range(2):
        requests = [bound(i, GRAMMARS[i % 2], max_tokens=8) for i in range(24)]
        got = await asyncio.gather(*(read(group, each) for each in requests))
        assert [tokens for tokens, _, _ in got] == [sequential(each, 512)[0] for each in requests]
    (messages,) = sent.values()
    assert updates(messages) == [["key 0"], ["key 1"]]
    assert sum(len(encode(m)) for m in messages) < 250_000
    (runner,) = engine.runners
    assert 200_000 < runner.num_bytes < 250_000
    group.close()
    engine.loop.close()


async def test_streams_keep_their_grammar_through_deaths_and_moves(sent):
    """A link that breaks, runners that are lost, an engine that dies while another takes its streams."""
    engines = [Engine(start=lambda: GrammarRunner(0.002)) for _ in range(2)]
    group = link_to(*engines)
    await group.start()
    await eventually(lambda: len(group.engines()) == 2)
    requests = [bound(i, GRAMMARS[i % 3], max_tokens=150) for i in range(6)]
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
    assert sum(map(len, updates([m for messages in sent.values() for m in messages]))) > 3
    group.close()
    for engine in engines:
        if engine.loop is not None:
            engine.loop.close()


async def test_the_queue_refuses_requests_beyond_its_bytes():
    engine = Engine(delay_s=0.02, max_num_seqs=1, max_queued_bytes=250_000)
    group = link_to(engine)
    await group.start()
    reading = [asyncio.create_task(read(group, bound(i, GRAMMARS[0]))) for i in range(4)]
    await eventually(lambda: engine.loop.stats()["waiting"] == 3)
    reading.append(asyncio.create_task(read(group, bound(4, GRAMMARS[1]))))
    await eventually(lambda: engine.loop.stats()["waiting"] == 4)
    with pytest.raises(
        EngineRefusal, match=r"this one has 100020, above its limit of 250000 \(max_queued_bytes\)"
    ) as e:
        await read(group, bound(5, GRAMMARS[2]))
    assert e.value.reason is Refusal.BUSY
    for task in reading:
        task.cancel()
    group.close()
    engine.loop.close()


def test_one_interval_makes_no_rate():
    config = EngineConfig(block_size=4)
    limits = QueueLimits(config, whole_scheduler(config, INFO), HeldRequests(None))
    waits = []
    for at in (0.0, 50.0, 51.0, 52.0, 53.0, 54.0):
        limits.finished(at)
        waits.append(limits._retry_after_s(1))
    assert waits[:3] == [1.0] * 3
    assert 10 < waits[3] < 20
    assert waits[5] < waits[4] < waits[3]


def test_an_empty_queue_takes_a_request_of_any_size():
    config = EngineConfig(block_size=4, max_queued_bytes=10)
    limits = QueueLimits(config, whole_scheduler(config, INFO), HeldRequests(None))
    assert limits.refusal(Submit(1, bound(0, GRAMMARS[0]), False)) is None
