"""A head that drafts what its target samples: each draft token is accepted.

An error of one position in entries, features, noise or tokens changes no output. It only costs acceptance, which these
tests find."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from runtime.assembly.engine import build_engine
from runtime.base.reports import Verified
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.kernels.cpu_support import obstacle
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.headed_runner import NUM_TOKENS, Rounds, perfect_runner
from tests.support.models.runner_driver import GREEDY

HOT = SamplingParams(max_tokens=60, temperature=1.0, top_k=20, top_p=0.95, min_p=0.01)
PENALISED = SamplingParams(max_tokens=60, temperature=0.8, top_k=9, repetition_penalty=1.3, presence_penalty=0.4,
                           logit_bias=((3, 1.5),), min_tokens=9, stop_token_ids=(4, 5))  # fmt: skip
CASES = [("token", GREEDY), ("token", HOT), ("token", PENALISED), ("feature", GREEDY)]
NAMES = ["token-greedy", "token-hot", "token-penalised", "feature-greedy"]
OF_ASSISTANTS = ("token assistant", HOT), ("feature assistant", GREEDY)
ALL_CASES, ALL_NAMES = [*CASES, *OF_ASSISTANTS], [*NAMES, *(name for name, _ in OF_ASSISTANTS)]
TIGHT = {"num_kv_blocks": 26, "max_num_batched_tokens": 40, "max_model_len": 128}
BACKENDS = ["torch", pytest.param("llvm", marks=pytest.mark.skipif(obstacle() != "", reason=obstacle()))]


@cache
def runner(reads: str, backend: str = "torch", **config):
    return perfect_runner(*reads.split(), kernel_backend=backend, block_size=16, **config)


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, NUM_TOKENS, length).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("reads", "params"), ALL_CASES, ids=ALL_NAMES)
def test_each_position_is_accepted(reads, params, backend):
    """In batches with prompts, and after chunks that end anywhere."""
    rounds = Rounds(runner(reads, backend))
    rounds.prefill(0, prompt(9), drafts=3, params=params, seed=1, room=60)
    for _ in range(3):
        rounds.verify(0, given=3, drafts=5)
    rounds.prefill(1, prompt(40), cuts=(7, 16, 17, 32), drafts=5, params=params, seed=2, room=60)
    rounds.open(2, prompt(20), params=params, seed=3, room=60)
    last = len(rounds.known[0]) - 1
    rounds.step((2, 0, 20, 1, 0), (0, last, 6, 6, 5), (1, 40, 3, 3, 2), drafts=7)
    for given in (7, 1, 4):
        rounds.verify(0, 1, 2, given=given, drafts=7)
    assert rounds.accepted
    assert all(map(all, rounds.accepted)), rounds.accepted


@pytest.mark.parametrize(("reads", "params"), CASES, ids=NAMES)
def test_drafts_after_a_prefix_hit_are_accepted(reads, params):
    rounds = Rounds(runner(reads))
    first = prompt(50)
    rounds.prefill(0, first, params=params, seed=1)
    shared = rounds.driver.tables[0][:3]
    for slot, size in ((1, 16), (2, 32), (3, 48)):
        tokens = [*first[:size], *prompt(1 + slot, slot)]
        own = shared[: size // 16]
        rounds.prefill(slot, tokens, start=size, drafts=3, shared=own, params=params, seed=slot)
        rounds.verify(slot, given=3, drafts=3)
    rounds.prefill(4, first[:49], start=48, drafts=3, shared=shared, params=params, seed=4)
    rounds.verify(1, 4, given=3, drafts=3)
    assert len(rounds.accepted) == 5
    assert all(map(all, rounds.accepted)), rounds.accepted


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("reads", "params"), CASES, ids=NAMES)
def test_drafts_after_200_steps_without_are_accepted(reads, params):
    model, params = runner(reads, max_model_len=256), replace(params, max_tokens=240, stop_token_ids=())
    model.reset()
    speculation = Speculation(HeadDrafter(model.info.head), 0, ((1, 1.0),), 0.0)
    core = build_engine(model.config, model.info, InProcess(model), speculation)
    core.add(Request("0", prompt(9), 9, params, seed=1))
    for _ in range(200):
        core.step()
    assert core.scheduler.stats.drafts == 0
    speculation._fixed = 3
    while core.has_work:
        core.step()
    stats = core.scheduler.stats
    assert stats.drafts >= 8
    assert stats.accepted_draft_tokens == stats.draft_tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("reads", "params"), ALL_CASES, ids=ALL_NAMES)
@pytest.mark.parametrize(("num_requests", "config"), [(1, {}), (12, {}), (12, TIGHT)], ids=["alone", "burst", "tight"])
def test_an_engine_accepts_all(reads, params, num_requests, config):
    """Also after preemptions, which free blocks and read them again."""
    model, params = runner(reads, max_num_seqs=8, **config), replace(params, stop_token_ids=())
    model.reset()
    speculation = Speculation(HeadDrafter(model.info.head), 3, ((1, 1.0),), 0.0)
    core = build_engine(model.config, model.info, InProcess(model), speculation)
    core.extras[Admission].lengths = FixedShare(0.1)
    for i in range(num_requests):
        tokens = prompt(5 + 3 * i, i)
        core.add(Request(str(i), tokens, len(tokens), params, seed=i))
    verified: list[Verified] = []
    while core.has_work:
        if (output := core.step()) is not None:
            verified += [report for _, report in output.reports if isinstance(report, Verified)]
    assert len(verified) >= 12 * num_requests
    assert [each for each in verified if each.num_accepted < each.num_draft_tokens] == []
    assert core.scheduler.stats.preemptions > 0 or not config
