"""Prefixes that all groups of a cache can continue, and requests to reset the cache."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import KVGroupSpec
from runtime.base.types import SamplingParams
from runtime.core.prefix_cache import PrefixCache, match_tables
from tests.support.engine.sessions import Session, first_plan


def test_a_reset_keeps_only_held_blocks():
    session = Session(block_size=4, max_num_batched_tokens=64)
    scheduler, prompt = session.core.scheduler, list(range(1, 14))
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    session.finish()
    session.add(prompt[:9], SamplingParams(max_tokens=9, ignore_eos=True))
    session.step()
    assert len(scheduler.kv_cache.cache) == 3
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (2, [])
    session.finish()
    scheduler.pool.evict_unheld()
    assert (len(scheduler.kv_cache.cache), scheduler.find_faults()) == (0, [])
    session.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert first_plan(session).num_tokens.tolist() == [13]


@given(
    st.lists(st.tuples(st.sampled_from([None, None, 1, 3, 4, 7, 20]), st.sets(st.integers(0, 11))), min_size=1),
    st.integers(0, 12),
    st.sampled_from([1, 2, 4]),
)
def test_a_match_is_the_longest_prefix_that_all_groups_continue(groups, num_blocks, size):
    """Each group is its window and the blocks that are not cached."""
    specs = [KVGroupSpec((0,), 1, 8, "float32", window=window) for window, _ in groups]
    caches, path = [PrefixCache() for _ in groups], [bytes([i]) for i in range(num_blocks)]
    for cache, (_, missing) in zip(caches, groups, strict=True):
        kept = [i for i in range(num_blocks) if i not in missing]
        cache.insert([path[i] for i in kept], [i + 1 for i in kept])

    def needed(spec: KVGroupSpec, length: int) -> set[int]:
        return {i for i in range(length) if spec.window is None or (i + 1) * size > length * size - spec.window + 1}

    def continues(length: int) -> bool:
        return not any(needed(spec, length) & missing for spec, (_, missing) in zip(specs, groups, strict=True))

    longest = max(filter(continues, range(num_blocks + 1)))
    tables = match_tables(caches, specs, path, size)
    for spec, table in zip(specs, tables, strict=True):
        assert table == [i + 1 if i in needed(spec, longest) else 0 for i in range(longest)]
