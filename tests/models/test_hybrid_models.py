"""Models with recurrent states, in deterministic mode: the same bits for every history of a request."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError
from runtime.kernels.cpu_support import obstacle
from tests.support.examples import examples
from tests.support.models.hybrid_engine import DELTA, SEQS, Engine, check, histories, hybrid_runner, prompt_of
from tests.support.models.runner_driver import tiny_runner

COMPILED = pytest.mark.skipif(bool(obstacle()), reason=str(obstacle()))
BACKENDS = ["torch", pytest.param("llvm", marks=COMPILED)]


@pytest.mark.rotated
@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["delta", "conv"])
def test_no_history_changes_a_bit(model, backend):
    """Hits, misses, chunks, mates, preemptions, lost runners, draft tokens and few snapshots."""
    seen, kind = Counter(), (("kernel_backend", backend), ("dtype", "float32"))

    @settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(histories, st.sampled_from([64, 130, 400]), st.sampled_from([26, 400]), st.sampled_from([0, 0.0001, 0.01]),
           st.sampled_from([None, 0.3, 1.0]))  # fmt: skip
    def run(history, chunk, num_kv_blocks, snapshot_memory, share_right):
        limits = {"max_num_batched_tokens": chunk + SEQS, "num_kv_blocks": num_kv_blocks}
        check(model, kind, history, share_right, seen, snapshot_memory=snapshot_memory, **limits)

    run()
    assert all(seen[what] > 0 for what in ("hits", "preemptions", "accepted", "rejected")), seen


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stored", ["fp8", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_history_changes_a_bit_of_quantized_kv(stored, backend):
    """As above, with fewer histories: the layers with attention store quantized keys and values."""
    seen, kind = Counter(), (("kernel_backend", backend), ("dtype", "float32"), ("kv_cache_dtype", stored))

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(histories, st.sampled_from([64, 400]), st.sampled_from([30, 400]))
    def run(history, chunk, num_kv_blocks):
        limits = {"max_num_batched_tokens": chunk + SEQS, "num_kv_blocks": num_kv_blocks}
        check("delta", kind, history, True, seen, **limits)

    run()
    assert seen["hits"] > 0, seen
    assert seen["accepted"] > 0, seen


@pytest.mark.parametrize("model", ["delta", "conv"])
def test_second_turn_is_a_hit(model):
    engine = Engine(model)
    engine.add("first", prompt_of(0, 150), 8)
    engine.finish()
    engine.add("second", [*prompt_of(0, 150), *[t for t, _ in engine.answers["first"]], 5, 6], 8)
    engine.finish()
    assert engine.cached == 128


def test_small_budget_is_refused():
    with pytest.raises(CallboardError, match=r"max_num_batched_tokens is 64; .* at least 68"):
        hybrid_runner("delta", max_num_batched_tokens=64)


def test_draft_with_states_is_refused():
    with pytest.raises(CallboardError, match="has recurrent states, which cannot take back tokens"):
        tiny_runner(DELTA, is_draft=True)


def test_memory_plan_counts_states():
    runner = hybrid_runner("delta", snapshot_memory=0.01)
    memory, states = runner.memory, runner.memory.kv_cache.states
    assert memory.states == memory.num_states * states.bytes_per_state + (SEQS + 1) * states.bytes_per_slot
    assert runner.info.num_states == memory.num_states > SEQS + 1
    assert f"{memory.num_states - SEQS - 1} snapshots" in str(memory)
    assert runner.steps.cache.states.rows.numel() >= memory.num_states * states.bytes_per_state
