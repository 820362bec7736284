"""Recurrent states and their snapshots: rows of a state cache beside the block tables."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError, SamplingParams
from runtime.core.states.snapshot_pool import Snapshot, SnapshotPool
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.sessions import TURN, Session, configs, histories, make
from tests.support.engine.state_runner import StateRunner, with_states
from tests.support.engine.whole import whole_scheduler
from tests.support.examples import examples


class StateSession(Session):
    """A Session of a model with states."""

    runner_type = StateRunner

    def __init__(self, chunk: int = 4, num_snapshots: int = 8, **kw) -> None:
        seqs = kw.setdefault("max_num_seqs", 4)
        kw["max_num_batched_tokens"] = max(kw.get("max_num_batched_tokens", 0), chunk + seqs)
        super().__init__(kv_cache=with_states(chunk), num_states=1 + seqs + num_snapshots, **kw)
        self.num_wrong = 0

    def lose(self) -> None:
        self.num_wrong += self.runner.num_wrong
        super().lose()

    def finish(self, most: int = 3000) -> None:
        super().finish(most)
        assert self.num_wrong + self.runner.num_wrong == 0


def test_any_history_has_the_right_states():
    seen = Counter()

    @settings(max_examples=examples(400), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, histories, st.sampled_from([4, 8]), st.integers(0, 6), st.sampled_from([None, 0.0]))
    def run(config, history, chunk, num_snapshots, share):
        size = {"block_size": min(config["block_size"], 4) & 6 or 1, "prefix_cache": True, "kv_layout": "paged"}
        session = StateSession(chunk, num_snapshots, **config | size)
        if share is not None:
            session.core.extras[Admission].lengths = FixedShare(share)  # at 0 it admits too many
        session.play(history)
        session.finish()
        scheduler = session.core.scheduler
        seen["steps"] += session.steps
        seen["preemptions"] += scheduler.stats.preemptions
        seen["hits"] += scheduler.stats.prompt_tokens_cached
        seen["evictions"] += scheduler.kv_cache.snapshots.evictions
        seen["accepted"] += session.accepted
        seen["rejected"] += session.guessed - session.accepted

    run()
    assert seen["steps"] > examples(4000), seen
    assert seen["hits"] > examples(100), seen
    assert seen["preemptions"] > examples(10), seen
    assert seen["evictions"] > examples(20), seen
    assert seen["accepted"] > examples(300), seen
    assert seen["rejected"] > examples(300), seen


def hits_of(session: StateSession, prompt) -> int:
    """The tokens of a prompt that were found in the cache; it is served."""
    before = session.core.scheduler.stats.prompt_tokens_cached
    session.add(prompt, TURN)
    session.finish()
    return session.core.scheduler.stats.prompt_tokens_cached - before


def test_next_turn_continues_at_the_end_of_the_last_prompt():
    session = StateSession(block_size=2, num_kv_blocks=200, max_model_len=128)
    turn = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert hits_of(session, turn) == 0
    answer = session.outputs["r0"]
    assert hits_of(session, [*turn, *answer, 3, 4, 5]) == 8  # output is computed again, as a prompt
    assert hits_of(session, [*turn, *answer, 3, 4, 5, 6, 7]) == 16


def test_snapshot_where_prompts_branch():
    session = StateSession(block_size=2, num_kv_blocks=200, max_model_len=128)
    shared = list(range(1, 14))
    assert hits_of(session, [*shared, 14, 15, 16, 17, 18, 19]) == 0
    assert hits_of(session, [*shared, 20, 20, 20, 20, 20]) == 0  # blocks of 12 tokens are cached, but no state there
    assert hits_of(session, [*shared, 21, 21, 21, 21, 21]) == 12


def test_outputs_are_not_cached():
    session = StateSession(block_size=2, num_kv_blocks=200, max_model_len=128)
    session.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=30, ignore_eos=True))
    session.finish()
    assert len(session.core.scheduler.kv_cache.cache) == 2


def test_preempted_output_is_not_taken_from_a_prompt():
    session = StateSession(block_size=2, num_kv_blocks=200, max_model_len=128)
    session.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=60, ignore_eos=True))
    while len(session.outputs["r0"]) < 20:
        session.step()
    name = session.add([1, 2, 3, 4, 5, *session.outputs["r0"], 7, 8, 9], TURN)
    while name not in session.reasons:
        session.step()
    scheduler = session.core.scheduler
    scheduler._preempt(scheduler.running[0])
    session.step()
    assert scheduler.kv_cache._records[scheduler.requests["r0"]].restored > 0
    session.finish()


def test_spoilt_prompt_leaves_no_snapshot():
    session = StateSession(block_size=2, num_kv_blocks=200, max_model_len=128)
    session.runner.fails = 0
    assert hits_of(session, range(1, 12)) == 0
    assert len(session.core.scheduler.kv_cache.snapshots) == 0
    assert hits_of(session, range(1, 12)) == 0


def test_agent_trace_computes_few_tokens_again():
    """Twenty turns of a conversation that grows to 2,000 tokens, beside other requests."""
    session = StateSession(64, 6, block_size=16, num_kv_blocks=600, max_model_len=4096, max_num_batched_tokens=512)
    stats, prompt, known, again, total = session.core.scheduler.stats, [1 + i % 20 for i in range(700)], 0, 0, 0
    for turn in range(20):
        before = stats.prompt_tokens_cached
        name = session.add(prompt, TURN)
        session.add([2 + turn % 20] * 70, TURN)  # of another client
        session.finish(100_000)
        cached = stats.prompt_tokens_cached - before
        again, total = again + known - min(cached, known), total + len(prompt)
        known = len(prompt)
        prompt = [*prompt, *session.outputs[name], *[1 + (turn + i) % 25 for i in range(60)]]
    assert again < total * 0.05


def publish(pool: SnapshotPool, block: int, position: int, parent: Snapshot | None = None) -> Snapshot:
    """Take a snapshot and make it known by its block."""
    snapshot = pool.take(position, parent)
    assert snapshot is not None
    snapshot.block = block
    pool.publish(snapshot)
    return snapshot


def test_snapshot_that_saves_least_is_evicted():
    pool = SnapshotPool(4)
    root = publish(pool, 1, 640)
    publish(pool, 2, 704, root)  # it saves 64 tokens beyond its parent
    publish(pool, 3, 128)
    assert pool.take(64, None) is None
    publish(pool, 4, 256)
    assert 2 not in pool
    assert pool.evictions == 1


def test_an_evicted_parent_makes_its_child_worth_more():
    pool = SnapshotPool(4)
    root = publish(pool, 1, 640)
    publish(pool, 2, 704, root)
    publish(pool, 3, 128)
    pool.drop([1])
    publish(pool, 4, 320)
    publish(pool, 5, 192)
    assert 2 in pool
    assert 3 not in pool


def test_a_restored_snapshot_gives_its_row_if_there_is_no_other():
    pool = SnapshotPool(2)
    snapshot = publish(pool, 5, 64)
    assert pool.acquire(snapshot) == snapshot.row
    assert len(pool) == 0


def test_block_size_must_divide_chunks():
    with pytest.raises(CallboardError, match="block_size is 7; for a model with states it must divide 4"):
        StateSession(block_size=7)
    assert make(kv_cache=with_states(4), num_states=3)[1].num_states == 3


def test_requests_are_limited_by_the_memory_of_states():
    config, info = make(kv_cache=with_states(4), num_states=3, max_num_seqs=6, block_size=4)
    assert whole_scheduler(config, replace(info, max_num_seqs=2)).max_num_seqs == 2
