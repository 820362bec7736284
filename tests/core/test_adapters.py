"""Adapters in the scheduler: which requests may use one, its index in rows, and which blocks they share."""

import numpy as np
import pytest

from runtime.assembly.engine import build_engine
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.core.plan import StepResult
from runtime.core.prefix_cache import root_hash
from runtime.features.adapter_table import AdapterTable, is_in_use
from tests.support.engine.fake_runner import FakeRunner
from tests.support.engine.sessions import make

PROMPT = list(range(1, 9))


def test_one_life_of_two_adapters():
    config, info = make(block_size=4, max_num_batched_tokens=64, max_num_seqs=8, max_loras=2)
    core = build_engine(config, info, FakeRunner(config, info))
    scheduler, adapters = core.scheduler, core.extras[AdapterTable]

    def add(name: str, adapter: str = "") -> None:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        core.add(Request(name, PROMPT, len(PROMPT), params, adapter=adapter))

    first, second = adapters.reserve("one"), adapters.reserve("two")
    assert (first, second) == (1, 2)
    assert adapters.loaded == {"one": 1, "two": 2}
    with pytest.raises(CallboardError, match="There are 2 adapters loaded"):
        adapters.reserve("three")
    with pytest.raises(CallboardError, match="loaded already"):
        adapters.reserve("one")
    with pytest.raises(CallboardError, match="one is not loaded"):
        add("early", "one")
    adapters.open("one")
    adapters.open("two")
    for name, adapter in (("a", ""), ("b", "one"), ("c", "two"), ("d", "one")):
        add(name, adapter)
    plan = scheduler.schedule().plan
    assert [new.adapter for new in plan.new] == [0, 1, 2, 1]
    assert plan.num_tokens.tolist() == [8, 8, 8, 4]  # d shares a block with b alone
    adapters.close("one")
    assert not adapters.is_open("one")
    assert adapters.index_of("one") == 1  # for the requests that use it
    scheduler.requeue_all()  # the runners are gone: requests keep their adapter
    assert adapters.loaded == {"one": 1, "two": 2}
    again = scheduler.schedule().plan
    assert sorted(new.adapter for new in again.new) == [0, 1, 1, 2]
    for name in "abcd":
        core.abort(name)
    assert is_in_use(1, scheduler.all_states())  # by rows in flight
    scheduler.commit(StepResult(again.step_id, np.zeros(int(again.num_samples.sum()), np.int32)))
    assert not is_in_use(1, scheduler.all_states())
    adapters.release("one")
    assert adapters.reserve("three") == 1


def test_root_hashes_separate_adapters_and_salts():
    roots = {
        root_hash("f", salt, adapter) for salt, adapter in (("", ""), ("", "a"), ("a", ""), ("a", "a"), ("a\0", ""))
    }
    assert len(roots) == 5
