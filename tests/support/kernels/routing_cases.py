"""Random routers of mixtures, and logits with which all forms choose the same experts."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.linear.linear_torch import Linear


@st.composite
def specs(draw: st.DrawFn) -> ExpertsSpec:
    groups = draw(st.sampled_from((1, 1, 3, 4)))
    group_score = draw(st.sampled_from(("max", "top2")))
    size = draw(st.integers(2, 12)) if groups > 1 else draw(st.integers(1, 40))
    num_experts, top_groups = groups * size, draw(st.integers(1, groups))
    shared = draw(st.integers(0, 2))
    return ExpertsSpec(
        num_experts,
        draw(st.integers(1, min(top_groups * size, 10))),
        draw(st.booleans()),
        shared,
        shared > 0 and draw(st.booleans()),
        draw(st.sampled_from(("softmax", "sigmoid", "softmax_of_chosen"))),
        draw(st.booleans()),
        draw(st.sampled_from((0.0, 1e-6))),
        draw(st.sampled_from((1.0, 2.5))),
        expert_scales=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        group_score=group_score,
    )


def distinct_logits(spec: ExpertsSpec, num_tokens: int, padding: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct logits. Sums of two are distinct, too."""
    width = spec.num_experts + spec.shared_gate + padding
    logits = torch.stack([torch.randperm(width, generator=generator) for _ in range(num_tokens)])
    return logits.float() ** 1.1 / 8 - 2


def router_of(spec: ExpertsSpec, logits: Linear, generator: torch.Generator) -> Router:
    """A router with a random bias and random scales, if its spec has them."""
    bias = torch.randperm(spec.num_experts, generator=generator) / 3.7 - 4 if spec.choice_bias else None
    scales = torch.rand(spec.num_experts, generator=generator) + 0.5 if spec.expert_scales else None
    return Router(logits, bias, scales=scales)
