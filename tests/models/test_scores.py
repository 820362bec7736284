"""Scores of an output equal the log-probabilities of its sampling, to the bit, in deterministic mode."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.kernels.cpu_support import obstacle
from runtime.worker.runner import ModelRunner
from tests.support.engine.fake_runner import Recorded
from tests.support.models.family_cases import CASES, LIKE_OTHERS, SPECS
from tests.support.models.scored_engine import (
    SAMPLED,
    Answer,
    Between,
    answers,
    check_scores,
    check_scores_of,
    engine_of,
    family_runner,
    killed,
    prompts_of,
    sampled,
    scored,
)

COMPILED = pytest.mark.skipif(bool(obstacle()), reason=f"needs compiled kernels: {obstacle()}")
BACKENDS = ["torch", pytest.param("llvm", marks=COMPILED)]
PROMPTS = prompts_of(101)
TIGHT = {"block_size": 4, "max_num_batched_tokens": 70, "prefix_cache": False}  # with few blocks
SETTINGS = [
    {"max_num_batched_tokens": 70},
    {"prefix_cache": False},
    {"chunked_prefill": False, "max_num_batched_tokens": 128},
    {"pipeline_depth": 1},
    {"kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"quantization": "int4"},
]


def losses(runner: Callable[[], ModelRunner]) -> Between:
    """The runners are lost twice: at a third loss a request would be suspected."""

    def between(core: EngineCore, step: int) -> None:
        if step in (4, 12):
            core.lose()
            core.recover(InProcess(runner()))

    return between


def guesses(outputs: list[Answer]) -> Recorded:
    """A drafter that is often right."""
    return Recorded({f"sampled {i}": output.tokens for i, output in enumerate(outputs)}, 0.7, 101)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", sorted(LIKE_OTHERS))
def test_scores_of_a_family_equal_what_was_sampled(case: str, backend: str):
    check_scores(engine_of(family_runner(case, kernel_backend=backend)), PROMPTS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*sorted(CASES.keys() - LIKE_OTHERS), *SPECS])
def test_scores_of_a_family_outlive_an_engine(case: str, backend: str):
    """The whole output has the log-probabilities of an engine without a fault, and so have its scores."""
    runner = family_runner(case, kernel_backend=backend)
    want = answers(engine_of(runner), sampled(PROMPTS))
    runner.reset()
    first = engine_of(runner)
    second = engine_of(family_runner(case, kernel_backend=backend))
    assert killed(first, second, sampled(PROMPTS), num_steps=9) == want
    check_scores_of(second, PROMPTS, want)


def cases_of_settings() -> Iterator[Any]:
    """Every pair of a case and a setting with one backend. Cases and settings meet both backends."""
    cases = "qwen3", "qwen3.5 moe", "glm4 moe", "deepseek v3"
    for (i, case), (j, config) in product(enumerate(cases), enumerate(SETTINGS)):
        if config.get("kv_cache_dtype") and case == "deepseek v3":
            continue  # latents are stored in the model's dtype
        is_quantized = "quantization" in config  # a CPU multiplies quantized weights by compiled kernels
        backend = "llvm" if is_quantized or (i + j) % 2 else "torch"
        marks = [COMPILED] if backend == "llvm" else []
        yield pytest.param(case, config, backend, marks=marks, id=f"{case}-{config}-{backend}")


@pytest.mark.parametrize(("case", "config", "backend"), list(cases_of_settings()))
def test_no_setting_changes_scores(case: str, config: dict, backend: str):
    check_scores(engine_of(family_runner(case, kernel_backend=backend, **config)), PROMPTS)


@pytest.mark.parametrize("case", ["llama", "qwen3 moe", "qwen3.5", "lfm2", "deepseek v3"])
def test_preemption_leaves_no_trace(case: str):
    core = engine_of(family_runner(case, num_kv_blocks=58, **TIGHT))
    check_scores(core, PROMPTS)
    assert core.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("case", ["llama", "qwen3 moe", "qwen3.5", "deepseek v2 lite"])
def test_lost_runners_leave_no_trace(case: str):
    def runner():
        return family_runner(case, max_num_batched_tokens=70)

    check_scores(engine_of(runner()), PROMPTS, losses(runner))


@pytest.mark.parametrize(
    "case", ["llama", "qwen3 moe", "qwen3.5", "sinks", "glm4 moe", "glm 4.7 flash", "expert biases"]
)
def test_speculation_leaves_no_trace(case: str):
    plain = answers(engine_of(family_runner(case)), sampled(PROMPTS))
    core = engine_of(family_runner(case), guesses(plain))
    check_scores(core, PROMPTS)
    stats = core.scheduler.stats
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0
    assert answers(core, sampled(PROMPTS)) == plain


def test_an_output_continues_behind_its_scores():
    """Tokens after `prompt_len` count as output, so a request may go on after them."""
    core = engine_of(family_runner("qwen3.5"))
    want = answers(core, sampled(PROMPTS, replace(SAMPLED, frequency_penalty=1.0, min_tokens=11)))
    cut = [answer.tokens[:8] for answer in want]
    params = replace(SAMPLED, frequency_penalty=1.0, min_tokens=11, prompt_logprobs=0)
    requests = [replace(r, seed=5 + i) for i, r in enumerate(scored(PROMPTS, cut, params))]
    for prompt, found, whole in zip(PROMPTS, answers(core, requests), want, strict=True):
        assert found.tokens == whole.tokens[8:]
        assert [*found.scores[len(prompt) - 1 :], *found.logprobs] == whole.logprobs
        assert found.drawn == whole.drawn[8:]


def test_drawn_log_probabilities_outlive_all_histories():
    """Alone, in a batch, preempted, after a loss and with guesses: the same bits."""
    params = replace(SAMPLED, temperature=0.9, top_p=0.9, repetition_penalty=1.2)
    requests = sampled(PROMPTS, params)
    alone = engine_of(family_runner("qwen3"))
    want = [answers(alone, [request])[0] for request in requests]
    assert any(drawn != raw for answer in want for drawn, raw in zip(answer.drawn, answer.logprobs, strict=True))

    def runner() -> ModelRunner:
        return family_runner("qwen3", num_kv_blocks=35, **TIGHT)

    core = engine_of(runner(), guesses(want))
    assert answers(core, requests, losses(runner)) == want
    stats = core.scheduler.stats
    assert min(stats.preemptions, stats.draft_tokens - stats.accepted_draft_tokens) > 0
