"""ExpertsSpec: a mixture of experts as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.base.types import CallboardError


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of feed-forward layers in place of one; `ffn_size` is one expert's size.

    Every token takes the shared experts, too. They are the last ones, with ids from `num_experts`."""

    num_experts: int  # experts but the shared ones
    top_k: int  # experts chosen per token
    normalized: bool  # a token's top_k weights are scaled to sum to one
    shared: int = 0
    # The shared experts' weight is the sigmoid of one more router row; otherwise it is 1.
    shared_gate: bool = False
    # How logits become scores. softmax_of_chosen: the top_k are the largest logits, and the softmax is over these.
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    choice_bias: bool = False  # a bias is added to the scores that choose the top_k, not to their weights
    sum_eps: float = 0.0  # added, if normalized, to the sum that divides the weights
    scale: float = 1.0  # factor for the top_k weights
    expert_scales: bool = False  # weights are multiplied by their expert's factor
    own_norm: bool = False  # the router has its own norm, times hidden_size ** -0.5, not the experts' norm
    router_bias: bool = False  # the router's logits have a bias
    float32_logits: bool = False  # the router's logits are not rounded to the compute dtype
    groups: int = 1  # groups of neighbouring experts
    top_groups: int = 1  # the best groups, to which the choice is limited
    group_score: Literal["max", "top2"] = "max"  # a group's best score with the choice bias, or its two best added

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise CallboardError(
                f"The model has {self.num_experts} experts, of which a token takes {self.top_k}; it must take one at "
                "least and all at most."
            )
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise CallboardError(
                f"The model has {self.groups} groups of its {self.num_experts} experts, of which a token takes "
                f"{self.top_groups}; groups must be of equal size, and a token takes one at least and all at most."
            )
        size = self.num_experts // self.groups
        if self.has_groups and (self.top_k > self.top_groups * size or (self.group_score == "top2" and size < 2)):
            raise CallboardError(
                f"The model has groups of {size} experts, and a token takes {self.top_k} experts of {self.top_groups} "
                "groups; these groups must have enough experts, and at least two each."
            )

    @property
    def has_groups(self) -> bool:
        """True if the choice is limited to some groups of experts."""
        return self.top_groups < self.groups

    @property
    def all_experts(self) -> int:
        """The number of experts with the shared ones."""
        return self.num_experts + self.shared

    @property
    def choices(self) -> int:
        """The number of experts that a token takes with the shared ones."""
        return self.top_k + self.shared


def chooses_experts(parameter: str) -> bool:
    """Return True for the weights of a router, which stay dense."""
    return ".router." in parameter or ".shared_gate." in parameter


def of_router(prefix: str, experts: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that choose a layer's experts."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}router.weight": (experts.num_experts, hidden)}
    if experts.router_bias:
        shapes[f"{prefix}router.bias"] = (experts.num_experts,)
    if experts.shared_gate:
        shapes[f"{prefix}shared_gate.weight"] = (1, hidden)
    if experts.choice_bias:
        shapes[f"{prefix}choice_bias"] = (experts.num_experts,)
    if experts.own_norm:
        shapes[f"{prefix}router_norm"] = (hidden,)
    if experts.expert_scales:
        shapes[f"{prefix}expert_scales"] = (experts.num_experts,)
    return shapes
