"""A front's copy of an engine's cache equals the cache, after any insert, eviction or loss."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.cache_feed import CacheFeed, Followers
from actors.front.router import Prompt, Router
from actors.wire.link_messages import decode_from_engine, encode
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.prefix_cache import KEY_BYTES
from runtime.features.adapter_table import AdapterTable
from runtime.policy.queue_sizes import QueueSizes
from tests.support.engine.fake_runner import EOS, FakeRunner
from tests.support.engine.state_runner import StateRunner, with_states
from tests.support.examples import examples

INFO = ModelInfo("f", 320, 512, (EOS,), 24, 4, "none", "none")


class Served:
    """An engine without sockets, and a front that follows it."""

    def __init__(self, info=INFO, runner=FakeRunner, **config):
        self.config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, **config})
        self.core = build_engine(self.config, info, runner(self.config, info))
        self.feed, self.router, self.num_requests = CacheFeed(self.core.scheduler), Router(), 0
        self.cache = self.core.scheduler.kv_cache.cache
        self.router.add("e", info)
        self.info = info

    def add(self, tokens, max_tokens=6, salt="", adapter=""):
        self.num_requests += 1
        params, name = SamplingParams(max_tokens=max_tokens, ignore_eos=True), f"r{self.num_requests}"
        return self.core.add(Request(name, tokens, len(tokens), params, cache_salt=salt, adapter=adapter))

    def run(self):
        while self.core.has_work:
            self.core.step()

    def send(self, update):
        return self.router.apply("e", decode_from_engine(encode(update)))

    def keys(self):
        return {int.from_bytes(key, "little", signed=True) for key in self.cache.keys()}  # noqa: SIM118  # no dict


ops = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 3), st.integers(1, 40)),
    st.tuples(st.sampled_from(["steps", "update", "lose", "forget", "rebuild", "reconnect", "stop"])),
)


@settings(max_examples=examples(120))
@given(st.lists(ops, max_size=30))
def test_the_feed_equals_the_cache(todo):
    served = Served()
    served.send(served.feed.snapshot())
    for op, *args in todo:
        if op == "ask":
            kind, length = args
            served.add([kind + i // 4 for i in range(length)])
        elif op == "steps":
            for _ in range(3):
                served.core.step()
        elif op == "rebuild":
            served.core.lose()
            served.core.recover(FakeRunner(served.config, INFO))
        elif op == "reconnect":
            served.router.remove("e")
            served.router.add("e", INFO)
            assert served.router.held("e") is None
            assert served.send(served.feed.snapshot())
        elif op == "stop":
            served.feed.stop()
            served.send(served.feed.snapshot())
        elif op == "forget":
            served.core.scheduler.pool.evict_unheld()
        elif op == "lose":
            served.feed.update()
        elif not served.send(served.feed.update()):
            assert served.router.held("e") is None
            assert served.send(served.feed.snapshot())
        if op in ("update", "reconnect", "stop"):
            assert served.router.held("e") == served.keys()
    assert served.send(served.feed.update()) or served.send(served.feed.snapshot())
    assert served.router.held("e") == served.keys()


def test_predicted_hits_equal_those_of_the_engine():
    """The same hashes on both sides, for any length of prompt; the last token is never a hit."""
    served = Served(max_loras=1)
    served.router.add("other", INFO)
    served.send(served.feed.snapshot())
    served.add(list(range(1, 22)))
    served.run()
    assert served.send(served.feed.update())
    for length in (3, 4, 5, 8, 9, 20, 21):
        tokens = list(range(1, 1 + length))
        choice = served.router.choose(Prompt(tokens))
        state = served.add(tokens)
        served.run()
        assert choice.num_cached == state.num_cached
        assert choice.engine == "e" or not choice.num_cached
    tokens = list(range(1, 22))
    assert served.router.choose(Prompt(tokens, "another tenant")).num_cached == 0
    adapters = served.core.extras[AdapterTable]
    served.core.executor.adapters[adapters.reserve("x")] = "x"
    adapters.open("x")
    for num_cached in (0, 20):
        assert served.router.choose(Prompt(tokens, adapter="x").continued([])).num_cached == num_cached
        assert served.core.extras[QueueSizes].hits(served.add(tokens, adapter="x")) == num_cached
        served.run()
        assert served.send(served.feed.update())


def test_predicted_hits_end_at_a_snapshot():
    info = dataclasses.replace(INFO, kv_cache=with_states(8), num_states=7)
    served = Served(info, StateRunner)
    served.send(served.feed.snapshot())
    served.add(list(range(1, 31)))
    served.run()
    assert served.send(served.feed.update())
    hits = []
    for length in (9, 24, 25, 30, 60):
        tokens = [1 + i % 30 for i in range(length)]
        choice = served.router.choose(Prompt(tokens))
        state = served.add(tokens)
        served.run()
        assert served.send(served.feed.update())
        assert choice.num_cached == state.num_cached
        hits.append(choice.num_cached)
    assert hits == [0, 8, 24, 24, 24]
    served.core.scheduler.pool.evict_unheld()
    assert served.send(served.feed.update())
    assert served.router.held("e") == set()


def test_the_load_counts_the_tokens_still_to_compute():
    served = Served(max_num_seqs=1)
    served.feed.snapshot()
    prompt = list(range(1, 18))
    served.add(prompt)
    assert served.feed.update().load == (17, 0, 1, 23, 23)
    served.core.step()
    load = served.feed.update().load
    assert (load.queued_tokens, load.num_running, load.num_waiting) == (0, 1, 0)
    assert load.num_free_blocks < load.num_blocks
    served.add([*prompt, 30, 31])
    served.add([40, 41])
    assert served.feed.update().load[:3] == (3 + 2, 1, 2)  # 16 of the first one's tokens are cached
    served.run()
    assert served.feed.update().load[:3] == (0, 0, 0)


def test_a_cache_without_followers_records_nothing():
    served = Served()
    served.add([1, 2, 3, 4, 5])
    served.run()
    assert served.cache.pending_events is None
    first = served.feed.snapshot()
    assert len(first.added) == KEY_BYTES * len(served.cache)
    served.feed.stop()
    assert served.cache.pending_events is None


class Front:
    """A connection that keeps the messages it is sent."""

    def __init__(self):
        self.last_stream, self.got = 0, []

    def send(self, message):
        self.got.append(decode_from_engine(encode(message)))


def test_followers_get_every_change_at_a_limited_rate():
    now, served, fronts = [100.0], Served(), [Front(), Front()]
    followers = Followers(served.feed, lambda: now[0])
    followers.are_behind = True
    assert followers.send_changes() is None  # there are none
    for front in fronts:
        followers.follow(front, True)
        assert front.got[-1].is_snapshot
    served.add(list(range(1, 10)))
    fronts[1].last_stream = 7
    assert followers.send_changes() is None
    assert [front.got[-1].last_stream for front in fronts] == [0, 7]
    assert fronts[0].got[-1].load.num_waiting == 1
    served.run()
    followers.are_behind = True
    now[0] += 0.005
    assert followers.send_changes() == pytest.approx(0.015)
    now[0] += 0.015
    followers.follow(fronts[1], False)
    assert followers.send_changes() is None
    assert followers.send_changes() is None  # nothing has changed since
    assert [len(front.got) for front in fronts] == [3, 2]
    assert fronts[0].got[-1].number == 2
    assert set(memoryview(fronts[0].got[-1].added).cast("q")) == served.keys()
    followers.follow(fronts[0], False)
    assert served.cache.pending_events is None
