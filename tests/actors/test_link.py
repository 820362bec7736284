"""Engine loop and replica link over real sockets, with runners that can be lost: no stream may notice."""

import asyncio
from collections import Counter

import pytest
import uvloop

from actors.engine.link_server import Connection
from actors.front.link import _Connection
from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.base.types import FinishReason, Request, SamplingParams
from runtime.policy.isolation import MAX_LOSSES
from tests.support.engine.fake_runner import EOS, sequential
from tests.support.engine.links import INFO, Engine, eventually, link_to, only_link, read, request


@pytest.fixture(params=["unix", "tcp"])
async def served(request):
    engine = Engine()
    engine.same_node = request.param == "unix"
    link = link_to(engine)
    await link.start()
    yield engine, link
    link.close()
    if engine.loop:
        engine.loop.close()


async def test_streams_get_the_sequential_tokens(served):
    engine, link = served
    got = await asyncio.gather(*(read(link, request(i)) for i in range(20)))
    for i, (tokens, reason, _) in enumerate(got):
        assert (tokens, reason) == sequential(request(i), 512)
    assert link.health() is None
    assert link.num_streams == 0
    assert engine.loop.stats()["blocks_available"] == INFO.num_kv_blocks - 1


def test_streams_work_on_the_event_loop_of_serve():
    """Ray Serve runs its replicas on uvloop, which has its own transports."""

    async def main():
        engine = Engine()
        link = link_to(engine)
        await asyncio.wait_for(link.start(), 60)
        got = await asyncio.gather(*(read(link, request(i)) for i in range(3)))
        link.close()
        engine.loop.close()
        return got

    got = uvloop.run(main())
    assert [tokens for tokens, _, _ in got] == [sequential(request(i), 512)[0] for i in range(3)]


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_next_plan_is_submitted_before_tokens_are_sent(depth, monkeypatch):
    """In every step, also in steps with new and ended requests: collect k, submit k+depth, send k, collect k+1."""
    engine = Engine(pipeline_depth=depth, late_planning=False)  # which sends while it waits
    link = link_to(engine)
    await link.start()
    runner, events, in_flight = engine.runners[-1], [], []
    submit, collect, flush = runner.submit, runner.collect, Connection.flush

    def note_submit(plan):
        events.append(("submit", plan.step_id))
        in_flight.append(plan.step_id)
        submit(plan)

    def note_collect():
        events.append(("collect", in_flight.pop(0)))
        return collect()

    def note_flush(connection, sampled_at):
        events.append(("send", next(step for kind, step in reversed(events) if kind == "collect")))
        flush(connection, sampled_at)

    runner.submit, runner.collect = note_submit, note_collect
    monkeypatch.setattr(Connection, "flush", note_flush)
    got = await asyncio.gather(*(read(link, request(i, max_tokens=20 + i)) for i in range(12)))
    assert [tokens for tokens, _, _ in got] == [sequential(request(i, max_tokens=20 + i), 512)[0] for i in range(12)]
    last = max(step for _, step in events)
    for step in range(1, last - depth):
        sent = events.index(("send", step))
        assert events.index(("collect", step)) < events.index(("submit", step + depth)) < sent
        assert events[sent + 1] == ("collect", step + 1)
    link.close()
    engine.loop.close()


async def test_no_output_follows_the_end(served):
    """An abort finds the last step's tokens still unsent, so they are sent first."""
    engine, group = served
    link = only_link(group)
    ends, late, on_tokens = Counter(), [], link._on_tokens

    def note(frame):
        late.extend(n for n in memoryview(frame.streams).cast("i") if n in ends)
        ends.update(ended.stream for ended in frame.ended)
        on_tokens(frame)

    link._on_tokens = note
    for i in range(30):
        reading = asyncio.create_task(read(group, request(i, max_tokens=400)))
        await eventually(lambda: engine.loop.stats()["running"] == 1)
        group.abort(f"r{i}")
        tokens, reason, _ = await reading
        assert reason is FinishReason.ABORT
        assert tokens == sequential(request(i, max_tokens=400), 512)[0][: len(tokens)]
    assert not late
    assert set(ends.values()) == {1}


