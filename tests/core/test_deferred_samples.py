"""Samples that runners defer while a grammar's matcher is made: the row is planned again, and no token changes."""

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.reports import GrammarSamples
from runtime.base.types import Grammar
from runtime.core.block_pool import NULL_BLOCK
from runtime.core.plan import StepResult, decode_plan, joined
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import FakeRunner, FixedShare
from tests.support.engine.sessions import Session, configs, events
from tests.support.engine.window_runner import WindowRunner, groups

GRAMMAR = Grammar("key", "text", "")


class Deferring:
    """A runner that defers samples at random, and leaves a wrong token in the slot."""

    num_deferred = 0

    def collect(self):
        plan = decode_plan(self.queue[0][-1])
        result = super().collect()
        random, at, deferred = np.random.default_rng(plan.step_id), 0, []
        token_ids = result.token_ids.copy()
        for slot, end, samples in zip(plan.slots.tolist(), plan.ends.tolist(), plan.num_samples.tolist(), strict=True):
            if samples and not self.pooled[slot] and random.random() < 0.3:
                deferred.append(at)
                token_ids[at : at + samples] = -1
                self.tokens[slot] |= dict.fromkeys(range(end - samples + 1, end + 1), 0)
            at += samples
        Deferring.num_deferred += len(deferred)
        reports = [*result.reports, (-1, GrammarSamples(deferred))]
        return msgspec.structs.replace(result, token_ids=token_ids, reports=reports)


class DeferringRunner(Deferring, FakeRunner):
    pass


class DeferringWindowRunner(Deferring, WindowRunner):
    pass


class DeferringSession(Session):
    def add(self, prompt, params, priority=0, salt=""):
        return super().add(prompt, params if params.pooled else replace(params, grammar=GRAMMAR), priority, salt)

    def step(self) -> None:
        """Keep the values that the row of the last known token reads, even if later steps are planned already."""
        super().step()
        for state in self.core.scheduler.running if self.info.kv_cache is not None else ():
            first = max(0, len(state.tokens) - self.info.kv_cache.groups[1].window)
            assert NULL_BLOCK not in state.tables[1][first // self.info.block_size :] or state.params.pooled


@pytest.mark.parametrize("window", [None, 1, 5])
def test_deferred_samples_give_the_sequential_tokens(window):
    seen = Counter()

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(configs, events, st.sampled_from([None, 0.0]))
    def run(config, history, share):
        class Of(DeferringSession):
            runner_type = DeferringRunner if window is None else DeferringWindowRunner

        places = {} if window is None else {"kv_cache": groups(window), "kv_layout": "paged"}
        session = Of(**config | places)
        if share is not None:
            session.core.extras[Admission].lengths = FixedShare(share)
        session.play([event for event in history if event[0] != "fail"])
        session.finish()
        seen["steps"] += session.steps
        seen["accepted"] += session.accepted

    Deferring.num_deferred = 0
    run()
    assert seen["steps"] > 300, seen
    assert seen["accepted"] > 10, seen
    assert Deferring.num_deferred > 80


def test_deferred_samples_keep_their_order():
    steps = ([5, -1, 6], [1], {}), ([7, -1, -1], [1], {2: "a limit"})
    whole = joined([
        StepResult(1, np.array(ids, np.int32), reports=[(-1, GrammarSamples(deferred, failures))])
        for ids, deferred, failures in steps
    ])  # fmt: skip
    assert whole.token_ids.tolist() == [5, 7, -1, -1, 6, -1]
    assert [report for _, report in whole.reports] == [GrammarSamples([2]), GrammarSamples([3], {5: "a limit"})]
