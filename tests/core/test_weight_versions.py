"""New weights between two steps: nothing that the old ones computed is found again, and each token has one version."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.base.weight_version import WeightVersion
from tests.support.engine.fake_runner import EOS, CheckedCore, FakeRunner, check_integrity, of_versions

CONFIG = EngineConfig(block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
INFO = ModelInfo("f", 29, 64, (EOS,), 30, 4, "none", "none", weights=WeightVersion())


def engine(**changes):
    config = replace(CONFIG, **changes)
    runner = FakeRunner(config, INFO)
    return CheckedCore(config, INFO, runner), runner


def request(name, prompt, num_tokens, **more):
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)
    return Request(name, prompt, len(prompt), params)


def update(core, runner, keeps_kv=False):
    outputs = []
    while core.scheduler.num_in_flight:
        outputs.append(core.collect())
    version = core.scheduler.info.weights.after(f"u{runner.weights}", None, True)
    runner.weights += 1
    info = replace(core.scheduler.info, weights=version, fingerprint=version.fingerprint("f"))
    core.scheduler.use_weights(info, keeps_kv)
    check_integrity(core)
    return outputs


class Reader:
    """Collects the tokens of each request, and the version of the step that sampled each."""

    def __init__(self):
        self.tokens, self.versions, self.ended = {}, {}, set()

    def read(self, output, serial):
        if output is None:
            return
        for state, token in zip(output.states, output.token_ids, strict=True):
            name = state.request.request_id
            self.tokens.setdefault(name, []).append(token)
            self.versions.setdefault(name, []).append(serial)
        self.ended |= {state.request.request_id for state, _ in output.finished}

    def spans(self, name):
        return list(enumerate(map(str, self.versions[name])))


@given(st.data(), st.integers(1, 2), st.booleans())
def test_any_history_has_one_version_a_token(data, depth, chunked):
    changes = {"pipeline_depth": depth, "chunked_prefill": chunked, "max_num_batched_tokens": 16 if chunked else 64}
    core, runner = engine(**changes)
    reader, asked, losses = Reader(), {}, 0
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=20)  # of few tokens, so that many share a prefix
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "step", "step", "step", "update", "lose"])):
            case "add" if len(asked) < 8:
                name = f"r{len(asked)}"
                asked[name] = request(name, data.draw(prompts), data.draw(st.integers(1, 12)))
                core.add(asked[name])
            case "step":
                reader.read(core.step(), runner.weights)
            case "update":
                before = runner.weights
                for output in update(core, runner):
                    reader.read(output, before)
            case "lose" if losses < 2:  # a third one ends a request
                losses += 1
                core.lose()
                fresh = FakeRunner(replace(CONFIG, **changes), INFO)
                fresh.weights, runner = runner.weights, fresh
                core.recover(fresh)
    while core.has_work:
        reader.read(core.step(), runner.weights)
    assert reader.ended == asked.keys()
    for name, req in asked.items():
        assert reader.tokens[name] == of_versions(req, reader.tokens[name], reader.spans(name))


def test_new_weights_find_no_block_of_old_ones():
    core, runner = engine()
    core.add(request("a", [1] * 12, 2))
    while core.has_work:
        core.step()
    assert core.scheduler.pool.num_available == 29
    update(core, runner)
    state = core.add(request("b", [1] * 12, 2))
    core.submit()
    assert state.num_cached == 0
    core.add(request("c", [1] * 12, 2))
    while core.has_work:
        core.step()
    assert core.scheduler.stats.prompt_tokens_cached > 0


def test_blocks_computed_again_belong_to_the_new_weights():
    core, runner = engine()
    core.add(request("a", [1] * 12, 8))
    for _ in range(3):
        core.step()
    update(core, runner)
    for _ in range(3):
        core.step()
    state = core.add(request("b", [1] * 12, 1))
    core.submit()
    assert state.num_cached == 8


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_keeping_kv_computes_no_token_again(keeps_kv):
    core, runner = engine()
    state = core.add(request("a", [1, 2, 3, 4, 5], 20))
    for _ in range(6):
        core.step()
    update(core, runner, keeps_kv)
    assert (state.slot is not None) == keeps_kv
    rows = Reader()
    core.submit()
    plan_tokens = state.num_computed
    rows.read(core.collect(), 1)
    assert plan_tokens == len(state.tokens) if keeps_kv else plan_tokens > 5
    while core.has_work:
        rows.read(core.step(), 1)
    assert len(state.tokens) == 25
    assert core.scheduler.find_faults() == []


def test_a_kept_request_leaves_no_block_in_the_cache():
    core, runner = engine()
    core.add(request("a", [1] * 9, 12))
    for _ in range(6):
        core.step()
    update(core, runner, keeps_kv=True)
    while core.has_work:
        core.step()
    assert len(core.scheduler.kv_cache.cache) == 0
    check_integrity(core)


def test_a_prompt_is_scored_by_one_version():
    core, runner = engine(max_num_batched_tokens=4)
    req = request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1, prompt_logprobs=0)
    core.add(req)
    core.step()
    update(core, runner, keeps_kv=True)
    scores = []
    while core.has_work:
        scores += [report for _, report in core.step().reports]
    alone, other = engine(max_num_batched_tokens=4)
    other.weights = 1
    alone.add(req)
    expected = []
    while alone.has_work:
        expected += [report for _, report in alone.step().reports]
    assert scores == expected
    assert len(np.frombuffer(scores[0].logprobs, np.float32)) == 8
