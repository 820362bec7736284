"""RolloutClient over real sockets to fake runners: each rollout is exactly what its request gives alone."""

import asyncio
import itertools
import pickle
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.client import RolloutClient
from actors.client import engines as client_engines
from actors.client.engines import OneModelDirectory, RolloutGroup, find_engines
from actors.client.loop_thread import LoopThread
from actors.ray import directory
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.core.requests import choice_seed
from tests.support.engine.fake_runner import of_versions, sequential, sequential_scores
from tests.support.engine.links import INFO, Engine, Engines, hurry

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def _start(engines):
    group = RolloutGroup(Engines(*engines))
    await group.start()
    return group


@contextmanager
def connected(*engines):
    thread = LoopThread("test")
    with RolloutClient(thread.call(_start(engines)), thread) as client:
        yield client
    for engine in engines:
        if engine.loop is not None:
            engine.loop.close()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def client(engine):
    with connected(engine) as found:
        yield found


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def expected(prompt, params=PARAMS):
    return sequential(Request("r", prompt, len(prompt), params), 512)


def num_live(engine):
    return len(engine.loop.core.scheduler.requests)


# ---- rollouts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared():
    with connected(Engine(), Engine()) as client:
        yield client


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 28), min_size=1, max_size=20)), max_size=12),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_any_batch_gives_the_sequential_tokens(shared, prompts, n, max_in_flight, max_unread):
    prompts = [prompt for (prompt,) in prompts]
    found = shared.generate_list(prompts, PARAMS, n=n, max_in_flight=max_in_flight, max_unread=max_unread)
    assert [(r.index, r.choice) for r in found] == list(itertools.product(range(len(prompts)), range(n)))
    for rollout in found:
        assert rollout.prompt_token_ids == prompts[rollout.index]
        assert (rollout.token_ids, rollout.finish_reason) == expected(prompts[rollout.index])
        assert (rollout.error, rollout.stop_token_id) == ("", None)


def test_prompts_are_read_as_requests_end(client):
    pulled = []

    def endless():
        for number in itertools.count():
            pulled.append(number)
            yield [1 + number % 7, 2, 3]

    found = client.generate(endless(), PARAMS, max_in_flight=6, max_unread=10)
    for read in range(1, 101):
        next(found)
        assert len(pulled) <= read + 6 + 10
    found.close()
    assert list(found) == []


def test_a_batch_begins_before_it_is_read(client, engine):
    found = client.generate([[1, 2]], PARAMS)
    until(lambda: found._items.qsize() == 2)  # the rollout and the end
    assert [r.token_ids for r in found] == [expected([1, 2])[0]]


@pytest.mark.parametrize("most", [1, 3, 5])
def test_no_more_requests_are_in_flight_than_allowed(client, engine, most):
    found = client.generate([[i % 9] for i in range(20)], PARAMS, n=2, max_in_flight=most)
    seen = [client._group.num_streams for _ in found]
    assert len(seen) == 40
    assert max(seen) <= most


def test_by_default_all_places_of_the_engine_are_used():
    engine = Engine(delay_s=0.05, info=replace(INFO, max_num_seqs=16))
    with connected(engine) as client:
        found = client.generate([[i % 9] for i in range(100)], PARAMS)
        until(lambda: engine.loop.stats()["running"] == 16 and engine.loop.stats()["waiting"] == 4)
        found.close()


def test_an_unread_batch_is_held(client, engine):
    found = client.generate(([i % 9] for i in itertools.count()), PARAMS, max_in_flight=4, max_unread=8)
    until(lambda: found._batch.waits_for_reader and not num_live(engine))
    assert 8 <= found._items.qsize() < 8 + 4
    assert len(list(itertools.islice(found, 50))) == 50
    found.close()


def test_busy_engines_get_the_request_again():
    engine = Engine(max_queued_requests=1, max_num_seqs=2)
    with connected(engine) as client:
        found = client.generate_list([[i % 9] for i in range(30)], PARAMS, max_in_flight=30)
        assert [r.token_ids for r in found] == [expected([i % 9])[0] for i in range(30)]


def test_a_bad_prompt_fails_alone(client):
    found = client.generate_list([[1], [], [2, 320], [-1], [3] * 512, [4]], PARAMS)
    assert [r.finish_reason for r in found] == [FinishReason.LENGTH] + [FinishReason.ERROR] * 4 + [FinishReason.LENGTH]
    assert "no tokens" in found[1].error
    assert "token id 320; ids must be from 0 to 319" in found[2].error
    assert "token id -1" in found[3].error
    assert "512 tokens" in found[4].error


