"""Scores and experts by the Triton kernels: as sampled, and as the router's logits have them."""

from dataclasses import replace
from unittest import mock

import pytest

from runtime.worker.runner import ModelRunner
from tests.support.models.family_cases import spec_of
from tests.support.models.scored_engine import (
    REPORTED,
    SAMPLED,
    check_experts,
    check_scores,
    engine_of,
    family_runner,
    prompts_of,
)

pytestmark = pytest.mark.usefixtures("wide_products")

SHORT = {"num_hidden_layers": 1}
FEW = {"max_tokens": 3}


def runner_of(case: str, changes: dict, **config) -> ModelRunner:
    limits = {"max_model_len": 96, "max_num_seqs": 2, "num_kv_blocks": 20, "dtype": "float32"}
    with mock.patch.object(ModelRunner, "_warm_up"):
        return family_runner(case, changes, kernel_backend="triton", **limits | config)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("deepseek v3", {"num_hidden_layers": 2}),
        ("llama", SHORT),
        ("mistral, window", SHORT | {"sliding_window": 5}),
        ("gemma3", {"sliding_window": 5}),
        ("sinks", {"sliding_window": 5}),
        ("gpt-oss, mxfp4", {"num_hidden_layers": 2, "sliding_window": 5}),
        ("qwen3.5", {}),
        ("qwen3-next", {}),
        ("lfm2", {}),
        ("glm4 moe", {"num_hidden_layers": 2}),
    ],
)
def test_scores_equal_what_was_sampled(case: str, changes: dict):
    check_scores(engine_of(runner_of(case, changes)), prompts_of(101, (1, 9)), params=replace(SAMPLED, **FEW))


@pytest.mark.parametrize("case", ["mixtral", "qwen3 moe", "glm4 moe", "qwen2 moe", "granite moe", "gpt-oss"])
def test_experts_are_the_best_of_the_router(case: str):
    num_dense = sum(layer.ffn.experts is None for layer in spec_of(case).layers)
    runner = runner_of(case, {"num_hidden_layers": 1 + num_dense}, routed_experts=True)
    check_experts(runner, prompts_of(101, (9,))[0], replace(REPORTED, **FEW))
