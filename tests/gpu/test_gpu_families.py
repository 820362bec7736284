"""Every family's tiny model on a GPU: the Triton kernels against the torch path, with graphs and without."""

import pytest
import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.worker.sources import DummySource
from tests.support.models.family_cases import CASES, LIKE_OTHERS, SPECS, spec_of
from tests.support.models.family_steps import logits_of
from tests.support.models.runner_driver import Driver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

EACH_CASE = [*sorted(CASES.keys() - LIKE_OTHERS), *SPECS]


def steps_on_gpu(case: str, backend: str, dtype: str, **config) -> torch.Tensor:
    runner = build_runner(
        EngineConfig(
            device="cuda", kernel_backend=backend, dtype=dtype, num_kv_blocks=320, max_num_seqs=4, max_model_len=128,
            **config,
        ),
        DummySource(spec_of(case)),
    )  # fmt: skip
    assert bool(len(getattr(runner.steps, "graph_runner", ()))) == config.get("cuda_graphs", False)
    tokens = torch.randint(3, 101, (120,), generator=torch.Generator().manual_seed(5)).tolist()
    return logits_of(Driver(runner), tokens[:110], tokens[110:])


@pytest.mark.parametrize("case", EACH_CASE)
def test_fp32_logits_equal_those_of_torch(case):
    want = steps_on_gpu(case, "torch", "float32")
    for config in ({"cuda_graphs": True}, {"cuda_graphs": False}, {"cuda_graphs": True, "deterministic": True}):
        got = steps_on_gpu(case, "triton", "float32", **config)
        assert (got - want).abs().max() < 1e-4 * want.abs().max(), config


@pytest.mark.parametrize("case", EACH_CASE)
def test_bf16_logits_are_as_near_to_fp32_as_in_torch(case):
    """How much rounding costs depends on the family. With experts, only medians of rows count. Rounding may choose
    between two experts that are nearly as good, and then the row uses another one than in fp32."""
    exact = steps_on_gpu(case, "torch", "float32")

    def errors(logits: torch.Tensor) -> torch.Tensor:
        return (logits - exact).norm(dim=-1) / exact.norm(dim=-1)

    usual = errors(steps_on_gpu(case, "torch", "bfloat16"))
    for config in ({"cuda_graphs": True}, {"cuda_graphs": False}, {"cuda_graphs": True, "deterministic": True}):
        found = errors(steps_on_gpu(case, "triton", "bfloat16", **config))
        assert found.median() < 1.5 * usual.median(), config
        assert spec_of(case).experts or found.max() < 2 * usual.max(), config


@pytest.mark.parametrize(
    "case",
    [
        "mixtral",
        "qwen3 moe",
        "gemma2",
        "gemma3",
        "olmo3",
        "gpt2",
        "qwen3.5",
        "lfm2 moe",
        "sinks",
        "gemma4",
        "gemma4 moe",
        "deepseek v3",
        "glm 4.7 flash",
        "gpt-oss",
        "gpt-oss, mxfp4",
    ],
)
def test_bits_do_not_depend_on_batch_mates(case):
    """Deterministic: a row that is decoded beside three others, in a graph or not, has the same bits as alone."""
    runner = build_runner(
        EngineConfig(device="cuda", num_kv_blocks=320, max_num_seqs=4, max_model_len=128, deterministic=True),
        DummySource(spec_of(case)),
    )
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (100, 31, 60, 7)]
    alone = Driver(runner)
    alone.open(0, prompts[0])
    want = alone.prefill(0, prompts[0], cuts=(64,))
    beside = Driver(runner, seed=1)
    for slot, prompt in enumerate(prompts):
        beside.open(slot, prompt)
    beside.step(*((slot, 0, len(prompt) - 1, 0) for slot, prompt in enumerate(prompts)))
    beside.step(*((slot, len(prompt) - 1, 1, 1) for slot, prompt in enumerate(prompts)))
    assert torch.equal(beside.logits[0], want)
