"""What trainers read, over a link: scores of outputs and experts of tokens, whole and once despite deaths."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from runtime.base.reports import Experts, one_of, prompt_entries
from runtime.base.types import FinishReason, Request, SamplingParams
from tests.support.engine.fake_runner import sequential, sequential_experts, sequential_scores
from tests.support.engine.links import INFO, Engine, eventually, link_to


def output_of(i: int) -> list[int]:
    return [1 + (3 * i + k) % 20 for k in range(40)]


def scored(i: int) -> Request:
    """A request with an output behind its prompt."""
    prompt = [1 + i % 7] * (3 + i)
    params = SamplingParams(max_tokens=0, prompt_logprobs=i % 3)
    return Request(f"scored {i}", [*prompt, *output_of(i)], len(prompt), params)


def routed(i: int) -> Request:
    params = SamplingParams(max_tokens=60, routed_experts=True, ignore_eos=True)
    return Request(f"routed {i}", [1 + i % 7] * (3 + i), 3 + i, params)


async def read(link, request: Request) -> tuple:
    """Tokens, end, scores and experts; the latter come with the end."""
    outputs = [output async for output in link.generate(request)]
    assert not any(one_of(output.reports, Experts) for output in outputs[:-1])
    reports = [report for output in outputs for report in output.reports]
    tokens, experts = [t for o in outputs for t in o.token_ids], one_of(reports, Experts)
    scores = list(prompt_entries(reports, request.token_ids))
    return tokens, outputs[-1].finish_reason, scores, experts and experts.ids


def wanted(request: Request) -> tuple:
    scores = sequential_scores(request)
    if request.params.max_tokens == 0:
        return [], FinishReason.LENGTH, scores, None
    tokens, reason = sequential(request, INFO.max_model_len)
    return tokens, reason, scores, sequential_experts(request, tokens).tobytes()


@pytest.fixture
async def served():
    info = replace(INFO, routed_experts=(1, 2))
    engine = Engine(max_num_batched_tokens=7, info=info, routed_experts=True)
    link = link_to(engine)
    await link.start()
    yield engine, link
    link.close()
    engine.loop.close()


async def test_scores_and_experts_arrive_whole(served):
    _, link = served
    requests = [*map(scored, range(8)), *map(routed, range(8))]
    assert await asyncio.gather(*(read(link, request) for request in requests)) == list(map(wanted, requests))


async def test_they_outlive_engines_and_runners(served):
    engine, link = served
    requests = [*map(scored, range(8)), *map(routed, range(8))]
    reading = asyncio.gather(*(read(link, request) for request in requests))
    for _ in range(2):
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 15)
        engine.die()
        await eventually(lambda: "restarting" in (link.health() or ""))
        engine.restart()
        await eventually(lambda: link.health() is None)
    await eventually(lambda: engine.loop.core.scheduler.stats.steps > 15)
    lost = len(engine.runners)
    engine.runners[-1].dead = "Rank 0 is gone."
    await eventually(lambda: len(engine.runners) > lost)
    assert await reading == list(map(wanted, requests))


def test_sequential_experts_depend_on_all_tokens():
    request = routed(1)
    one, other = (sequential_experts(replace(request, token_ids=[*request.token_ids, last]), [1]) for last in (2, 3))
    assert np.array_equal(one[:-1], other[:-1])
    assert not np.array_equal(one, other)
