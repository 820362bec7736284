"""Grammars in the steps of a GPU: answers fit for any batch, guesses and engine of a grammar."""

import time
from dataclasses import replace

import pytest
import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import FinishReason, Grammar
from runtime.kernels.sampling import automata, bitmask, sample
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.grammar.test_structured_steps import PERSON, PERSONS, check_fits, schemas_with_grammars
from tests.grammar.test_structured_walks import SMALL
from tests.support.kernels.triton_engine import SPEC as WIDE
from tests.support.structured.cases import regex
from tests.support.structured.engine import SPEC, answers, hot, recorded, text_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def gpu_runner(**config) -> ModelRunner:
    settings = {"device": "cuda", "num_kv_blocks": 400, "max_num_seqs": 32, "max_model_len": 176, "draft": "ngram"}
    spec = replace(WIDE, vocab_size=SPEC.vocab_size)
    return build_runner(
        EngineConfig(**settings | config), DummySource(spec, eos_token_ids=SMALL.eos_ids, vocabulary=SMALL)
    )


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return gpu_runner(deterministic=True)


def test_random_answers_fit_with_and_without_speculation(runner):
    cases = schemas_with_grammars(60)
    params = [hot(cases[i % len(cases)][1]) for i in range(300)]
    plain, finished = answers(runner, params), 0
    assert answers(runner, params, recorded(plain, 0.7)) == plain
    for name, (tokens, reason, _) in plain.items():
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
        if reason is FinishReason.STOP:
            check_fits(text_of(tokens), cases[int(name) % len(cases)][0])
            finished += 1
    assert finished > 200


MIXED = [
    hot(PERSONS), hot(None, max_tokens=30), hot(regex("(?:ab|c){3,9}")), hot(PERSONS, temperature=0.0),
    hot(PERSONS, top_k=5, top_p=0.9, repetition_penalty=1.2, logprobs=2),
    hot(regex("a*"), min_tokens=10, max_tokens=60),
    hot(PERSONS, logit_bias=()), hot(regex("(?:ab|c){2,40}"), logit_bias=(), max_tokens=20),
]  # fmt: skip


def tokens_of(found):
    return {name: answer[:2] for name, answer in found.items()}


def test_an_answer_is_the_same_alone_eager_and_without_graphs(runner):
    """Alone most rows are sampled again in place, among others with filters from copies; and automata take over."""
    together = answers(runner, MIXED)
    assert tokens_of(answers(gpu_runner(deterministic=True, cuda_graphs=False), MIXED)) == tokens_of(together)
    assert tokens_of(answers(gpu_runner(deterministic=True, max_num_seqs=1), MIXED)) == tokens_of(together)
    engines = runner.masks._engines.result()
    assert 0 < runner.masks.step_us < 1e6
    engines.policy = AutomatonPolicy(0.0, 0)  # at once
    for params in (MIXED[0], MIXED[2], MIXED[5], MIXED[7]):
        deadline = time.monotonic() + 20
        while engines.matcher(params.grammar).engine == "lazy" and time.monotonic() < deadline:
            time.sleep(0.02)
    torch.cuda.set_sync_debug_mode("error")  # the host waits for results alone
    try:
        assert tokens_of(answers(runner, MIXED)) == tokens_of(together)
        assert tokens_of(answers(runner, MIXED, recorded(together, 0.8))) == tokens_of(together)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner.masks._automata._places, "no automaton took part"
    for name in "03":
        if together[name][1] is FinishReason.STOP:
            check_fits(text_of(together[name][0]), PERSON)


def test_a_grammar_that_fails_ends_its_request_alone(runner):
    plain = answers(runner, MIXED[:4])
    found = answers(runner, [*MIXED[:4], hot(Grammar("broken", "start: /(/", ""))])
    assert found.pop("4") == ([], FinishReason.GRAMMAR, [])
    assert tokens_of(found) == tokens_of(plain)


def test_the_first_grammars_compile_no_kernel():
    fresh = gpu_runner(dtype="bfloat16")
    kernels = [
        automata._mask_states_kernel, automata._advance_states_kernel, bitmask._apply_bitmask_kernel,
        sample._best_of_tile_kernel, sample._best_of_row_kernel,
    ]  # fmt: skip

    def built() -> list[int]:
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    before = built()
    assert all(before)
    plain = answers(fresh, MIXED)
    answers(fresh, MIXED, recorded(plain, 0.7))
    assert built() == before
