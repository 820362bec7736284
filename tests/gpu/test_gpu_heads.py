"""Draft heads on a GPU: graphs draft what launched kernels draft, and a head changes no token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.library.models import eagle3_head
from runtime.assembly.engine import build_engine, speculation_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.core.plan import DEVICE_DRAFT, StepPlan, StepResult
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.kernels.triton_engine import SPEC
from tests.support.models.headed_runner import assistant_of
from tests.support.models.runner_driver import GREEDY, Driver
from tests.support.models.specs import changed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SLIDING = changed(SPEC, vocab_size=132, window=(20, 0), v_norm=True)  # which assistants read
HEADS = {  # each with its target
    "mtp": (SPEC, mtp_spec(SPEC)),
    "eagle3": (SPEC, replace(eagle3_head(SPEC, 60), taps=(0, 1, 2))),
    "assistant": (SLIDING, assistant_of(SLIDING)),
    "centroids": (SLIDING, assistant_of(SLIDING, centroids=12, best=3)),
}
HOT = SamplingParams(max_tokens=40, temperature=0.9, top_k=20)
SAMPLING = [GREEDY, HOT, SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.3)]


def headed_runner(name: str, has_head: bool = True, **config) -> ModelRunner:
    spec, head = HEADS[name]
    own = {"device": "cuda", "num_kv_blocks": 300, "max_num_seqs": 16, "max_model_len": 256, "num_draft_tokens": 3}
    own |= {"draft": "mtp" if has_head else None, "dtype": "float32"}
    return build_runner(EngineConfig(**own | config), DummySource(spec, draft_head=head))


def tokens_of(runner: ModelRunner) -> tuple[dict[str, list[int]], int]:
    """Tokens of 12 requests that decode together, and the most that a request has in one step."""
    speculation = speculation_of(runner.config, runner.info, lambda: 0.0)
    core = build_engine(runner.config, runner.info, InProcess(runner), speculation)
    rng, got, most = np.random.default_rng(0), {}, 0
    for i in range(12):
        prompt = rng.integers(0, SPEC.vocab_size, 5 + 9 * i).tolist()
        core.add(Request(str(i), prompt, len(prompt), SAMPLING[i % len(SAMPLING)], seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                got.setdefault(state.request.request_id, []).append(token)
            most = max(most, *map(output.states.count, output.states), 0)
    return got, most


@pytest.mark.parametrize("head", HEADS)
def test_a_head_changes_no_token(head):
    want, _ = tokens_of(headed_runner(head, has_head=False, deterministic=True))
    got, most = tokens_of(headed_runner(head, deterministic=True))
    assert got == want
    assert most >= 1


def rounds(runner: ModelRunner, count: int = 6) -> list[list[int]]:
    """Samples and draft tokens of rounds with three rows."""
    driver, kept, known = Driver(runner), [], {}
    for slot, length in ((0, 9), (1, 33), (2, 20)):
        known[slot] = np.random.default_rng(slot).integers(0, SPEC.vocab_size, length).tolist()
        driver.open(slot, known[slot], (GREEDY, HOT, GREEDY)[slot], seed=slot)

    def step(rows: list[tuple[int, int, int, int]], drafts: list[int]) -> StepResult:
        driver.plan.next_drafts = 3
        driver.plan.draft_lens = np.array(drafts, np.int32)
        driver.plan.draft_token_ids = np.full(sum(drafts), DEVICE_DRAFT, np.int32)
        result = driver.step(*rows)
        kept.append([*result.token_ids.tolist(), *result.draft_token_ids.tolist()])
        return result

    result = step([(slot, 0, len(known[slot]), 1) for slot in known], [0, 0, 0])
    for slot in known:
        known[slot].append(int(result.token_ids[slot]))
    for _ in range(count):
        result = step([(slot, len(known[slot]) - 1, 4, 4) for slot in known], [3, 3, 3])
        samples, drafts = result.token_ids.reshape(3, 4), result.draft_token_ids.reshape(3, 3)
        for slot in known:
            accepted = int((samples[slot, :3] == drafts[slot]).cumprod().sum())
            known[slot] += samples[slot, : accepted + 1].tolist()
    return kept


@pytest.mark.parametrize("head", HEADS)
def test_graphs_draft_as_launched_kernels(head):
    runner = headed_runner(head, deterministic=True)
    assert runner.steps.head.graphs, "the head has graphs"
    with_graphs = rounds(runner)
    runner.steps.head.graphs.clear()
    assert rounds(runner) == with_graphs, "graphs of the head"
    runner.steps.graph_runner.graphs.clear()
    runner.steps.graph_runner.prefill_graphs.clear()
    assert rounds(runner) == with_graphs, "and of the target"


@pytest.mark.parametrize("name", ["mtp", "eagle3"])
def test_16_bit_models_draft_with_8_bit_logits(name):
    runner = headed_runner(name, dtype="bfloat16")
    _, most = tokens_of(runner)
    assert most >= 1
    head = runner.steps.head.head
    x = torch.randn(5, SPEC.hidden_size, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        got, copied, head.output_copy = head.logits(x), head.output_copy, None
        want = head.logits(x)
    assert (copied is None) == head.spec.own_head
    if copied is None:
        assert torch.equal(got, want)
    else:
        assert 0 < (got - want).abs().max() < 0.03 * want.abs().max()


def test_a_head_that_is_not_finite_drafts_nothing():
    runner = headed_runner("mtp", deterministic=True)
    want = [ids[: 3 if len(ids) == 3 else 12] for ids in rounds(runner)]
    with torch.inference_mode():
        runner.steps.head.head.fc.weight.fill_(torch.nan)
    runner.reset()
    got = rounds(runner)
    assert all(ids[12:] == [-1] * 9 for ids in got[1:])
    assert [ids[0] for ids in got[1:2]] == [ids[0] for ids in want[1:2]], "the target's samples stay"


def test_pinned_drafts_are_accepted_by_position():
    """Every draft token is accepted with a mean of 4 tokens a round: a perfect head."""
    runner = headed_runner("mtp", pinned_acceptance=4.0)
    for ids in rounds(runner)[1:]:
        samples, drafts = np.array(ids[:12]).reshape(3, 4), np.array(ids[12:]).reshape(3, 3)
        assert (samples[:, :3] == drafts).all()


def test_an_empty_plan_needs_no_head():
    runner = headed_runner("mtp")
    assert not len(runner.execute(StepPlan(0)).token_ids)
