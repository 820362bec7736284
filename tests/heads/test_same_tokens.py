"""A model from a file with its head in this process: the same answers as without it, whatever is asked."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from runtime.base.types import GrammarSpec, SamplingParams
from runtime.llm import LLM, Completion
from runtime.policy.admission import Admission
from runtime.structured.grammar import compiled
from runtime.worker.runner import ModelRunner
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.headed_files import write_headed

NUM_REQUESTS, SHARED = 24, 72  # the latter: tokens that most prompts begin with, so the prefix cache has them
PARAMS = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "ignore_eos": True},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2,
        "logit_bias": ((3, 2.0), (9, -5.0)),
    },
    "logprobs": {"temperature": 0.6, "logprobs": 3, "sampling_logprobs": True, "prompt_logprobs": 1},
    "stop": {"temperature": 1.0, "stop": ("a", "e", "i", "z"), "stop_token_ids": tuple(range(200, 210))},
    "min_tokens": {"temperature": 0.9, "min_tokens": 15, "stop_token_ids": tuple(range(2, 60)), "top_k": 40},
    "grammar": {"temperature": 0.8, "grammar": compiled(GrammarSpec("regex", "([a-e]{3,9}[ ,]){2,9}"))},
}  # fmt: skip
TIGHT = {"num_kv_blocks": 24, "max_model_len": 160, "max_num_batched_tokens": 80, "max_num_seqs": 6, "block_size": 16}
MORE = pytest.mark.thorough
MODELS = ["qwen3.5", "deepseek-v3", *(pytest.param(name, marks=MORE) for name in ("qwen3.5-moe", "glm4-moe"))]
FIRST = ["qwen3.5", pytest.param("deepseek-v3", marks=MORE)]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[..., LLM]:
    """Start a model with its head, or without; the same one for the same arguments."""
    folder = tmp_path_factory.mktemp("headed")

    @cache
    def path(name: str, spoilt: float | None) -> Path:
        return write_headed(folder / f"{name}-{spoilt}.gguf", name, spoilt)

    @cache
    def begin(name: str, draft: str | None, spoilt: float | None = None, **config: Any) -> LLM:
        own = {"deterministic": True, "num_threads": 1, "num_kv_blocks": 400, "max_num_seqs": 8, "max_model_len": 256}
        own |= {"num_draft_tokens": 3 if draft else None, "draft": draft}
        with mock.patch.object(ModelRunner, "_time_steps"):
            llm = LLM(str(path(name, spoilt)), **own | config)
        llm.engine.extras[Admission].lengths = FixedShare(0.1)  # it admits too many
        return llm

    return begin


class Case(NamedTuple):
    """A request."""

    prompt: list[int]
    params: SamplingParams


def case(i: int, max_tokens: int = 24, prefix: int = SHARED) -> Case:
    """A prompt, which may begin with the shared prefix."""
    rng = np.random.default_rng(i)
    shared = [3 + 7 * k % 250 for k in range(prefix)] if i % 3 else []
    prompt = shared + rng.integers(3, 250, 1 + 5 * i % 31).tolist()
    return Case(prompt, SamplingParams(max_tokens=max_tokens, seed=i, **list(PARAMS.values())[i % len(PARAMS)]))


def facts(answer: Completion) -> tuple[Any, ...]:
    """All that a client sees, except the count of cached tokens, which depends on timing."""
    assert not answer.error
    lists = answer.token_ids, answer.logprobs, answer.prompt_logprobs
    return (*lists, answer.text, answer.finish_reason, answer.stop, answer.seed)


def answers(llm: LLM, cases: Sequence[Case], n: int = 1) -> list[tuple[Any, ...]]:
    prompts, params = zip(*cases, strict=True)
    return list(map(facts, llm.generate(list(prompts), list(params), n=n, progress=False)))


def check(plain: LLM, headed: LLM, *batches: Sequence[Case], n: int = 1) -> None:
    """Both give the same answers, and some draft tokens are accepted meanwhile."""
    stats = headed.engine.scheduler.stats
    before = stats.draft_tokens, stats.accepted_draft_tokens
    for cases in batches:
        for i, (got, want) in enumerate(zip(answers(headed, cases, n), answers(plain, cases, n), strict=True)):
            assert got == want, (i, cases[i // n].params)
    drafted, accepted = stats.draft_tokens - before[0], stats.accepted_draft_tokens - before[1]
    assert sum(map(len, batches)) < accepted < drafted
    assert plain.engine.scheduler.stats.draft_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_burst_has_the_same_answers(name, start):
    plain, headed = start(name, None), start(name, "mtp")
    check(plain, headed, [case(i) for i in range(NUM_REQUESTS)])
    assert headed.engine.scheduler.stats.prompt_tokens_cached > 0


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST)
def test_requests_alone_have_the_same_answers(name, start):
    """They find the prompts of earlier ones in the prefix cache."""
    check(start(name, None), start(name, "mtp"), *([case(i % 16)] for i in range(24)))


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST)
def test_several_choices_have_the_same_answers(name, start):
    check(start(name, None), start(name, "mtp"), [case(i) for i in range(len(PARAMS))], n=3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_preempted_requests_have_the_same_answers(name, start):
    headed = start(name, "mtp", **TIGHT)
    check(start(name, None), headed, [case(i, 40) for i in range(NUM_REQUESTS)])
    assert headed.engine.scheduler.stats.preemptions > 0, headed.runner.memory


@pytest.mark.long
@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=MORE), pytest.param(1e38, marks=MORE)])
@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_a_spoilt_head_costs_draft_tokens_alone(name, value, start):
    """Its weights are not finite, or make values that are not."""
    plain, headed = start(name, None), start(name, "mtp", spoilt=value)
    cases = [case(i) for i in range(NUM_REQUESTS // 2)]
    assert answers(headed, cases) == answers(plain, cases)
    stats = headed.engine.scheduler.stats
    assert stats.accepted_draft_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("name", FIRST)
def test_loads_from_a_tier_have_the_same_answers(name, start, tmp_path, monkeypatch):
    """The tier has a head's keys and values, and no features: the first entry behind a loaded prefix is a guess."""
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path))
    cases = [case(i, prefix=320) for i in range(6)]
    tier = {"kv_tier_name": "t", "kv_tier_memory": 0.02, "max_model_len": 512}
    plain = start(name, None, max_model_len=512)
    first, second = (start.__wrapped__(name, "mtp", **tier) for _ in range(2))
    check(plain, first, cases)
    while first.engine.has_work:
        first.engine.step()
    check(plain, second, cases)
    stats = second.engine.stats()
    assert stats["tier_hit_tokens"] >= 256
    assert stats["tier_damaged"] == 0
