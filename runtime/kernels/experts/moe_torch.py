"""Mixtures of experts with any weights: one expert after another, on the tokens that chose it.

This is the torch twin of the grouped kernels, and the mixture of a CPU. The results of a token's experts are added in
the order of its preference, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.exact_functions import sigmoid
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm, Operands, Product

W = TypeVar("W")


class ExpertLayer(Protocol):
    """A mixture of experts with its weights."""

    @property
    def router(self) -> Router: ...

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """Add the mixture of norm(residual) to `out`, or to the residual without it; both [num_tokens, hidden]."""


class ExpertBiases(NamedTuple):
    """The biases of all experts' maps, [num_experts, out]; None for maps without one.

    Ranks add up their results of down, so only the first one has its bias."""

    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None


class Mixture(ExpertLayer, Protocol):
    """A mixture with the weights of all experts in one format."""

    biases: ExpertBiases


def stacked_mixture(
    kind: Callable[[ExpertsSpec, Router, Iterable[tuple[Any, Any]]], Mixture],
    spec: ExpertsSpec,
    router: Router,
    experts: Iterable[tuple[Operands, Operands]],
) -> Mixture:
    """A mixture of this kind, which takes the weights of one expert after another, and all biases together."""
    biases = list[tuple[torch.Tensor | None, ...]]()

    def weights() -> Iterator[tuple[Any, Any]]:
        for gate_up, down in experts:
            biases.append((gate_up.bias, down.bias))
            yield gate_up.weights[0], down.weights[0]

    mixture = kind(spec, router, weights())
    mixture.biases = ExpertBiases(*map(_stacked, zip(*biases, strict=True)))
    return mixture


def _stacked(biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """[num_experts, out]; None without biases."""
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if found else None


@dataclass(slots=True)
class Router:
    """The choice of experts."""

    # The norm before the mixture, and the logits of the experts; then that of the shared experts with `shared_gate`.
    logits: Linear
    bias: torch.Tensor | None = None  # float32 [num_experts] with `choice_bias`
    is_wide: bool = False  # with `float32_logits`
    norm: torch.Tensor | None = None  # float32 [hidden] with `own_norm`
    scales: torch.Tensor | None = None  # float32 [num_experts] with `expert_scales`
    # Experts of each token, int32 or int64, [num_tokens * choices] or [num_tokens, choices], one entry a forward pass.
    # None unless a step reports them (features/routed_experts.py).
    record: list[torch.Tensor] | None = None

    def logits_of(self, residual: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
        """The logits of hidden states `residual`. The experts read their norm, x."""
        if self.norm is not None:
            return self.normed_logits(residual, self.norm, eps)
        return self.logits.in_float32(x) if self.is_wide else self.logits.product(x)

    def normed_logits(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`logits_of`, with the norm computed here."""
        linear, weight = self.logits, norm_weight if self.norm is None else self.norm
        return (linear.logits if self.is_wide else linear.normed)(residual, weight, eps)

    def chose(self, ids: torch.Tensor) -> None:
        """The tokens of a forward pass have these experts."""
        if self.record is not None:
            self.record.append(ids)


class Experts:
    """One expert after another, for any weights that `product` takes. Products may add their biases themselves.

    An expert has gate and up as one weight [2 * ffn, hidden], and down [hidden, ffn]."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[W, W]],
        product: Callable[[W], Product],
        activate: Activate,
    ) -> None:
        self.spec, self.router, self.activate = spec, router, activate
        self.biases = ExpertBiases()
        self.experts = [(product(gate_up), product(down)) for gate_up, down in weights]

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        total = self.mixture(residual, norm_weight, eps)
        (residual if out is None else out).add_(total.to(residual.dtype))

    def mixture(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The mixture of norm(residual) in float32, as wide as the product with down."""
        x = self.router.logits.norm(residual, norm_weight, eps)
        ids, weights = route_torch(
            self.router.logits_of(residual, x, eps), self.spec, self.router.bias, self.router.scales
        )
        self.router.chose(ids)
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.spec.all_experts).tolist()
        results = x.new_empty(0)
        of_gate_up, of_down = (None if all_ is None else all_.unbind() for all_ in self.biases)
        for expert, ((gate_up, down), choices) in enumerate(zip(self.experts, order.split(counts), strict=True)):
            if len(choices):
                y = gate_up(x[choices // self.spec.choices])
                y = down(self.activate(y if of_gate_up is None else y + of_gate_up[expert]))
                y = y if of_down is None else y + of_down[expert]
                results = results if len(results) else y.new_empty(len(order), y.shape[1])
                results[choices] = y
        ordered = results.view(*ids.shape, -1).unbind(1)
        # Products and sums are separate operations, so that each is rounded exactly.
        return reduce(torch.add, (y * w[:, None] for y, w in zip(ordered, weights.unbind(1), strict=True)))


class SharedBeside:
    """A mixture with shared experts in another weight format, which run one after another after the others."""

    def __init__(
        self,
        routed: ExpertLayer,  # the other experts
        gate: Linear | None,  # of the weight of the shared experts
        shared: Sequence[tuple[Product, Product]],
        norm: Norm,
        activate: Activate,
    ) -> None:
        self.routed, self.gate, self.shared, self.norm, self.activate = routed, gate, shared, norm, activate

    @property
    def router(self) -> Router:
        return self.routed.router

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        x = self.norm(residual, norm_weight, eps)
        total = reduce(torch.add, (down(self.activate(gate_up(x))).float() for gate_up, down in self.shared))
        if self.gate is not None:
            total *= sigmoid(self.gate.product(x).float())
        self.routed.add_to(residual, norm_weight, eps, out)
        (residual if out is None else out).add_(total.to(residual.dtype))


def route_torch(
    logits: torch.Tensor,
    spec: ExpertsSpec,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [num_tokens, at least num_experts] -> ids and fp32 weights [num_tokens, choices], best first.

    The shared experts are the last choices. The logit of their weight follows the experts' logits."""
    logits = logits.float()
    scores = logits[:, : spec.num_experts]
    if spec.scores != "softmax_of_chosen":
        scores = scores.softmax(-1) if spec.scores == "softmax" else sigmoid(scores)
    preferences = scores if bias is None else scores + bias
    if spec.has_groups:
        preferences = _of_best_groups(preferences, spec)
    ids = preferences.topk(spec.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if spec.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if spec.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps)
    if spec.scale != 1.0:
        weights = weights * spec.scale
    if expert_scales is not None:
        weights = weights * expert_scales[ids]
    if not spec.shared:
        return ids, weights
    shared = torch.arange(spec.num_experts, spec.all_experts, device=ids.device).expand(len(ids), -1)
    gate = sigmoid(logits[:, spec.num_experts, None]) if spec.shared_gate else weights.new_ones(len(ids), 1)
    return torch.cat((ids, shared), 1), torch.cat((weights, gate.expand_as(shared)), 1)


def _of_best_groups(preferences: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """The preferences of a token's best groups, and -inf for the experts of the others."""
    by_group = preferences.unflatten(-1, (spec.groups, -1))
    best = by_group.amax(-1) if spec.group_score == "max" else by_group.topk(2, -1).values.sum(-1)
    others = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.top_groups, -1).indices, False)
    kept: torch.Tensor = by_group.masked_fill(others[..., None], float("-inf"))
    return kept.flatten(-2)
