"""Steps of the families with kernels of their own: their logits equal the torch path's."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels.experts.moe_torch import ExpertBiases, Experts, Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.kernels.triton_engine import replayed_graphs
from tests.support.models.family_cases import spec_of, yarn
from tests.support.models.family_steps import logits_of
from tests.support.models.runner_driver import Driver
from tests.support.models.specs import changed

pytestmark = pytest.mark.usefixtures("wide_products")

GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
}
KERNEL_CASES = {  # families with kernels of their own -> settings that make them shorter
    "mixtral": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 1, "sliding_window": 7},
    "gemma3": {"num_hidden_layers": 2, "sliding_window": 7},
    "gemma4": {**GEMMA4, "num_kv_shared_layers": 2},
    "gemma4, keys as values": GEMMA4,
    "gemma4 moe": {**GEMMA4, "num_hidden_layers": 2},
    "phi4-mini": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "ministral3": {"num_hidden_layers": 1, **yarn(9, llama_4_scaling_beta=0.3)},
    "olmo3": {"num_hidden_layers": 1},
    "deepseek v3": {"num_hidden_layers": 2},
    "glm 4.7 flash": {"num_hidden_layers": 2},
    "gpt-oss": {"num_hidden_layers": 2, "sliding_window": 7},
    "gpt-oss, mxfp4": {"num_hidden_layers": 1},
    "glm4 moe": {"num_hidden_layers": 2},
    "granite moe": {"num_hidden_layers": 1},
    "sinks": {"sliding_window": 7},
}


def logits(spec: DecoderSpec, backend: str, deterministic: bool, graphs: bool, **config: str) -> torch.Tensor:
    config = EngineConfig(
        device="cpu", kernel_backend=backend, dtype="float32", num_kv_blocks=40, block_size=8, max_num_seqs=2,
        max_model_len=40, num_threads=1, deterministic=deterministic, **config,
    )  # fmt: skip
    with mock.patch.object(ModelRunner, "_warm_up"):
        runner = build_runner(config, DummySource(spec))
    driver = Driver(runner)
    if graphs:
        replayed_graphs(runner.steps, (1, 2))
    tokens = torch.randint(0, spec.vocab_size, (34,), generator=torch.Generator().manual_seed(5)).tolist()
    return logits_of(driver, tokens[:24], tokens[24:])


@pytest.mark.parametrize(
    ("num_tokens", "spec", "dtype", "favoured"),
    [
        (1, ExpertsSpec(8, 2, False), torch.float32, 8),
        (90, ExpertsSpec(5, 2, True), torch.float32, 3),
        (150, ExpertsSpec(3, 2, True), torch.float16, 3),
        (7, ExpertsSpec(33, 5, False), torch.float16, 5),
        (40, ExpertsSpec(4, 1, True, shared=1, shared_gate=True), torch.float32, 2),
        (9, ExpertsSpec(6, 3, False, shared=2, scores="sigmoid", scale=2.5), torch.float32, 0),
    ],
)
@pytest.mark.parametrize(("activation", "has_biases"), [("gelu_tanh", False), ("swiglu_clamped", True)])
def test_experts(
    num_tokens: int, spec: ExpertsSpec, dtype: torch.dtype, favoured: int, activation: str, has_biases: bool
):
    """The kernels against the plain form; all tokens prefer the first `favoured` experts, so that the others idle."""
    torch.manual_seed(0)
    hidden, ffn, num_experts = 24, 20, spec.all_experts
    weights = [(torch.randn(2 * ffn, hidden) / 5, torch.randn(hidden, ffn) / 5) for _ in range(num_experts)]
    weights = [(gate_up.to(dtype), down.to(dtype)) for gate_up, down in weights]
    base, norm = torch.randn(num_tokens, hidden).to(dtype), torch.rand(hidden).to(dtype)
    router = torch.randn(num_experts, hidden).to(dtype)
    bias = torch.where(torch.arange(num_experts) < favoured, 50.0, 0.0).to(dtype)
    biases = ExpertBiases()
    if has_biases:
        biases = ExpertBiases(*(torch.randn(num_experts, size).to(dtype) for size in (2 * ffn, hidden)))
    activate = partial(gated_activation_torch, activation=activation)
    route = Router(Linear(partial(F.linear, weight=router, bias=bias), rms_norm_torch, activate))
    plain = Experts(spec, route, weights, lambda weight: partial(F.linear, weight=weight), activate)
    plain.biases = biases
    want = base.clone()
    plain.add_to(want, norm, 1e-5)
    for deterministic in (False, True):
        got = base.clone()
        mixture = GroupedExperts(spec, route, weights, activation, deterministic)
        mixture.biases = biases
        mixture.add_to(got, norm, 1e-5)
        error = ((got - want).abs().max() / (want - base).abs().max()).item()
        assert error < {torch.float32: 1e-6, torch.float16: 5e-3}[dtype]


@pytest.mark.parametrize("case", KERNEL_CASES)
@pytest.mark.thorough
def test_steps(case: str):
    spec = spec_of(case, **KERNEL_CASES[case])
    deterministic = bool(list(KERNEL_CASES).index(case) % 2)
    want = logits(spec, "torch", False, graphs=False)
    got = logits(spec, "triton", deterministic, graphs=not deterministic)
    assert ((got - want).abs().max() / want.abs().max()).item() < 1e-5


@pytest.mark.parametrize("case", ["gemma2", "glm 4.7 flash"])
def test_every_backend_hides_position_0(case: str):
    """The first token sees nothing there, and the padding of graphs is like it."""
    spec = spec_of(case, **KERNEL_CASES[case])
    plain, want = (logits(changed(spec, first_key=key), "torch", False, False) for key in (0, 1))
    assert (want - plain).norm() > 1e-3 * plain.norm()
    for backend, graphs in (("triton", True), ("llvm", False)):
        got = logits(changed(spec, first_key=1), backend, False, graphs)
        assert ((got - want).abs().max() / want.abs().max()).item() < 1e-4, backend


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_quantized_keys_of_two_shapes(kind: str):
    spec = spec_of("gemma4", **KERNEL_CASES["gemma4"])
    plain, want = (logits(spec, "torch", False, False, kv_cache_dtype=each) for each in ("none", kind))
    usual = (want - plain).norm()
    for backend, deterministic in (("triton", False), ("triton", True), ("llvm", False)):
        got = logits(spec, backend, deterministic, False, kv_cache_dtype=kind)
        assert (got - want).norm() < 0.05 * usual, backend