def test_a_faulty_iterator_of_prompts_raises_at_its_reader(client, engine):
    def faulty():
        yield [1]
        raise ValueError("no more data")

    found = client.generate(faulty(), LONG)
    with pytest.raises(ValueError, match="no more data"):
        list(found)
    until(lambda: num_live(engine) == 0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_an_iterator_of_prompts_cannot_end_the_loop(client, error):
    def faulty():
        yield [1]
        raise error

    with pytest.raises(CallboardError, match="The prompts ended with"):
        list(client.generate(faulty(), PARAMS))
    assert client.generate_list([[1]], PARAMS)


def test_closing_aborts_what_runs(client, engine):
    engine.runners[-1].delay_s = 0.02
    found = client.generate([[i] for i in range(8)], LONG)
    until(lambda: num_live(engine) == 8)
    found.close()
    until(lambda: num_live(engine) == 0)
    assert client._group.num_streams == 0


def test_a_forgotten_iterator_aborts_what_runs(client, engine):
    engine.runners[-1].delay_s = 0.02
    found = client.generate([[i] for i in range(8)], LONG)
    until(lambda: num_live(engine) == 8)
    del found
    until(lambda: num_live(engine) == 0)


def test_closing_the_client_ends_its_batches(engine):
    engine.runners[-1].delay_s = 0.02
    with connected(engine) as client:
        found = client.generate([[1]], LONG)
        until(lambda: num_live(engine) == 1)
        threading.Timer(0.05, client.close).start()
        with pytest.raises(CallboardError, match="closed before its rollouts had ended"):
            list(found)
        for call in (lambda: client.generate([[1]]), client.resume):
            with pytest.raises(CallboardError, match="The client is closed"):
                call()


def test_groups_come_whole(client):
    groups = list(client.generate_groups([[1], [2], [3]], PARAMS, n=4, max_in_flight=2))
    assert sorted(group[0].index for group in groups) == [0, 1, 2]
    assert all([(r.index, r.choice) for r in group] == [(group[0].index, i) for i in range(4)] for group in groups)


async def test_an_async_caller_gets_the_same(client):
    found = [rollout async for rollout in client.stream([[i] for i in range(30)], PARAMS, max_in_flight=4)]
    assert sorted(r.index for r in found) == list(range(30))
    assert all(r.token_ids == expected([r.index])[0] for r in found)


async def test_an_async_caller_that_leaves_aborts_what_runs(client, engine):
    rollouts = client.stream(([i % 9] for i in itertools.count()), PARAMS)
    await anext(rollouts)
    await rollouts.aclose()
    await asyncio.to_thread(until, lambda: num_live(engine) == 0)


def test_each_prompt_has_a_seed_that_repeats(client):
    def seeds(**options):
        return [r.seed for r in client.generate_list([[1], [2]], PARAMS, n=2, **options)]

    assert seeds(seeds=5) == seeds(seeds=5)
    assert len({*seeds(seeds=5), *seeds(seeds=6), *seeds(), *seeds()}) == 16
    assert seeds(seeds=[7, 8]) == [7, choice_seed(7, 1), 8, choice_seed(8, 1)]


def test_scores_are_those_of_the_sequences(client):
    sequences = [[1, 2, 3, 4], [5, 6], [7]]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    wanted = [sequential_scores(Request("r", ids, len(ids), params)) for ids in sequences]
    assert client.score(sequences) == [[entry.logprob for entry in entries] for entries in wanted]
    with pytest.raises(CallboardError, match="Sequence 1 cannot be scored: The prompt has the token id 999"):
        client.score([[1, 2], [999]])


# ---- engines --------------------------------------------------------------------------------------------------------


def test_rollouts_outlive_an_engine():
    engines = Engine(delay_s=0.005), Engine(delay_s=0.005)
    with connected(*engines) as client:
        until(lambda: client._group.num_places == 2 * INFO.max_num_seqs)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        found = client.generate([[i] for i in range(20)], params)
        until(lambda: all(num_live(engine) for engine in engines))
        engines[0].die()
        hurry(*engines)
        assert {r.index: r.token_ids for r in found} == {i: expected([i], params)[0] for i in range(20)}
        engines[0].restart()


def test_rollouts_note_the_versions_of_their_tokens():
    engine = Engine(delay_s=0.02, weight_updates=True)
    with connected(engine) as client:
        found = client.generate([[i] for i in range(4)], SamplingParams(max_tokens=30, ignore_eos=True))
        until(lambda: engine.loop.core.scheduler.stats.steps >= 3)
        assert client.update_weights("/a/folder", version=7) == "7"
        assert client.info.weights.name == "7"
        hurry(engine)
        for r in found:
            assert [name for _, name in r.weight_versions] == ["default", "7"]
            request = Request("r", r.prompt_token_ids, 1, PARAMS)
            assert r.token_ids == of_versions(request, r.token_ids, r.weight_versions)
        (late,) = client.generate([[1]], PARAMS, min_weight_version=7)
        assert list(late.weight_versions) == [(0, "7")]


def test_a_failed_update_leaves_none_open():
    engine = Engine(weight_updates=True)
    with connected(engine) as client:
        engine.runners[-1].refuses["weights_receive"] = CallboardError("The disk is full.")
        with pytest.raises(CallboardError, match="The disk is full"):
            client.update_weights("/a/folder")
        with pytest.raises(CallboardError, match="Weights cannot come from a int"):
            client.update_weights(5)
        assert client.update_weights("/a/folder") == "1"


def test_a_paused_engine_holds_its_rollouts():
    engine = Engine(weight_updates=True)
    with connected(engine) as client:
        client.pause()
        found = client.generate([[1]], PARAMS)
        (info,) = client.weights_info().values()
        assert info["paused"]
        client.resume()
        assert [r.token_ids for r in found] == [expected([1])[0]]


def test_a_pause_ends_with_its_lease():
    engine = Engine(weight_updates=True)
    with connected(engine) as client:
        client.pause(lease_s=0.05)
        assert [r.token_ids for r in client.generate([[1]], PARAMS)] == [expected([1])[0]]
        with pytest.raises(CallboardError, match="lease_s"):
            client.pause(lease_s=-1.0)


def test_versions_are_refused_where_weights_never_change(client):
    with pytest.raises(CallboardError, match="start the server with --weight-updates"):
        client.generate([[1]], min_weight_version=1)


@pytest.mark.parametrize(
    ("names", "application", "prefix"),
    [
        (["a/engine/m/x#1"], None, "a/engine/m/"),
        (["a/engine/m/x#1", "a/engine/new/y#2"], None, "a/engine/new/"),  # the model is swapped
        (["a/draft/m#1", "b/engine/m/x#1"], None, "b/engine/m/"),
        (["a/engine/m/x#1", "b/engine/m/x#1"], "a", "a/engine/m/"),
    ],
)
def test_engines_are_found_by_their_names(monkeypatch, names, application, prefix):
    monkeypatch.setattr(client_engines, "living_actors", lambda start: [n for n in names if n.startswith(start)])
    assert find_engines(application, 0.0) == prefix


def test_an_unclear_application_must_be_named(monkeypatch):
    monkeypatch.setattr(client_engines, "living_actors", lambda start: ["a/engine/m/x#1", "b/engine/m/x#1"])
    with pytest.raises(CallboardError, match="has engines of 'a', 'b'; name the application"):
        find_engines(None, 0.0)


def test_a_missing_application_is_an_error(monkeypatch):
    monkeypatch.setattr(client_engines, "living_actors", lambda start: [])
    with pytest.raises(CallboardError, match="'a' has no engine, and none started within 0 s"):
        find_engines("a", 0.0)


async def test_a_swapped_model_ends_the_client(monkeypatch):
    monkeypatch.setattr(client_engines, "_REPLACED_S", 0.2)
    lives = ["a/engine/m/x#1"]
    for module in (client_engines, directory):
        monkeypatch.setattr(module, "living_actors", lambda start: [n for n in lives if n.startswith(start)])
    engines, heard = OneModelDirectory("a/engine/m/"), []
    engines.on_replaced = heard.append
    assert await engines.changed([]) == lives
    waiting = asyncio.create_task(engines.changed(list(lives)))
    lives[:] = []
    assert await waiting == []
    waiting = asyncio.create_task(engines.changed([]))
    await asyncio.sleep(0.5)
    assert heard == []  # the engine may restart
    lives[:] = ["a/engine/other/y#2"]
    await asyncio.to_thread(until, lambda: heard)
    assert "'a' serves another model now" in heard[0]
    waiting.cancel()


def test_rollouts_of_a_swapped_model_fail(client, engine):
    engine.runners[-1].delay_s = 0.02
    found = client.generate([[i] for i in range(30)], LONG, max_in_flight=8)
    until(lambda: num_live(engine) == 8)
    client._thread.loop.call_soon_threadsafe(client._group.end, "Another model is served.")
    assert {(r.finish_reason, r.error) for r in found} == {(FinishReason.ERROR, "Another model is served.")}


def test_a_client_stays_in_its_process(client):
    with pytest.raises(CallboardError, match="cannot be sent to another process"):
        pickle.dumps(client)
