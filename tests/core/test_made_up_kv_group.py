"""A new group of the KV cache needs only a description: here one with a window, beside one that keeps everything."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.core.block_pool import NULL_BLOCK
from runtime.policy.admission import Admission
from runtime.spec.types import SamplingParams
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.sessions import Session, configs, events
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


def test_blocks_outside_windows_are_freed():
    seen = Counter()

    @settings(max_examples=examples(300), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, events, st.sampled_from([1, 2, 5, 9, 40]))
    def run(config, history, window):
        session = WindowSession(window, **config | {"kv_layout": "paged"})
        session.core.extras[Admission].lengths = FixedShare(0.0)  # it admits too many
        session.play(history)
        session.finish()
        seen["steps"] += session.steps
        seen["freed"] += session.num_freed
        seen["preemptions"] += session.core.scheduler.stats.preemptions
        seen["accepted"] += session.accepted
        assert session.core.scheduler.stats.prompt_tokens_cached == 0, "a prefix is shared in one full group only"

    run()
    assert seen["steps"] > examples(4000), seen
    assert seen["freed"] > examples(100), seen
    assert seen["preemptions"] > examples(10), seen
    assert seen["accepted"] > examples(300), seen


def test_a_long_answer_holds_only_its_window():
    session = WindowSession(8, block_size=4, num_kv_blocks=40, max_model_len=64, max_num_batched_tokens=8)
    session.add(range(1, 11), SamplingParams(max_tokens=50, ignore_eos=True))
    session.finish()
    assert session.num_freed == 13 - 1, "of 15 blocks but those that the last row still reads"
    assert session.most_held <= 5, "the window and the largest chunk"


def test_windows_make_room_for_longer_requests():
    small = {"block_size": 4, "num_kv_blocks": 20, "max_model_len": 64, "max_num_batched_tokens": 4}
    assert WindowSession(4, **small).core.scheduler.max_len > WindowSession(64, **small).core.scheduler.max_len
