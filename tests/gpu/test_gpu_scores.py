"""What trainers read on a GPU: scores with the bits of sampling, drawn log-probabilities, routed experts."""

import numpy as np
import pytest
import torch

from runtime.core.executor import InProcess
from runtime.kernels.sampling.logprobs import token_logprobs
from tests.support.engine.fake_runner import Recorded
from tests.support.kernels.drawn_logprob_cases import Rows, check_definition, check_twins, varied
from tests.support.models.family_cases import CASES, LIKE_OTHERS, SPECS
from tests.support.models.scored_engine import (
    REPORTED,
    answers,
    check_experts,
    check_scores,
    engine_of,
    family_runner,
    prompts_of,
    sampled,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

GPU = torch.device("cuda")
PROMPTS = prompts_of(101)


def runner_of(case: str, changes=None, **config):
    return family_runner(case, changes, device="cuda", **config)


@pytest.mark.parametrize("case", [*sorted(CASES.keys() - LIKE_OTHERS), *SPECS])
def test_scores_of_a_family_equal_what_was_sampled(case):
    check_scores(engine_of(runner_of(case)), PROMPTS)


@pytest.mark.parametrize(
    "config",
    [
        {"cuda_graphs": False},
        {"dtype": "float32"},
        {"max_num_batched_tokens": 70},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"quantization": "int4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["qwen3", "qwen3.5 moe"])
def test_no_setting_changes_scores(case, config):
    heads = {"head_dim": 64} if "kv_cache_dtype" in config else {}  # matrix instructions of fp8 need 32 columns
    check_scores(engine_of(runner_of(case, heads, **config)), PROMPTS)


@pytest.mark.parametrize("case", ["qwen3 moe", "qwen3.5"])
def test_losses_and_guesses_change_no_scores(case):
    plain = answers(engine_of(runner_of(case)), sampled(PROMPTS))
    drafter = Recorded({f"sampled {i}": answer.tokens for i, answer in enumerate(plain)}, 0.7, 101)
    core = engine_of(runner_of(case), drafter)

    def between(core, step):
        if step in (3, 8):
            core.lose()
            core.recover(InProcess(runner_of(case)))

    check_scores(core, PROMPTS, between)
    assert core.scheduler.stats.accepted_draft_tokens > 0
    assert answers(core, sampled(PROMPTS)) == plain


@pytest.mark.parametrize("vocab", [101, 50257, 128256, 151936])
def test_drawn_log_probabilities_equal_a_plain_softmax(vocab):
    check_definition(varied(40), vocab, lambda rows, slots: rows.on_device(slots, GPU), vocab=vocab)
    check_twins(GPU, vocab=vocab)


def test_drawn_log_probabilities_never_wait_for_the_device():
    rows = Rows(varied(40), 1, vocab=50257)
    rows.on_device(np.arange(40), GPU)
    call = rows.prepared(np.arange(40), GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab", [50257, 128256])
def test_the_place_of_a_row_changes_no_bit(vocab):
    """A vocabulary of an odd size begins rows at any alignment."""
    logits = torch.randn(9, vocab, device=GPU) * 3
    ids = torch.arange(9, device=GPU) * 7
    whole = token_logprobs(logits, ids, 2)
    for row in range(9):
        alone = token_logprobs(logits[row : row + 1].clone(), ids[row : row + 1], 2)
        for one, many in zip(alone, whole, strict=True):
            assert torch.equal(one[0], many[row])


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe", "qwen3.5 moe", "lfm2 moe"])
def test_experts_are_the_best_of_the_router(case):
    check_experts(runner_of(case, routed_experts=True, dtype="float32"), PROMPTS[3])


def test_plain_mates_still_decode_by_graphs():
    runner = runner_of("mixtral", routed_experts=True)
    core = engine_of(runner)
    (with_experts,) = answers(core, sampled(PROMPTS[1:2], REPORTED))
    assert with_experts.experts is not None
    assert answers(core, sampled(PROMPTS[1:2]))[0].tokens == with_experts.tokens
    assert len(runner.steps.graph_runner) > 0
