"""Models that free blocks below windows, in deterministic mode: the same bits for every history of a request."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import KVGroupSpec
from runtime.base.model.kv_groups import groups_of_shapes
from runtime.core.kv_cache_manager import KVCacheManager
from tests.models.test_hybrid_models import BACKENDS
from tests.support.examples import examples
from tests.support.models.hybrid_engine import (
    MAX_LEN,
    SEQS,
    SINKS,
    SPECS,
    WINDOWS,
    Engine,
    check,
    histories,
    hybrid_runner,
    prompt_of,
)
from tests.support.models.runner_driver import tiny_runner
from tests.support.models.specs import changed


def least_blocks(model: str, chunk: int) -> int:
    """Blocks of the longest request."""
    return SPECS[model].kv_cache("float32", longest=MAX_LEN).most_blocks(MAX_LEN, 16, chunk + SEQS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("model", "few_blocks", "length"), [("windows", 56, 60), ("sinks", 41, 110), ("shapes", 56, 60)]
)
def test_no_history_changes_a_bit(model, few_blocks, length, backend):
    """Hits, misses, chunks, mates, preemptions, lost runners and draft tokens."""
    seen, kind = Counter(), (("kernel_backend", backend), ("dtype", "float32"))

    @settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(histories, st.sampled_from([64, 130, 400]), st.sampled_from([1, 400]), st.sampled_from([None, 0.3, 1.0]))
    def run(history, chunk, spare, share_right):
        limits = {"max_num_batched_tokens": chunk + SEQS, "num_kv_blocks": least_blocks(model, chunk) + spare}
        check(model, kind, history, share_right, seen, **limits)

    run()
    full = [("add", text, length + more) for more in (0, 3) for text in (0, 1)]
    check(model, kind, full, None, seen, max_num_batched_tokens=64 + SEQS, num_kv_blocks=few_blocks)
    assert all(seen[what] > 0 for what in ("hits", "preemptions", "accepted", "rejected")), seen


def test_second_turn_is_a_hit():
    engine = Engine("windows")
    engine.add("first", prompt_of(0, 150), 8)
    engine.finish()
    engine.add("second", [*prompt_of(0, 150), *[t for t, _ in engine.answers["first"]], 5, 6], 8)
    engine.finish()
    assert engine.cached == 144


def test_groups_of_two_shapes_have_similar_bytes():
    cache = SPECS["shapes"].kv_cache("float32", longest=MAX_LEN)
    assert [(group.layers, group.window) for group in cache.groups] == [
        ((2,), None),
        ((0,), 40),
        ((1,), 40),
        ((3,), 40),
    ]
    assert cache.sources == (0, 1, 2, 3, 2, 3)
    assert cache.rows_per_token == (2, 6, 6, 6)
    assert cache.bytes_per_block(16) == 16 * 2 * 48 * 4
    full, limited = KVGroupSpec(tuple(range(5, 30, 6)), 2, 512, "bfloat16"), KVGroupSpec((), 8, 256, "bfloat16")
    layers = tuple(i for i in range(30) if i % 6 != 5)
    groups = groups_of_shapes([full, replace(limited, layers=layers, window=1024)], 131072)
    assert [len(group.layers) for group in groups] == [5, *[2] * 12, 1]


def test_alternating_layers_are_two_groups():
    assert [group.layers for group in hybrid_runner("sinks").info.kv_cache.groups] == [(1, 3), (0, 2)]
    published = changed(SINKS, num_layers=24, num_kv_heads=8, window=(128, 0))  # gpt-oss-20b
    full, sliding = published.kv_cache("bfloat16", longest=131_072).groups
    assert (len(full.layers), full.window, len(sliding.layers), sliding.window) == (12, None, 12, 128)
    assert full.bytes_per_token == sliding.bytes_per_token == 12 * 2 * 8 * 64 * 2


def test_windows_make_room():
    """Each sliding layer is a group. Beyond its window and a chunk it keeps nothing."""
    runner = hybrid_runner("windows", max_num_batched_tokens=64)
    assert [group.layers for group in runner.info.kv_cache.groups] == [(2,), (0,), (1,), (3,)]
    manager = KVCacheManager(runner.info, prefix_cache=True, max_chunk=64)
    assert manager.most_blocks_for(400) == 25 + 3 * 9
    assert runner.memory.kv_cache.most_tokens(52, 16, 64) == 400
    assert tiny_runner(WINDOWS, max_model_len=40).info.kv_cache is None