@pytest.mark.parametrize("call", ["submit", "collect"])
async def test_a_lost_runner_is_a_pause(served, call):
    engine, link = served
    reading = asyncio.gather(*(read(link, request(i, max_tokens=100)) for i in range(8)))
    for _ in range(3):
        before = engine.loop.core.scheduler.stats.steps
        await eventually(lambda before=before: engine.loop.core.scheduler.stats.steps > before + 5)
        lost = len(engine.runners)
        setattr(engine.runners[-1], "dead" if call == "collect" else "deaf", "Rank 0 is gone.")
        await eventually(lambda lost=lost: len(engine.runners) > lost)
    for i, (tokens, reason, _) in enumerate(await reading):
        assert (tokens, reason) == sequential(request(i, max_tokens=100), 512)
    assert engine.loop.num_rebuilds == 3


async def test_a_dead_engine_is_a_pause(served):
    engine, link = served
    reading = asyncio.gather(*(read(link, request(i, max_tokens=150)) for i in range(8)))
    for _ in range(2):
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 10)
        engine.die()
        await eventually(lambda: "restarting" in (link.health() or ""))
        engine.restart()
        await eventually(lambda: link.health() is None)
    for i, (tokens, reason, _) in enumerate(await reading):
        assert (tokens, reason) == sequential(request(i, max_tokens=150), 512)


async def test_a_broken_connection_to_a_living_engine_is_a_pause(served):
    engine, link = served
    reading = asyncio.gather(*(read(link, request(i, max_tokens=150)) for i in range(8)))
    for _ in range(3):
        before = engine.loop.core.scheduler.stats.steps
        await eventually(lambda before=before: engine.loop.core.scheduler.stats.steps > before + 5)
        only_link(link)._connection.transport.abort()
        await asyncio.sleep(0.02)
    for i, (tokens, reason, _) in enumerate(await reading):
        assert (tokens, reason) == sequential(request(i, max_tokens=150), 512)
    await eventually(lambda: engine.loop.stats()["connections"] == 1)


async def test_a_request_without_an_engine_waits_for_one():
    engine = Engine()
    link = link_to(engine)
    await link.start()
    await eventually(lambda: engine.loop.stats()["connections"] == 1)
    engine.die()
    await eventually(lambda: link.health() is not None)
    reading = asyncio.create_task(read(link, request(0)))
    await asyncio.sleep(0.05)
    engine.restart()
    assert (await reading)[:2] == sequential(request(0), 512)
    link.close()
    engine.loop.close()


async def test_closing_the_generator_aborts(served):
    engine, link = served
    engine.runners[-1].delay_s = 0.02
    stream = link.generate(request(0, max_tokens=400))
    await anext(stream)
    await stream.aclose()
    await eventually(lambda: not engine.loop.core.scheduler.requests)
    assert link.num_streams == 0


async def test_requests_of_a_lost_replica_are_aborted(served):
    engine, link = served
    engine.runners[-1].delay_s = 0.02
    tasks = [asyncio.create_task(read(link, request(i, max_tokens=400))) for i in range(4)]
    await eventually(lambda: len(engine.loop.core.scheduler.requests) == 4)
    link.close()
    await eventually(lambda: not engine.loop.core.scheduler.requests)
    for task in tasks:
        task.cancel()


async def test_a_silent_replica_loses_its_lease(served, monkeypatch):
    engine, link = served
    monkeypatch.setattr("actors.engine.link_server.LEASE_S", 0.2)
    engine.runners[-1].delay_s = 0.02
    only_link(link)._task.cancel()  # no heartbeat any more
    task = asyncio.create_task(read(link, request(0, max_tokens=400)))
    await eventually(lambda: engine.loop.stats()["steps"] > 2)
    await eventually(lambda: not engine.loop.core.scheduler.requests)
    task.cancel()


async def test_a_full_queue_names_the_time_to_retry():
    engine = Engine(delay_s=0.02, max_num_seqs=1, max_queued_requests=2)
    link = link_to(engine)
    await link.start()
    tasks = [asyncio.create_task(read(link, request(0)))]
    await eventually(lambda: engine.loop.stats()["running"] == 1)
    tasks += [asyncio.create_task(read(link, request(i))) for i in (1, 2)]
    await eventually(lambda: engine.loop.stats()["waiting"] == 2)
    with pytest.raises(EngineRefusal, match="max_queued_requests") as busy:
        await read(link, request(9))
    assert busy.value.reason is Refusal.BUSY
    assert busy.value.retry_after_s >= 1
    for task in tasks:
        task.cancel()
    link.close()
    engine.loop.close()


