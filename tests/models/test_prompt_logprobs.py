"""Log-probabilities of prompts equal a plain forward pass of transformers, however the engine computes them. They
arrive whole and once."""

import asyncio
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.base.reports import prompt_entries
from runtime.base.types import FinishReason, Request, SamplingParams
from runtime.core.plan import StepResult
from runtime.llm import LLM
from runtime.loading.checkpoint import open_checkpoint
from runtime.policy.admission import Admission
from tests.support.engine.fake_runner import EOS, FixedShare, prompt_scores, sequential, sequential_scores
from tests.support.engine.links import INFO, Engine, eventually, link_to, only_link, request
from tests.support.engine.sessions import Session
from tests.support.models.runner_driver import Driver, tiny_runner

PROMPTS = [np.random.default_rng(i).integers(2, 262, n).tolist() for i, n in enumerate((50, 1, 2, 17, 33, 100))]
PROMPTS.append([*PROMPTS[0][:40], *PROMPTS[3]])  # a prefix that the first one leaves in the cache
PARAMS = [
    SamplingParams(max_tokens=max_tokens, prompt_logprobs=n, logprobs=m, seed=1, ignore_eos=True)
    for max_tokens, n, m in (
        (0, 3, None),
        (0, 2, None),
        (9, 0, 1),
        (1, 20, None),
        (4, None, 2),
        (0, 1, None),
        (20, 2, 5),
    )
]
BASE = {
    "max_num_seqs": 4, "max_num_batched_tokens": 60, "block_size": 4, "num_kv_blocks": 80, "num_threads": 1,
    "quantization": "none",
}  # fmt: skip


@pytest.fixture
def path(write_tiny_gguf):
    return write_tiny_gguf()


@pytest.fixture
def load(path):
    return lambda **kw: LLM(str(path), **(BASE | kw))


@pytest.fixture
def reference(path):
    """[prompt length, vocabulary]: log-probabilities after each token, by transformers."""
    checkpoint = open_checkpoint(path)
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    assert set(model.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}

    def compute(prompt):
        with torch.no_grad():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return compute


