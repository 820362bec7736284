"""Mixtures of dense experts on a GPU: few choices are near their float32 values, also in a chain of captured layers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_few_w16a16 import summed_columns
from runtime.kernels.experts.moe_torch import ExpertBiases, Experts, Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

CASES = {  # spec, hidden, ffn
    "glm-4.7-flash": (ExpertsSpec(64, 4, True, 1, scores="sigmoid", choice_bias=True, float32_logits=True), 2048, 1536),
    "qwen3-30b-a3b": (ExpertsSpec(128, 8, True), 2048, 768),
    "gpt-oss-20b": (ExpertsSpec(32, 4, False, scores="softmax_of_chosen", router_bias=True), 2880, 2880),
    "two shared, odd sizes": (ExpertsSpec(40, 3, True, 2, True, groups=8, top_groups=4), 1000, 328),
}


def mixtures(spec: ExpertsSpec, hidden: int, ffn: int) -> tuple[GroupedExperts, Experts]:
    """Kernels with bfloat16 weights, and their twin in float32."""
    all_experts, width = spec.all_experts, spec.num_experts + spec.shared_gate
    activation = "swiglu_clamped" if spec.router_bias else "silu"
    with torch.device("cuda"):
        sizes = (2 * ffn, hidden), (hidden, ffn)
        pairs = [tuple(torch.randn(s).bfloat16() / s[1] ** 0.5 for s in sizes) for _ in range(all_experts)]
        router = torch.randn(width, hidden).bfloat16() / hidden**0.5
        router_bias = torch.randn(width).bfloat16() if spec.router_bias else None
        choice_bias = torch.randn(spec.num_experts) / 4 if spec.choice_bias else None
        biases = ExpertBiases(torch.randn(all_experts, 2 * ffn).bfloat16(), torch.randn(all_experts, hidden).bfloat16())
    own = Router(FusedLinear(router, router_bias, activation, False), choice_bias, spec.float32_logits)
    kernels = GroupedExperts(spec, own, pairs, activation, False)
    activate = partial(gated_activation_torch, activation=activation)
    bias = None if router_bias is None else router_bias.float()
    linear = Linear(partial(F.linear, weight=router.float(), bias=bias), rms_norm_torch, activate)
    twin = Experts(
        spec, Router(linear, choice_bias), [tuple(w.float() for w in pair) for pair in pairs],
        lambda w: partial(F.linear, weight=w), activate,
    )  # fmt: skip
    if spec.router_bias:
        kernels.biases, twin.biases = biases, ExpertBiases(*(part.float() for part in biases))
    return kernels, twin


@pytest.mark.parametrize("case", CASES)
def test_few_choices_are_near_their_float32_values(case: str):
    torch.manual_seed(0)
    spec, hidden, ffn = CASES[case]
    kernels, twin = mixtures(spec, hidden, ffn)
    norm = torch.rand(hidden, device="cuda").bfloat16()
    for num_rows in (1, 2, 3, 4):
        if not kernels._is_single(num_rows, hidden, summed_columns()):
            continue
        x = torch.randn(num_rows, hidden, device="cuda").bfloat16()
        got, want, ids = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float32), []
        for layer, out, inputs in ((kernels, got, x), (twin, want, x.float())):
            layer.router.record = []
            layer.add_to(inputs, norm.to(inputs.dtype), 1e-5, out)
            ids.append(layer.router.record[0].view(num_rows, -1).long())
        same = (ids[0].sort().values == ids[1].sort().values).all(1)  # others are nearly as good
        far = (got.float() - want).norm(dim=1) / want.norm(dim=1)
        assert not same.any() or far[same].max() < 0.02, num_rows


def test_captured_layers_repeat_their_bits():
    """Launches overlap, so each replay would see another result if one did not wait for the launch before it."""
    torch.manual_seed(0)
    spec, hidden, ffn = CASES["glm-4.7-flash"]
    kernels, _ = mixtures(spec, hidden, ffn)
    norm, start = torch.rand(hidden, device="cuda").bfloat16(), torch.randn(1, hidden, device="cuda").bfloat16()
    alone = start.clone()
    for _ in range(8):
        torch.cuda.synchronize()
        kernels.add_to(alone, norm, 1e-5)
    x, graph = start.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            kernels.add_to(x, norm, 1e-5)
    for _ in range(50):
        x.copy_(start)
        graph.replay()
        assert torch.equal(x, alone)