async def test_a_request_that_cannot_be_served_is_refused(served):
    _, link = served
    with pytest.raises(EngineRefusal, match="maximum context length") as refused:
        await read(link, Request("long", [1] * 600, 600, SamplingParams()))
    assert refused.value.reason is Refusal.NEVER


async def test_an_abort_by_id_reaches_the_reader(served):
    engine, link = served
    engine.runners[-1].delay_s = 0.02
    reading = asyncio.create_task(read(link, request(0, max_tokens=400)))
    await eventually(lambda: engine.loop.stats()["running"] == 1)
    link.abort("r0")
    assert (await reading)[1] is FinishReason.ABORT


async def test_stop_reason_and_cached_tokens_arrive(served):
    _, link = served
    first = await read(link, request(0, ignore_eos=False, stop_token_ids=(EOS,), max_tokens=300))
    assert first[1] is FinishReason.STOP
    assert first[2].stop_token_id == EOS
    outputs = [o async for o in link.generate(request(0))]
    assert outputs[0].num_cached == 4


async def test_a_hung_runner_counts_as_lost():
    engine = Engine(step_timeout_s=0.3)
    link = link_to(engine)
    await link.start()
    engine.runners[-1].hang = True
    reading = asyncio.create_task(read(link, request(0)))
    for _ in range(100):
        engine.loop.check_progress()
        await asyncio.sleep(0.02)
        if reading.done():
            break
    assert (await reading)[:2] == sequential(request(0), 512)
    assert engine.loop.num_rebuilds == 1
    link.close()
    engine.loop.close()


async def test_a_request_that_kills_every_runner_ends_with_an_error(monkeypatch):
    engine = Engine()
    link = link_to(engine)
    await link.start()
    start = engine.start_runners

    def start_cursed():
        runner, info = start()
        if len(engine.runners) <= MAX_LOSSES:
            runner.dead = "Rank 0 is gone."
        return runner, info

    engine.loop._start_runners = start_cursed
    engine.runners[-1].dead = "Rank 0 is gone."
    _, reason, last = await read(link, request(0))
    assert reason is FinishReason.ERROR
    assert "lost 3 times while" in last.error
    assert (await read(link, request(1)))[:2] == sequential(request(1), 512)
    link.close()
    engine.loop.close()


async def test_a_stranger_is_rejected():
    engine = Engine()
    address = engine.loop.links.open(False, "127.0.0.1")
    reader, writer = await asyncio.open_connection(*address.endpoint)
    writer.write(b"x" * 32)
    assert await reader.read() == b""
    writer.close()
    engine.same_node = False
    link = link_to(engine)
    await link.start()
    assert (await read(link, request(0)))[:2] == sequential(request(0), 512)
    link.close()
    engine.loop.close()


async def test_an_idle_engine_checks_for_faults_at_log_level_debug(monkeypatch, caplog):
    monkeypatch.setattr("actors.engine.loop._CHECK_EVERY_S", 0.01)
    with caplog.at_level("DEBUG", logger="actors.engine.loop"):
        engine = Engine()
        try:
            await eventually(lambda: "faults of blocks and slots: none" in caplog.text)
            engine.loop.core.scheduler.slots.acquire()
            await eventually(lambda: "Slot 0 is free or held 0 times." in caplog.text)
        finally:
            engine.die()


class FullSocket:
    """A transport that holds its bytes: the test takes them."""

    backlog = 0

    def writelines(self, parts) -> None:
        self.backlog += sum(map(len, parts))

    def get_write_buffer_size(self) -> int:
        return self.backlog


async def test_an_engine_that_reads_images_is_not_silent():
    connection, sock = _Connection(None), FullSocket()
    connection.connection_made(sock)

    def beat(num_read: int) -> bool:
        sock.backlog -= num_read
        moved = connection.has_moved()
        connection.send(b"beat")
        return moved

    assert [beat(0), beat(8), beat(8)] == [False] * 3, "a socket that takes heartbeats proves nothing"
    connection.send(bytes(1000))
    assert [beat(8), beat(300), beat(0)] == [False, True, False]
    connection.send(bytes(1000))
    assert [beat(1), beat(sock.backlog), beat(8)] == [True, True, False]