def check(scores, prompt, num_top, want):
    assert [s.token_id for s in scores] == prompt[1:]
    for score, row in zip(scores, want, strict=False):
        assert score.logprob == pytest.approx(row[score.token_id].item(), rel=1e-5, abs=1e-4)
        assert (row > score.logprob + 3e-4).sum() < score.rank <= (row > score.logprob - 3e-4).sum() + 1
        assert len({i for i, _ in score.top}) == len(score.top) == num_top
        assert [value for _, value in score.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx([row[i].item() for i, _ in score.top], abs=1e-4)


def run(llm, prompts=PROMPTS, params=PARAMS):
    return llm.generate(prompts, params)


@pytest.mark.parametrize("budget", [1, 7, 512])
def test_they_equal_those_of_a_plain_forward_pass(load, reference, budget):
    llm = load(max_num_batched_tokens=budget)
    for done, params, prompt in zip(run(llm), PARAMS, PROMPTS, strict=True):
        if params.prompt_logprobs is None:
            assert done.prompt_logprobs == []
        else:
            check(done.prompt_logprobs, prompt, params.prompt_logprobs, reference(prompt))
        assert (len(done.token_ids), done.finish_reason) == (params.max_tokens, FinishReason.LENGTH)
        assert [len(entry.top) for entry in done.logprobs] == [params.logprobs] * len(done.logprobs)  # not a mate's
        assert len(done.logprobs) == (0 if params.logprobs is None else params.max_tokens)


def test_no_toggle_changes_their_bits(load):
    """Deterministic mode: chunks, caches, batches, depth and preemption do not show."""
    llm = load(deterministic=True, max_num_seqs=1)
    want = [(c.prompt_logprobs, c.token_ids) for c in run(llm)]
    toggles = (
        {},
        {"pipeline_depth": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 7},
        {"max_num_batched_tokens": 3, "pipeline_depth": 1},
        {"prefix_cache": False},
        {"batching": "static"},
        {"kv_layout": "contiguous", "num_kv_blocks": None},
        {"chunked_prefill": False, "max_model_len": 128, "max_num_batched_tokens": 128},
    )
    for toggle in toggles:
        llm = load(deterministic=True, **toggle)
        for _ in range(2):  # the second time with a warm prefix cache
            assert [(c.prompt_logprobs, c.token_ids) for c in run(llm)] == want, toggle


def test_preemption_leaves_no_trace(load):
    prompts = [PROMPTS[0][:12], PROMPTS[4][:20], PROMPTS[0][:9], PROMPTS[5][:26]]
    params = [
        SamplingParams(max_tokens=n, prompt_logprobs=1, seed=1, logit_bias=((0, -100.0),)) for n in (40, 30, 40, 30)
    ]
    want = [(c.prompt_logprobs, c.token_ids) for c in run(load(deterministic=True, max_num_seqs=1), prompts, params)]
    for depth in (1, 2):
        for budget in (2, 60):
            tight = load(deterministic=True, num_kv_blocks=16, max_model_len=60, prefix_cache=False,
                         max_num_batched_tokens=budget, pipeline_depth=depth)  # fmt: skip
            tight.engine.extras[Admission].lengths = FixedShare(0.0)
            assert [(c.prompt_logprobs, c.token_ids) for c in run(tight, prompts, params)] == want
            assert tight.engine.scheduler.stats.preemptions > 0


def test_a_prompt_as_long_as_the_context_can_be_scored(load, reference):
    prompt = np.random.default_rng(9).integers(2, 262, 128).tolist()
    done = run(load(), [prompt, [5, 6]], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert (done.finish_reason, done.token_ids, done.text) == (FinishReason.LENGTH, [], "")
    check(done.prompt_logprobs, prompt, 2, reference(prompt))


def test_a_fault_in_a_prompt_fails_its_request_alone(load):
    llm = load()
    llm.runner.decoder.embed[7] = math.nan
    good = [t if t != 7 else 8 for t in PROMPTS[0]]
    bad, fine = run(llm, [[*good[:9], 7, *good[9:]], good], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (bad.finish_reason, fine.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert all(math.isfinite(entry.logprob) for entry in fine.prompt_logprobs)


def test_the_output_head_never_sees_a_whole_prompt():
    """Slices of logits are at most as large as the batch that memory is planned for."""
    runner = tiny_runner(max_num_seqs=70, num_kv_blocks=40)
    driver, most, compute = Driver(runner), 0, runner.decoder.logits

    def note(hidden):
        nonlocal most
        most = max(most, len(hidden))
        return compute(hidden)

    runner.decoder.logits = note
    driver.open(0, list(range(131)) + list(range(50)), SamplingParams(max_tokens=0, prompt_logprobs=1))
    result = driver.step((0, 0, 181, 0))
    ((row, scores),) = result.reports
    assert (most, len(result.token_ids), row, len(scores), len(scores.top_ids)) == (70, 0, 0, 180, 4 * 180)


# ---- the scheduler ---------------------------------------------------------------------------------------------------

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=1)


def test_scored_prompts_take_no_cached_blocks_but_leave_theirs():
    session = Session(block_size=4, max_num_batched_tokens=64)
    prompt = list(range(1, 12))
    for params in (SCORE, SCORE, SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, prompt_logprobs=0)):
        session.add(prompt, params)
    plan = session.core.scheduler.schedule().plan
    assert plan.num_tokens.tolist() == [11, 11, 3, 11]
    assert plan.num_samples.tolist() == [0, 0, 1, 1]


def test_a_request_that_only_scores_ends_with_its_last_chunk():
    session = Session(max_num_batched_tokens=4)
    session.add(range(1, 11), SCORE)
    scheduler = session.core.scheduler
    plans = [scheduler.schedule().plan for _ in range(3)]
    assert [plan.num_tokens.tolist() for plan in plans] == [[4], [4], [2]]
    assert scheduler.schedule() is None
    for plan, n in zip(plans, (4, 4, 1), strict=True):
        scores = prompt_scores([(-1.0, 1, [])] * n, 0)
        output = scheduler.commit(StepResult(plan.step_id, plan.freed, reports=[(0, scores)]))
        assert len(output.finished) == len(output.reports) == (n == 1)
    assert not scheduler.requests


# ---- the link --------------------------------------------------------------------------------------------------------


async def read(link, req):
    """Tokens, end and prompt log-probabilities, which come only with the first output."""
    outputs = [output async for output in link.generate(req)]
    assert not any(output.reports for output in outputs[1:])
    scores = list(prompt_entries(outputs[0].reports, req.token_ids))
    return [t for o in outputs for t in o.token_ids], outputs[-1].finish_reason, scores


def scored(i, **params):
    return request(i, prompt_logprobs=i % 3, **params)


def whole(req):
    return (*sequential(req, INFO.max_model_len), sequential_scores(req))


@pytest.fixture
async def served():
    engine = Engine(max_num_batched_tokens=3)
    link = link_to(engine)
    await link.start()
    yield engine, link
    link.close()
    engine.loop.close()


async def test_scores_arrive_once_with_the_first_output(served):
    _, link = served
    requests = [scored(i, max_tokens=i % 4 * 5) for i in range(12)] + [Request("one", [3], 1, SCORE)]
    got = await asyncio.gather(*(read(link, req) for req in requests))
    assert got == [whole(req) for req in requests]


async def test_scores_arrive_once_despite_deaths(served):
    """Before they are complete, and after."""
    engine, link = served
    long = Request("long", [1 + i % 20 for i in range(300)], 300, SamplingParams(max_tokens=0, prompt_logprobs=2))
    requests = [*(scored(i, max_tokens=150) for i in range(6)), long]
    reading = asyncio.gather(*(read(link, req) for req in requests))
    for _ in range(2):
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 15)
        assert not any(stream.answered for stream in only_link(link).streams if stream.request is long)
        engine.die()
        await eventually(lambda: "restarting" in (link.health() or ""))
        engine.restart()
        await eventually(lambda: link.health() is None)
    lost = len(engine.runners)
    await eventually(lambda: engine.loop.core.scheduler.stats.steps > 15)
    engine.runners[-1].dead = "Rank 0 is gone."
    await eventually(lambda: len(engine.runners) > lost)
    assert await reading == [whole(req) for req in requests]


async def test_a_stream_that_ended_is_not_resumed(served):
    """Its reader has not taken the end yet when the engine dies, and the next engine must not continue it."""
    engine, link = served
    req = request(0, ignore_eos=False, stop_token_ids=(EOS,), max_tokens=300)
    stream = link.generate(req)
    tokens = (await anext(stream)).token_ids
    await eventually(lambda: not engine.loop.core.has_work)
    await asyncio.sleep(0.05)
    engine.die()
    await eventually(lambda: "restarting" in (link.health() or ""))
    engine.restart()
    await eventually(lambda: link.health() is None)
    await eventually(lambda: not engine.loop.core.has_work)
    await asyncio.sleep(0.05)
    tokens += [token async for output in stream for token in output.token_ids]
    assert tokens == sequential(req, INFO.max_model_len)[0]
