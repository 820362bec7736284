"""The scheduler against a runner that checks every block it reads: equal outputs mean that slots, tables and blocks
were right all along."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.core.plan import StepResult
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import (
    VOCAB,
    FixedShare,
    check_integrity,
)
from tests.support.engine.sessions import Session, configs, events, first_plan, make
from tests.support.engine.whole import whole_scheduler
from tests.support.examples import examples


def test_any_history_gives_the_sequential_tokens():
    """Thousands of steps of random arrivals, aborts, stops, preemptions, losses and sharing, at depth 1 and 2."""
    seen = Counter()

    # The same histories each time, because their coverage is asserted below and must not depend on luck.
    @settings(max_examples=examples(600), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, events, st.sampled_from([None, 0.0, 1.0, 0.0]))
    def run(config, history, share):
        session = Session(**config)
        if share is not None:
            session.core.extras[Admission].lengths = FixedShare(share)  # at 0 it admits too many
        session.play(history)
        session.finish()
        seen["failures"] += sum(reason is FinishReason.ERROR for reason in session.reasons.values())
        seen["steps"] += session.steps
        seen["preemptions"] += session.core.scheduler.stats.preemptions
        seen["hits"] += session.core.scheduler.stats.prompt_tokens_cached
        seen["accepted"] += session.accepted
        seen["rejected"] += session.guessed - session.accepted
        seen["scores"] += sum(map(len, session.scores.values()))
        seen["vectors"] += len(session.vectors)

    run()
    assert seen["steps"] >= examples(10_000), seen
    assert seen["preemptions"] >= examples(12), seen
    assert seen["failures"] > examples(100), seen
    assert seen["hits"] > examples(100), seen
    assert seen["accepted"] > examples(1000), seen
    assert seen["rejected"] > examples(1000), seen
    assert seen["scores"] > examples(1000), seen
    assert seen["vectors"] > examples(150), seen


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tight_memory_preempts_and_stays_right(depth, prefix_cache):
    session = Session(
        block_size=2, num_kv_blocks=14, max_model_len=26, max_num_seqs=6, max_num_batched_tokens=16,
        pipeline_depth=depth, prefix_cache=prefix_cache,
    )  # fmt: skip
    session.core.extras[Admission].lengths = FixedShare(0.1)  # too short: it admits too many
    for i in range(12):
        session.add([1 + i % 5, 2, 3, 4], SamplingParams(max_tokens=20, ignore_eos=True))
    session.finish()
    if not prefix_cache:
        assert session.core.scheduler.stats.preemptions == 0, "ignore_eos lengths are exact: nothing to preempt"
    for i in range(12):
        session.core.extras[Admission].lengths = FixedShare(0.1)
        session.add([1 + i % 5, 2, 3, 4], SamplingParams(max_tokens=20, stop_token_ids=(VOCAB + 1,)))
    session.finish()
    assert session.core.scheduler.stats.preemptions > 0


def add_all(session: Session, count: int, **params) -> None:
    for i in range(count):
        session.add([1 + i, 2, 3], SamplingParams(ignore_eos=True, **params))


def test_budget_is_kept_and_prompts_are_chunked():
    session = Session(max_num_batched_tokens=5, block_size=4)
    session.add(range(1, 13), SamplingParams(max_tokens=3, ignore_eos=True))
    session.add([1, 1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    sums = []
    while len(sums) < 3:
        sums.append(first_plan(session).num_tokens.tolist())
    assert sums == [[5], [5], [2, 3]]


def test_without_chunking_a_prompt_is_computed_whole():
    session = Session(max_num_batched_tokens=64, chunked_prefill=False)
    session.add([1] * 40, SamplingParams(max_tokens=3, ignore_eos=True))
    session.add([2] * 30, SamplingParams(max_tokens=3, ignore_eos=True))
    assert first_plan(session).num_tokens.tolist() == [40]


def test_static_batching_admits_only_into_an_empty_batch():
    session = Session(batching="static", max_num_seqs=3, max_num_batched_tokens=6)
    add_all(session, 5, max_tokens=4)
    widest = 0
    while session.core.has_work:
        session.step()
        live = {s.request.request_id for s in session.core.scheduler.running}
        assert not (live & {"r0", "r1", "r2"} and live & {"r3", "r4"})
        widest = max(widest, len(live))
    assert widest == 3


def test_contiguous_kv_is_one_block_a_request():
    session = Session(kv_layout="contiguous", max_num_seqs=3)
    add_all(session, 5, max_tokens=4)
    session.step()
    assert [len(s.tables[0]) for s in session.core.scheduler.running] == [1, 1, 1]
    session.finish()


def test_lower_priority_value_goes_first_then_arrival():
    session = Session(max_num_seqs=1)
    for priority in (1, 0, 0, -1):
        session.add([1, 2], SamplingParams(max_tokens=1, ignore_eos=True), priority)
    session.finish()
    assert list(session.reasons) == ["r3", "r1", "r2", "r0"]


def test_shortest_job_first():
    session = Session(max_num_seqs=1, policy="sjf")
    for max_tokens in (9, 2, 5):
        session.add([1, 2], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    session.finish()
    assert list(session.reasons) == ["r1", "r2", "r0"]


def test_a_shared_prefix_is_computed_once_in_a_step():
    session = Session(block_size=4, max_num_batched_tokens=64)
    prompt = list(range(1, 12))
    for _ in range(3):
        session.add(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    assert first_plan(session).num_tokens.tolist() == [11, 3, 3]
    tables = [s.tables[0][:2] for s in session.core.scheduler.running]
    assert tables[0] == tables[1] == tables[2]


def test_a_hit_excludes_the_last_token_and_other_salts():
    session = Session(block_size=4, max_num_batched_tokens=64)
    prompt = list(range(1, 9))
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    session.finish()
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), 0, "other")
    assert first_plan(session).num_tokens.tolist() == [4, 8]


def test_leaves_are_evicted_before_their_parents():
    session = Session(block_size=2, num_kv_blocks=7, max_model_len=12)
    session.add([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=1, ignore_eos=True))
    session.finish()
    scheduler = session.core.scheduler
    assert len(scheduler.kv_cache.cache) == 3
    scheduler.pool.allocate(4)  # three free blocks and one from the cache
    hit = scheduler.kv_cache.match_prefix(scheduler.add(Request("x", [1, 2, 3, 4, 5, 6, 7], 7, SamplingParams())))
    assert len(hit[0]) == 2


def test_a_row_with_bad_logits_fails_alone():
    session = Session()
    add_all(session, 2, max_tokens=5)
    scheduler = session.core.scheduler
    plan = scheduler.schedule().plan
    output = scheduler.commit(StepResult(plan.step_id, np.array([-1, 3], np.int32)))
    assert [(s.request.request_id, r) for s, r in output.finished] == [("r0", FinishReason.ERROR)]
    assert output.token_ids == [3]


def step_with(session: Session, *tokens: int) -> list[FinishReason]:
    """A step with rows that sample these tokens."""
    scheduler = session.core.scheduler
    plan = scheduler.schedule().plan
    output = scheduler.commit(StepResult(plan.step_id, np.array(tokens, np.int32)))
    check_integrity(session.core)
    return [reason for _, reason in output.finished]


def test_blocks_of_a_failed_row_are_not_used_again():
    """Neither blocks that it computed nor blocks that it found in the cache are used: the next request computes its
    own."""
    session, prompt, once = Session(block_size=4), list(range(1, 12)), SamplingParams(max_tokens=1, ignore_eos=True)
    session.add(prompt, once)
    assert step_with(session, 5) == [FinishReason.LENGTH]
    session.add([*prompt, 7, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    session.add(prompt, once)
    assert step_with(session, 5, -1) == [FinishReason.ERROR]
    scheduler = session.core.scheduler
    (other,) = scheduler.running
    assert other.num_cached == 8
    session.add(prompt, once)
    assert step_with(session, 5, 5) == [FinishReason.LENGTH]
    again = session.core.add(Request("again", prompt, 11, once))
    found = scheduler.kv_cache.match_prefix(again)
    assert found[:2] != other.tables[0][:2], "what it shared with the failed one is nobody's"
    assert step_with(session, 5, 5) == [FinishReason.LENGTH]


def test_a_result_of_another_step_is_refused():
    session = Session()
    add_all(session, 1, max_tokens=5)
    scheduler = session.core.scheduler
    scheduler.schedule()
    with pytest.raises(CallboardError, match="restarted"):
        scheduler.commit(StepResult(99, np.array([3], np.int32)))


def test_resubmission_continues_the_same_sequence():
    """C8: prompt and delivered tokens, sent to a fresh engine, continue where the first engine stopped."""
    first = Session()
    first.add([3, 1, 4], SamplingParams(max_tokens=12, ignore_eos=True))
    first.finish()
    whole = first.outputs["r0"]
    second = Session()
    request = Request("again", [3, 1, 4, *whole[:5]], 3, SamplingParams(max_tokens=12, ignore_eos=True))
    second.core.add(request)
    second.added["again"], second.outputs["again"] = request, []
    second.finish()
    assert second.outputs["again"] == whole[5:]


def test_duplicate_id_and_empty_prompt_are_refused():
    scheduler = whole_scheduler(*make())
    scheduler.add(Request("a", [1], 1, SamplingParams()))
    with pytest.raises(CallboardError, match="in use"):
        scheduler.add(Request("a", [1], 1, SamplingParams()))
    with pytest.raises(CallboardError, match="empty"):
        scheduler.add(Request("b", [], 0, SamplingParams()))


def test_config_errors_name_the_field_and_the_value():
    for bad, match in (({"block_size": 0}, "block_size is 0"), ({"policy": "lifo"}, "policy is 'lifo'")):
        with pytest.raises(CallboardError, match=match):
            EngineConfig(**bad)
    with pytest.raises(CallboardError, match="max_num_batched_tokens is 16"):
        EngineConfig(chunked_prefill=False, max_model_len=64, max_num_batched_tokens=16)
    assert dataclasses.is_dataclass(EngineConfig)


def test_faults_of_blocks_and_slots_are_found():
    def faults(spoil) -> str:
        session = Session(block_size=4, max_num_seqs=4)
        add_all(session, 2, max_tokens=9)
        session.add([7] * 9, SamplingParams(max_tokens=1, ignore_eos=True))
        for _ in range(2):
            session.step()
        spoil(session.core.scheduler, session.core.scheduler.running[0])
        return " ".join(session.core.scheduler.find_faults())

    assert faults(lambda scheduler, state: None) == ""
    assert "lacks blocks" in faults(lambda scheduler, state: state.tables[0].pop())
    assert "counts 2 holders, but 1" in faults(lambda scheduler, state: scheduler.pool.acquire(state.tables[0][:1]))
    assert "counts 0 holders, but 1" in faults(lambda scheduler, state: scheduler.pool.release(state.tables[0][:1]))
    assert "in 2 places" in faults(lambda scheduler, state: scheduler.pool._free.append(state.tables[0][0]))
    assert "in 0 places" in faults(lambda scheduler, state: scheduler.pool._free.pop())
    assert "is not cached" in faults(lambda scheduler, state: scheduler.pool._cached.__init__(40))
    assert "finds another" in faults(lambda scheduler, state: scheduler.kv_cache.cache._block_of.popitem())
    assert "but holds 1" in faults(lambda scheduler, state: state.tables[0].__setitem__(0, 0))
    assert "Slot 0 is free or held 2" in faults(lambda scheduler, state: scheduler.slots.release(0))
    assert "Slot 9 is held, but does not exist" in faults(lambda scheduler, state: setattr(state, "slot", 9))
    assert "1 requests run or wait, but 2" in faults(lambda scheduler, state: scheduler.running.pop())
