"""A head's draft tokens stay on the runner. No history changes a token, and the head finds each of its entries."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.model_info import HeadInfo
from runtime.base.types import FinishReason, SamplingParams
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.head_runner import HeadRunner
from tests.support.engine.sessions import Session, configs, histories
from tests.support.examples import examples

_SIZES = st.sampled_from([2, 4, 7, 16])


class HeadSession(Session):
    runner_type = HeadRunner

    def __init__(self, **config):
        size = config["block_size"]
        super().__init__(**config, head=HeadInfo("mtp", min(7, size - 1)))


def test_any_history_gives_right_tokens_and_whole_entries():
    seen = Counter()

    @settings(max_examples=examples(200), suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, histories, _SIZES, st.sampled_from([None, 0.0]))
    def run(config, history, block_size, share):
        paged = {"kv_layout": "paged", "block_size": block_size, "share_right": None}
        session = HeadSession(**{**config, **paged})
        if share is not None:
            session.core.extras[Admission].lengths = FixedShare(share)  # it admits too many
        session.play(history)
        session.finish()
        seen["accepted"] += session.accepted
        seen["rejected"] += session.guessed - session.accepted
        seen["hits"] += session.core.scheduler.stats.prompt_tokens_cached
        seen["preemptions"] += session.core.scheduler.stats.preemptions
        seen["checked"] += session.runner.num_checked
        seen["failures"] += sum(reason is FinishReason.ERROR for reason in session.reasons.values())

    run()
    assert seen["accepted"] > examples(100), seen
    assert seen["rejected"] > examples(100), seen
    assert seen["hits"] > examples(50), seen
    assert seen["preemptions"] > 0, seen
    assert seen["failures"] > 0, seen


def test_hits_with_a_head_equal_those_without():
    hits = []
    for kind in (HeadSession, Session):
        session = kind(block_size=4, num_kv_blocks=40, max_model_len=64, max_num_seqs=4, fixed=3)
        for turn in range(3):
            for prompt in (range(1, 14), range(1, 20), [1, 2, 3, 4, 5, 6, 7, 8, *range(20, 20 + turn + 4)]):
                session.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
            session.finish()
        hits.append(session.core.scheduler.stats.prompt_tokens_cached)
    assert hits[0] == hits[1] > 0


def test_rows_verify_the_head_s_tokens_in_the_step_after():
    session = HeadSession(block_size=16, max_num_seqs=2, fixed=3)
    session.runner.share_right = 1.0
    session.add([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    session.finish()
    assert session.accepted > 20
    assert session.steps < 22
    stats = session.core.scheduler.stats
    assert stats.accepted_by_position[0] >= stats.accepted_by_position[2] > 0


def test_a_plan_without_drafting_asks_for_none():
    session = HeadSession(block_size=16, max_num_seqs=2, fixed=0)
    session.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    plan = session.core.scheduler.schedule().plan
    assert plan.next_drafts == 0
