"""A plan of several steps gives the same results as single steps, to the last block."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.reports import GrammarSamples
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.core.plan import StepResult
from runtime.core.prefix_cache import hash_blocks, root_hash
from runtime.core.scheduler import Scheduler
from tests.support.engine.fake_runner import EOS, VOCAB
from tests.support.engine.sessions import make
from tests.support.engine.whole import whole_scheduler
from tests.support.examples import examples

tokens = st.sampled_from([EOS, 3, -1, *[7, 8, 9] * 7])  # a stop id, no finite logits, and words


def started(prompts, limits) -> Scheduler:
    """All prompts are computed, and each has its first token."""
    scheduler = whole_scheduler(*make(block_size=2, num_kv_blocks=200, max_num_seqs=8))
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(max_tokens=limit, stop_token_ids=(3,) if i % 2 else ())
        scheduler.add(Request(f"r{i}", prompt, len(prompt), params))
    step = scheduler.schedule()
    scheduler.commit(StepResult(step.plan.step_id, np.array([7] * len(prompts), np.int32)))
    return scheduler


def seen(scheduler, outputs):
    """The visible state of a scheduler, and the hashes of its cached blocks."""
    answers, finished = {}, {}
    for output in outputs:
        for state, token in zip(output.states, output.token_ids, strict=True):
            answers.setdefault(state.request.request_id, []).append(token)
        finished |= {state.request.request_id: (reason, state.failure) for state, reason in output.finished}
    live = {s.request.request_id: (list(s.tokens), s.num_computed, s.num_total, s.epoch) for s in scheduler.running}
    assert scheduler.find_faults() == []
    return (answers, finished, live, scheduler.pool.num_available), set(scheduler.kv_cache.cache.keys())


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=9), min_size=1, max_size=5),
    st.data(),
    st.integers(2, 9),
)
def test_repeated_and_single_plans_agree(prompts, data, num_steps):
    limits = data.draw(st.lists(st.integers(2, 20), min_size=len(prompts), max_size=len(prompts)))
    together, apart = started(prompts, limits), started(prompts, limits)
    step = together.schedule(num_steps)
    num_rows, count = len(step.plan.slots), step.plan.num_steps
    sampled = np.array(
        data.draw(st.lists(tokens, min_size=num_rows * count, max_size=num_rows * count)), np.int32
    ).reshape(num_rows, count)
    failures = {i: "a limit" for i, token in enumerate(sampled.reshape(-1).tolist()) if token < 0 and i % 2}
    result = StepResult(step.plan.step_id, sampled.reshape(-1), reports=[(-1, GrammarSamples([], failures))])
    plans = [apart.schedule().plan for _ in range(count)]
    outputs = []
    for at, plan in enumerate(plans):
        own = {row: failures[row * count + at] for row in range(num_rows) if row * count + at in failures}
        outputs.append(
            apart.commit(StepResult(plan.step_id, sampled[:, at].copy(), reports=[(-1, GrammarSamples([], own))]))
        )
    (visible, cached), (visible_apart, cached_apart) = seen(together, [together.commit(result)]), seen(apart, outputs)
    assert visible == visible_apart
    if any(reason is FinishReason.ERROR for reason, _ in visible[1].values()):
        # A spoilt request takes its hashes with it. Step by step it may cache a block before another request with the
        # same tokens does; that request then caches none. Row by row it is the other way round.
        assert cached >= cached_apart
    else:
        assert cached == cached_apart


def test_a_result_of_too_few_steps_is_refused():
    scheduler = started([[1, 2]], [30])
    plan = scheduler.schedule(4).plan
    assert plan.num_steps == 4
    with pytest.raises(CallboardError, match=r"with 3 tokens where step \d+ with 4 was due"):
        scheduler.commit(StepResult(plan.step_id, np.array([7, 7, 7], np.int32)))


def test_known_hashes_equal_computed_ones():
    prompt = [1, 2, 3, 4, 5, 6, 7]
    hashes = hash_blocks(root_hash("f", ""), started([prompt], [9]).requests["r0"].tokens[:6], 2)
    scheduler = whole_scheduler(*make(block_size=2))
    state = scheduler.add(Request("r", prompt, len(prompt), SamplingParams(max_tokens=3)), None, hashes[:2])
    plan = scheduler.schedule().plan
    scheduler.commit(StepResult(plan.step_id, np.array([EOS], np.int32)))
    assert state.block_hashes[:3] == hashes
    assert all(a != b for a, b in pairwise(state.block_hashes))


@pytest.mark.parametrize("bad", [-1, VOCAB, 1 << 31, 1 << 40, -(1 << 40)])
def test_an_id_outside_of_the_vocabulary_is_refused(bad):
    with pytest.raises(CallboardError, match=rf"^Token id {bad} is not in this model's vocabulary of {VOCAB}\.$"):
        whole_scheduler(*make()).add(Request("r", [1, bad, 2], 3, SamplingParams()))
