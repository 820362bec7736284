"""Routing for grouped mixtures: tokens' choices, and the sum of their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_torch import ExpertBiases, Router
from runtime.kernels.linear.split_k import MAX_SPLIT_TILES
from runtime.kernels.magnitudes import larger
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

MOST_SINGLE = 32  # up to this many choices, each may have its own programs, even if some share an expert
_LANES = 32  # lanes per warp
_IN_WARP = constexpr(_LANES)
_LEAST = constexpr(-(1 << 31))  # lower than any number's key
# Arrays that `_route_token` reads. If they were aligned for Triton, a lane would load several neighbouring experts, and
# experts would be spread over warps.
_ROUTED_ARRAYS = ["logits_ptr", "choice_bias_ptr"]
_ROUND = 1024  # columns that a program adds at once


class Routing(NamedTuple):
    """How a kernel routes a token: one constant argument, `ROUTING: tl.constexpr`."""

    num_experts: int  # shared ones excluded
    top_k: int
    shared: int
    choices: int
    shared_gate: bool
    scores: str
    groups: int  # 1 if the choice is not limited to groups
    top_groups: int
    top2: bool  # a group's two best scores are added
    bias: bool
    expert_scales: bool
    normalized: bool
    sum_eps: float
    scale: float
    rounds: int  # experts per warp lane, a power of two
    lanes: int  # power of two, at least the choices and the groups


class RoutedExperts:
    """The launches that grouped mixtures share, for any weights."""

    spec: ExpertsSpec
    router: Router
    activation: Activation
    deterministic: bool
    biases: ExpertBiases = ExpertBiases()

    def _is_single(
        self, num_tokens: int, hidden: int, block_n: int, most: int = MOST_SINGLE, may_share: bool = False
    ) -> bool:
        """True if each of up to `most` choices gets its own programs, and the last product adds a token's results.

        Choices that share an expert read its weights twice. Without `may_share`, they must seldom do."""
        num_choices, num_counters = num_tokens * self.spec.choices, num_tokens * -(-hidden // block_n)
        few = may_share or num_choices <= max(self.spec.all_experts // 2, self.spec.choices)
        return few and num_choices <= most and num_counters <= MAX_SPLIT_TILES and not self.deterministic

    @property
    def _routing(self) -> Routing:
        """The constants of `_route_kernel`."""
        spec = self.spec
        return Routing(
            spec.num_experts, spec.top_k, spec.shared, spec.choices, spec.shared_gate, spec.scores,
            spec.groups if spec.has_groups else 1, spec.top_groups, spec.group_score == "top2",
            self.router.bias is not None, self.router.scales is not None, spec.normalized, spec.sum_eps, spec.scale,
            next_power_of_2(max(spec.num_experts, _LANES)) // _LANES,
            next_power_of_2(max(spec.choices, spec.groups, _LANES)),
        )  # fmt: skip

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int32 [num_tokens * choices], and their weights in float32."""
        (num_tokens, width), pdl = logits.shape, use_pdl(logits)
        bias, scales = self.router.bias, self.router.scales
        ids = torch.empty(num_tokens * self.spec.choices, dtype=torch.int32, device=logits.device)
        weights = torch.empty_like(ids, dtype=torch.float32)
        _route_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, logits if scales is None else scales, ids, weights, width,
            ROUTING=self._routing, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
        self.router.chose(ids)
        return ids, weights

    def _combine(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        (num_tokens, hidden), pdl = residual.shape, use_pdl(residual)
        _combine_kernel[(num_tokens, -(-hidden // _ROUND))](
            results, weights, residual, hidden,
            PER_TOKEN=self.spec.choices, BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


def stacked(experts: Iterable[Sequence[Sequence[torch.Tensor]]], num_experts: int) -> list[list[torch.Tensor]]:
    """The weight tensors of all experts, stacked to [num_experts, ...]; reads one expert at a time."""
    for expert, weights in enumerate(experts):
        if not expert:
            stacks = [[t.new_empty(num_experts, *t.shape) for t in weight] for weight in weights]
        for weight, stack in zip(weights, stacks, strict=True):
            for tensor, place in zip(weight, stack, strict=True):
                place[expert] = tensor
    return stacks


@jit(do_not_specialize_on_alignment=_ROUTED_ARRAYS)
def _route_kernel(
    logits_ptr,  # [num_tokens, width]
    choice_bias_ptr,
    expert_scales_ptr,
    ids_ptr,  # [num_tokens, choices] int32
    weights_ptr,  # [num_tokens, choices] fp32
    width,
    ROUTING: tl.constexpr,
    PDL: tl.constexpr,
):
    """`route_torch`, one program a token."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    ids, weights = _route_token(logits_ptr + token * width, choice_bias_ptr, expert_scales_ptr, ROUTING)
    lanes = tl.arange(0, ROUTING.lanes)[None, :]
    at, live = token * ROUTING.choices + lanes, lanes < ROUTING.choices
    tl.store(ids_ptr + at, ids, mask=live)
    tl.store(weights_ptr + at, weights, mask=live)


@jit
def _route_token(
    logits_ptr,  # the token's [num_experts], then the logit for the shared experts' weight with `shared_gate`
    bias_ptr,  # float32 [num_experts], with `bias`
    expert_scales_ptr,  # float32 [num_experts], with `expert_scales`
    ROUTING: tl.constexpr,
):
    """The experts of a token and their fp32 weights, both [1, lanes]; `route_torch` for one token.

    The program has one warp, with the experts spread over its lanes. Choice j is in lane j, and the first of equal
    experts wins."""
    NUM_EXPERTS: tl.constexpr = ROUTING.num_experts
    TOP_K: tl.constexpr = ROUTING.top_k
    experts = tl.arange(0, ROUTING.rounds)[:, None] * _IN_WARP + tl.arange(0, _IN_WARP)[None, :]
    lanes = tl.arange(0, ROUTING.lanes)[None, :]
    real = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + experts, mask=real, other=float("-inf")).to(tl.float32)
    most = tl.reduce(tl.reduce(logits, 0, larger, keep_dims=True), 1, larger, keep_dims=True)
    scores = _scores(logits, most, ROUTING)
    total = tl.sum(tl.sum(scores, 0, keep_dims=True), 1, keep_dims=True)
    preferences = logits if ROUTING.scores == "softmax_of_chosen" else scores
    if ROUTING.bias:
        if ROUTING.scores == "softmax":
            preferences = scores / total
        preferences += tl.load(bias_ptr + experts, mask=real, other=0.0)
    keys = tl.where(real, _ordered((preferences + 0.0).to(tl.int32, bitcast=True)), _LEAST)  # removes -0.0
    if ROUTING.groups > 1:
        keys = _of_best_groups(keys, experts, lanes, ROUTING)
    ids = NUM_EXPERTS + lanes - TOP_K
    for i in tl.static_range(TOP_K):
        expert = _first_of_largest(keys, experts, NUM_EXPERTS - 1)
        ids = tl.where(lanes == i, expert, ids)
        keys = tl.where(experts == expert, _LEAST, keys)
    is_routed = lanes < TOP_K
    logits = tl.load(logits_ptr + ids, mask=is_routed, other=float("-inf")).to(tl.float32)
    weights = _scores(logits, most, ROUTING)
    if ROUTING.scores == "softmax" and (ROUTING.bias or not ROUTING.normalized):
        weights = weights / total
    if ROUTING.scores == "softmax_of_chosen":
        weights = weights / tl.sum(weights, 1, keep_dims=True)
    if ROUTING.normalized:
        weights = weights / (tl.sum(weights, 1, keep_dims=True) + ROUTING.sum_eps)
    if ROUTING.scale != 1.0:
        weights *= ROUTING.scale
    if ROUTING.expert_scales:
        weights *= tl.load(expert_scales_ptr + ids, mask=is_routed, other=1.0)
    if ROUTING.shared:
        gate = 1.0
        if ROUTING.shared_gate:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + NUM_EXPERTS).to(tl.float32)))
        weights = tl.where(is_routed, weights, gate)
    return ids, weights


@jit
def _scores(logits, most, ROUTING: tl.constexpr):
    """The scores of logits with this maximum, before a softmax's division. All are NaN if one logit is."""
    if ROUTING.scores == "sigmoid":
        scores = tl.where(most == most, 1.0 / (1.0 + tl.exp(-logits)), most)
    else:
        scores = tl.exp(logits - most)
    return scores


@jit
def _ordered(bits):
    """The bits of fp32 numbers as int32 in the same order, which warps compare in one instruction; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _first_of_largest(keys, indices, last):
    """The smallest index of the largest keys, at most `last`, for each warp."""
    largest = tl.max(tl.max(keys, 0, keep_dims=True), 1, keep_dims=True)
    first = tl.where(keys == largest, indices, last)
    return tl.min(tl.min(first, 0, keep_dims=True), 1, keep_dims=True)


@jit
def _of_best_groups(keys, experts, lanes, ROUTING: tl.constexpr):
    """The best groups' keys, and _LEAST for the others; the first of equal groups wins."""
    NUM_EXPERTS: tl.constexpr = ROUTING.num_experts
    GROUPS: tl.constexpr = ROUTING.groups
    TOP_GROUPS: tl.constexpr = ROUTING.top_groups
    group_of = experts // (NUM_EXPERTS // GROUPS)
    values = tl.full(lanes.shape, _LEAST, tl.int32)  # group values
    for group in tl.static_range(GROUPS):
        own = tl.where(group_of == group, keys, _LEAST)
        value = tl.max(tl.max(own, 0, keep_dims=True), 1, keep_dims=True)
        if ROUTING.top2:
            first = _first_of_largest(own, experts, NUM_EXPERTS - 1)
            own = tl.where(experts == first, _LEAST, own)
            second = tl.max(tl.max(own, 0, keep_dims=True), 1, keep_dims=True)
            both = _ordered(value).to(tl.float32, bitcast=True) + _ordered(second).to(tl.float32, bitcast=True)
            value = _ordered(both.to(tl.int32, bitcast=True))
        values = tl.where(lanes == group, value, values)
    kept = tl.full(experts.shape, _LEAST, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        group = _first_of_largest(values, lanes, GROUPS - 1)
        kept = tl.where(group_of == group, keys, kept)
        values = tl.where(lanes == group, _LEAST, values)
    return kept


@jit
def add_results(
    results_ptr,  # float32 [num_choices, N]
    mixture_ptr,  # float32 [num_choices]: the experts' weights
    residual_ptr,  # [num_tokens, N], added to
    counter_ptr,  # int32 zero, one for each token and column program
    token,
    cols,
    N,
    PER_TOKEN: tl.constexpr,
):
    """With one choice a program: a token's last program that stores these columns adds its results."""
    tl.debug_barrier()  # this program's stores come before its arrival
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == PER_TOKEN - 1:
        tl.store(counter_ptr, 0)
        total = tl.zeros(cols.shape, tl.float32)
        for i in tl.static_range(PER_TOKEN):
            choice = token * PER_TOKEN + i
            result = tl.load(results_ptr + choice * N + cols, mask=cols < N, other=0.0, cache_modifier=".cg")
            total += result.to(tl.float32) * tl.load(mixture_ptr + choice)
        at = residual_ptr + token * N + cols
        total += tl.load(at, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=cols < N)


@jit
def _combine_kernel(
    results_ptr,  # [num_tokens, PER_TOKEN, hidden]
    weights_ptr,  # [num_tokens, PER_TOKEN] fp32
    residual_ptr,  # [num_tokens, hidden] contiguous, added to
    hidden,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PER_TOKEN):
        choice = token * PER_TOKEN + i
        result = tl.load(results_ptr + choice * hidden + cols, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + choice)
    at = residual_ptr + token * hidden + cols
    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=inside)
