"""A new group of the KV cache needs only a description: here one with a window, beside one that keeps everything."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.types import Request, SamplingParams
from runtime.core.block_pool import NULL_BLOCK
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.request_state import RequestState
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.sessions import TURN, Session, configs, histories
from tests.support.engine.window_runner import WindowRunner, groups
from tests.support.examples import examples


class WindowSession(Session):
    """A Session of a model that has both groups."""

    runner_type = WindowRunner

    def __init__(self, window: int, **kw) -> None:
        super().__init__(kv_cache=groups(window), **kw)
        self.num_freed = self.most_held = 0

    def step(self) -> None:
        super().step()
        scheduler = self.core.scheduler
        for state in scheduler.running:
            full, window = state.tables
            num_freed = window.count(NULL_BLOCK)
            assert NULL_BLOCK not in full
            assert window[:num_freed] == [NULL_BLOCK] * num_freed
            assert state.num_blocks == len(full) + len(window) - num_freed
            assert state.num_blocks <= scheduler.kv_cache.most_blocks_for(state.capacity)
            self.num_freed = max(self.num_freed, num_freed)
            self.most_held = max(self.most_held, len(window) - num_freed)


@pytest.mark.rotated
def test_blocks_outside_windows_are_freed():
    seen = Counter()

    @settings(max_examples=examples(300), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, histories, st.sampled_from([1, 2, 5, 9, 40]))
    def run(config, history, window):
        session = WindowSession(window, **config | {"kv_layout": "paged"})
        session.core.extras[Admission].lengths = FixedShare(0.0)  # it admits too many
        session.play(history)
        session.finish()
        seen["steps"] += session.steps
        seen["freed"] += session.num_freed
        seen["preemptions"] += session.core.scheduler.stats.preemptions
        seen["accepted"] += session.accepted
        seen["hits"] += session.core.scheduler.stats.prompt_tokens_cached

    run()
    assert seen["steps"] > examples(4000), seen
    assert seen["freed"] > examples(100), seen
    assert seen["preemptions"] > examples(10), seen
    assert seen["accepted"] > examples(300), seen
    assert seen["hits"] > examples(300), seen


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_long_answer_holds_only_its_window(prefix_cache):
    size = {"num_kv_blocks": 40, "max_model_len": 64, "max_num_batched_tokens": 8}
    session = WindowSession(8, block_size=4, prefix_cache=prefix_cache, **size)
    session.add(range(1, 11), SamplingParams(max_tokens=50, ignore_eos=True))
    session.finish()
    # Of 15 blocks, rows after the last full block read 3, and the row of the last token reads 2.
    assert session.num_freed == (11 if prefix_cache else 12)
    assert session.most_held <= 5, "the window and the largest chunk"


def test_windows_make_room_for_longer_requests():
    small = {"block_size": 4, "num_kv_blocks": 20, "max_model_len": 64, "max_num_batched_tokens": 4}
    assert WindowSession(4, **small).core.scheduler.max_len > WindowSession(64, **small).core.scheduler.max_len


def evict_spent(session: WindowSession) -> None:
    pool = session.core.scheduler.pool
    pool._free += pool._evict(len(pool._spent))


def hits_of(session: WindowSession, prompt) -> int:
    name, before = session.add(prompt, TURN), session.core.scheduler.stats.prompt_tokens_cached
    session.finish()
    assert name is not None
    return session.core.scheduler.stats.prompt_tokens_cached - before


def test_the_next_turn_needs_only_the_last_window():
    session = WindowSession(8, block_size=4, num_kv_blocks=60, max_model_len=128, max_num_batched_tokens=64)
    prompt = [*range(1, 25)]
    assert hits_of(session, prompt) == 0
    answer = session.outputs["r0"]
    assert hits_of(session, [*prompt, *answer, 1, 2]) == 28
    assert hits_of(session, [*prompt, 7, 7, 7, 7]) == 24, "the answer may be left out"


def test_windows_where_prompts_branch_off_stay():
    """The windows of a shared beginning are spent, until a second prompt has shown that it is shared."""
    session = WindowSession(4, block_size=4, num_kv_blocks=60, max_model_len=128, max_num_batched_tokens=8)
    shared = [*range(1, 21)]
    assert hits_of(session, [*shared, *[7] * 17]) == 0
    evict_spent(session)
    assert hits_of(session, [*shared, *[8] * 17]) == 0
    evict_spent(session)
    assert hits_of(session, [*shared, *[9] * 17]) == 20


def test_all_groups_may_have_windows():
    session = WindowSession(8, block_size=4, num_kv_blocks=60, max_model_len=128, max_num_batched_tokens=64)
    (window,) = session.info.kv_cache.groups[1:]
    info = replace(session.info, kv_cache=KVCacheSpec((window, window)))
    manager = KVCacheManager(info, prefix_cache=True, max_chunk=64)
    first, second = (state_of(tokens) for tokens in ([*range(1, 30)], [*range(1, 34)]))
    manager.open(first, manager.match_prefix(first))
    manager.extend(first, 29)
    first.num_computed = 29
    manager.cache_full_blocks(first)
    manager.close(first)
    assert [table.count(NULL_BLOCK) for table in manager.match_prefix(second)] == [5, 5]
    assert [len(table) for table in manager.match_prefix(second)] == [7, 7]
    assert manager.find_faults([]) == []


def state_of(tokens) -> RequestState:
    request = Request("r", tokens, len(tokens), SamplingParams(max_tokens=4))
    state = RequestState(request, array("i", tokens), 64, frozenset(), (0, 0, 0))
    state.slot = 0
    return state
