"""Routing of grouped mixtures: the choices of tokens, sorted by expert on the device, and the sum of their results.

A step can be a CUDA graph, so a launch must not depend on how many tokens chose an expert. Tokens are sorted by expert
on the device, and one product covers all experts with a grid for the worst case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from runtime.kernels.experts.moe_torch import ExpertBiases, Router
from runtime.kernels.linear.split_k import MAX_SPLIT_TILES
from runtime.kernels.magnitudes import larger
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl
from runtime.spec.decoder_spec import ExpertsSpec

MOST_SINGLE = 32  # up to as many choices, each has its own programs, also if some share an expert
_ROUND = 1024  # choices that a program sorts at once, or columns that it adds at once


class Tile(NamedTuple):
    """How a product over all experts is cut, and its launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class RoutedExperts:
    """The launches that grouped mixtures share, for any weights."""

    spec: ExpertsSpec
    router: Router
    activation: Activation
    deterministic: bool
    biases: ExpertBiases = ExpertBiases()

    def _is_single(self, num_tokens: int, hidden: int, tile: Tile) -> bool:
        """True if each choice gets its own programs, and the last product adds the results of a token."""
        num_counters = num_tokens * -(-hidden // tile.block_n)
        few = num_tokens * self.spec.choices <= MOST_SINGLE and num_counters <= MAX_SPLIT_TILES
        return few and not self.deterministic

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int32 [num_tokens * choices], and their weights in float32."""
        spec, bias, (num_tokens, width), pdl = self.spec, self.router.bias, logits.shape, use_pdl(logits)
        expert_scales = self.router.scales
        ids = torch.empty(num_tokens * spec.choices, dtype=torch.int32, device=logits.device)
        weights = torch.empty(num_tokens * spec.choices, dtype=torch.float32, device=logits.device)
        _route_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, logits if expert_scales is None else expert_scales, ids, weights,
            spec.num_experts, width,
            TOP_K=spec.top_k, SHARED=spec.shared, SHARED_GATE=spec.shared_gate, SCORES=spec.scores,
            GROUPS=spec.groups if spec.has_groups else 1, TOP_GROUPS=spec.top_groups, TOP2=spec.group_score == "top2",
            BIAS=bias is not None, EXPERT_SCALES=expert_scales is not None, NORMALIZED=spec.normalized,
            SUM_EPS=spec.sum_eps, SCALE=spec.scale,
            EXPERTS=next_power_of_2(spec.num_experts), LANES=next_power_of_2(spec.choices),
            PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
        self.router.chose(ids)
        return ids, weights

    def _sort(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The start of each expert's choices, with the total at the end; and the choices sorted by expert."""
        num_experts, pdl = self.spec.all_experts, use_pdl(ids)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
        order = torch.empty_like(ids)
        _sort_kernel[(num_experts,)](ids, starts, order, len(ids), BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl)
        return starts, order

    def _combine(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        (num_tokens, hidden), pdl = residual.shape, use_pdl(residual)
        _combine_kernel[(num_tokens, -(-hidden // _ROUND))](
            results, weights, residual, hidden,
            PER_TOKEN=self.spec.choices, BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


def worst_case_tiles(num_choices: int, num_experts: int, tile: Tile) -> int:
    """The most tiles that a number of choices can need, however they are spread over the experts."""
    return (num_choices + min(num_experts, num_choices) * (tile.block_m - 1)) // tile.block_m


def stacked(experts: Iterable[Sequence[Sequence[torch.Tensor]]], num_experts: int) -> list[list[torch.Tensor]]:
    """The weight tensors of all experts, stacked to [num_experts, ...]; reads one expert at a time."""
    for expert, weights in enumerate(experts):
        if not expert:
            stacks = [[t.new_empty(num_experts, *t.shape) for t in weight] for weight in weights]
        for weight, stack in zip(weights, stacks, strict=True):
            for tensor, place in zip(weight, stack, strict=True):
                place[expert] = tensor
    return stacks


@jit
def _route_kernel(
    logits_ptr,  # [num_tokens, width]
    bias_ptr,  # float32 [num_experts], with BIAS
    expert_scales_ptr,  # float32 [num_experts], with EXPERT_SCALES
    ids_ptr,  # [num_tokens, TOP_K + SHARED] int32
    weights_ptr,  # [num_tokens, TOP_K + SHARED] fp32
    num_experts,
    width,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    SCORES: tl.constexpr,
    GROUPS: tl.constexpr,  # 1 if the choice is not limited to groups
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,  # the two best scores of a group are added
    BIAS: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SUM_EPS: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    LANES: tl.constexpr,  # power of two, at least TOP_K + SHARED
    PDL: tl.constexpr,
):
    """`route_torch`, one program a token; the first of equal experts wins."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, LANES)
    logits = tl.load(logits_ptr + token * width + experts, mask=experts < num_experts, other=float("-inf"))
    logits = logits.to(tl.float32)
    most = tl.reduce(logits, 0, larger)
    scores = _scores(logits, most, SCORES)
    total = tl.sum(scores, axis=0)
    preferences = logits if SCORES == "softmax_of_chosen" else scores
    if BIAS:
        if SCORES == "softmax":
            scores = scores / total
        bias = tl.load(bias_ptr + experts, mask=experts < num_experts, other=float("-inf"))
        preferences = (logits if SCORES == "softmax_of_chosen" else scores) + bias
    if GROUPS > 1:
        preferences = _of_best_groups(preferences, experts, num_experts // GROUPS, GROUPS, TOP_GROUPS, TOP2)
    ids = num_experts + lanes - TOP_K
    chosen = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(preferences, axis=0)
        # If a NaN makes all comparisons false, use the last expert: the row is lost, but must not fault.
        expert = tl.min(tl.where(preferences == best, experts, num_experts - 1), axis=0)
        ids = tl.where(lanes == i, expert, ids)
        if BIAS or SCORES == "softmax_of_chosen":
            best = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        chosen = tl.where(lanes == i, best, chosen)
        preferences = tl.where(experts == expert, float("-inf"), preferences)
    if SCORES == "softmax_of_chosen":
        chosen = chosen / tl.sum(chosen, axis=0)
    if NORMALIZED:
        chosen = chosen / (tl.sum(chosen, axis=0) + SUM_EPS)
    elif SCORES == "softmax" and not BIAS:
        chosen = chosen / total
    if SCALE != 1.0:
        chosen *= SCALE
    if EXPERT_SCALES:
        chosen *= tl.load(expert_scales_ptr + ids, mask=lanes < TOP_K, other=1.0)
    if SHARED:
        gate = 1.0
        if SHARED_GATE:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + token * width + num_experts).to(tl.float32)))
        chosen = tl.where(lanes < TOP_K, chosen, gate)
    at, live = token * (TOP_K + SHARED) + lanes, lanes < TOP_K + SHARED
    tl.store(ids_ptr + at, ids, mask=live)
    tl.store(weights_ptr + at, chosen, mask=live)


@jit
def _scores(logits, most, SCORES: tl.constexpr):
    """The scores of logits with this maximum, before a softmax's division. All are NaN if one logit is."""
    if SCORES == "sigmoid":
        scores = tl.where(most == most, 1.0 / (1.0 + tl.exp(-logits)), most)
    else:
        scores = tl.exp(logits - most)
    return scores


@jit
def _of_best_groups(
    preferences, experts, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr
):  # fmt: skip
    """The preferences of the best groups of `size` experts, and -inf for the others; the first of equal groups wins."""
    group_of = experts // size
    values = tl.full(experts.shape, float("-inf"), tl.float32)  # of each expert's group
    for group in tl.static_range(GROUPS):
        own = tl.where(group_of == group, preferences, float("-inf"))
        value = tl.max(own, axis=0)
        if TOP2:
            first = tl.min(tl.where(own == value, experts, experts.shape[0]), axis=0)
            value += tl.max(tl.where(experts == first, float("-inf"), own), axis=0)
        values = tl.where(group_of == group, value, values)
    kept = tl.full(experts.shape, float("-inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(values, axis=0)
        group = tl.min(tl.where(values == best, group_of, GROUPS - 1), axis=0)
        kept = tl.where(group_of == group, preferences, kept)
        values = tl.where(group_of == group, float("-inf"), values)
    return kept


@jit(do_not_specialize=["num_choices"])
def _sort_kernel(
    ids_ptr,  # [num_choices] int32
    starts_ptr,  # [num_experts + 1] int32: the start of an expert's choices in `order`; the last is the total
    order_ptr,  # [num_choices] int32: choices by expert, and by token within an expert
    num_choices,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e counts the choices of experts before e, and stores the choices of e behind them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    below = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_choices, BLOCK):
        ids = tl.load(ids_ptr + at + lanes, mask=at + lanes < num_choices, other=2147483647)
        below += (ids < expert).to(tl.int32)
    start = tl.sum(below, axis=0)
    tl.store(starts_ptr + expert, start)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, num_choices)
    for at in range(0, num_choices, BLOCK):
        ids = tl.load(ids_ptr + at + lanes, mask=at + lanes < num_choices, other=2147483647)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(mine, axis=0) - 1, at + lanes, mask=mine == 1)
        start += tl.sum(mine, axis=0)


@jit
def choices_of_tile(
    place, starts_ptr, order_ptr, num_experts, SINGLE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Tile `place` of the choices sorted by expert: its expert, its rows, which of them exist, and their choices.

    The expert is num_experts if there are fewer tiles. With SINGLE, each choice is a tile, choices are not sorted, and
    order_ptr holds the expert of each."""
    lanes = tl.arange(0, BLOCK_M)
    if SINGLE:
        expert = tl.load(order_ptr + place)
        rows = place + lanes
        live = lanes == 0
        choices = rows
    else:
        experts = tl.arange(0, EXPERTS)
        real = experts < num_experts
        ends = tl.load(starts_ptr + experts + 1, mask=real, other=0)
        tiles = (ends - tl.load(starts_ptr + experts, mask=real, other=0) + BLOCK_M - 1) // BLOCK_M
        last = tl.cumsum(tiles, axis=0)
        expert = tl.sum(((last <= place) & real).to(tl.int32), axis=0)
        there = expert < num_experts
        tile = place - tl.sum(tl.where(experts == expert, last - tiles, 0), axis=0)
        rows = tl.load(starts_ptr + expert, mask=there, other=0) + tile * BLOCK_M + lanes
        live = rows < tl.load(starts_ptr + expert + 1, mask=there, other=0)
        choices = tl.load(order_ptr + rows, mask=live, other=0)
    return expert, rows, live, choices


@jit
def add_results(
    results_ptr,  # float32 [num_choices, N]
    mixture_ptr,  # float32 [num_choices]: the experts' weights
    residual_ptr,  # [num_tokens, N], added to
    counter_ptr,  # int32 zero, one for each token and program of columns
    token,
    cols,
    N,
    PER_TOKEN: tl.constexpr,
):
    """With one choice a program: the last program of a token that stores these columns adds the token's results."""
    tl.debug_barrier()  # all of this program's stores come before its arrival
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
