"""Mixtures of experts: each token goes to the `top_k` experts that its router prefers.

`Experts` runs one expert after another on the tokens that chose it. On a GPU, a step can be a CUDA graph, so a launch
must not depend on these numbers of tokens. `GroupedExperts` sorts tokens by expert on the device, and one product
covers all experts with a grid for the worst case. Both add the results of a token's experts in the order of its
preference, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple, Protocol, TypeVar

import torch

from runtime.kernels.linear.linear_torch import Activate, Linear, Product
from runtime.kernels.magnitudes import larger
from runtime.kernels.norm.gated_activation import Activation, activated
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl
from runtime.spec.decoder_spec import ExpertsSpec

W = TypeVar("W")

MOST_SINGLE = 32  # up to as many choices, each has its own programs, also if some share an expert
_ROUND = 1024  # choices that a program sorts at once, or columns that it adds at once


class ExpertLayer(Protocol):
    """A mixture of experts with its weights."""

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """Add the mixture of norm(residual) to `out`, or to the residual without it; both [num_tokens, hidden]."""


class Experts:
    """One expert after another, for any weights that `product` takes.

    An expert has gate and up as one weight [2 * ffn, hidden], and down [hidden, ffn]."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[W, W]],
        product: Callable[[W], Product],
        activate: Activate,
    ) -> None:
        self.spec, self.router, self.activate = spec, router, activate
        self.experts = [(product(gate_up), product(down)) for gate_up, down in weights]

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        total = self.mixture(residual, norm_weight, eps)
        (residual if out is None else out).add_(total.to(residual.dtype))

    def mixture(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The mixture of norm(residual) in float32, as wide as the product with down."""
        x = self.router.norm(residual, norm_weight, eps)
        ids, weights = route_torch(self.router.product(x), self.spec)
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.spec.num_experts).tolist()
        results = x.new_empty(0)
        for (gate_up, down), choices in zip(self.experts, order.split(counts), strict=True):
            if len(choices):
                y = down(self.activate(gate_up(x[choices // self.spec.top_k])))
                results = results if len(results) else y.new_empty(len(order), y.shape[1])
                results[choices] = y
        ordered = results.view(*ids.shape, -1).unbind(1)
        # Products and sums are separate operations, so that each is rounded exactly.
        return reduce(torch.add, (y * w[:, None] for y, w in zip(ordered, weights.unbind(1), strict=True)))


def route_torch(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [num_tokens, num_experts] -> ids and fp32 weights [num_tokens, top_k], best first."""
    weights, ids = logits.float().softmax(-1).topk(spec.top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if spec.normalized else weights


class Tile(NamedTuple):
    """How a product over all experts is cut, and its launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class GroupedExperts:
    """`Experts` in six launches, for any number of experts and tokens."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[torch.Tensor, torch.Tensor]],
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self.spec, self.router, self.activation, self.deterministic = spec, router, activation, deterministic
        ((self.gate_up,), (self.down,)) = stacked(([[part] for part in parts] for parts in weights), spec.num_experts)

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        x = self.router.norm(residual, norm_weight, eps)
        num_choices, hidden = len(x) * self.spec.top_k, x.shape[1]
        ids, weights = self._route(self.router.product(x))
        starts, order = self._sort(ids)
        inner = x.new_empty(num_choices, self.down.shape[2])
        results = x.new_empty(num_choices, hidden)
        tile = moe_w16a16_tile(num_choices, self.spec.num_experts, x.dtype, self.deterministic)
        self._product(x, self.gate_up, inner, starts, order, tile, self.activation)
        self._product(inner, self.down, results, starts, order, tile, None)
        self._combine(results, weights, residual if out is None else out)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int32 [num_tokens * top_k], and their weights in float32."""
        (num_tokens, num_experts), top_k, pdl = logits.shape, self.spec.top_k, use_pdl(logits)
        ids = torch.empty(num_tokens * top_k, dtype=torch.int32, device=logits.device)
        weights = torch.empty(num_tokens * top_k, dtype=torch.float32, device=logits.device)
        _route_kernel[(num_tokens,)](
            logits, ids, weights, num_experts,
            TOP_K=top_k, NORMALIZED=self.spec.normalized, EXPERTS=next_power_of_2(num_experts),
            LANES=next_power_of_2(top_k), PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
        return ids, weights

    def _sort(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The start of each expert's choices, with the total at the end; and the choices sorted by expert."""
        num_experts, pdl = self.spec.num_experts, use_pdl(ids)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
        order = torch.empty_like(ids)
        _sort_kernel[(num_experts,)](ids, starts, order, len(ids), BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl)
        return starts, order

    def _combine(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        (num_tokens, hidden), pdl = residual.shape, use_pdl(residual)
        _combine_kernel[(num_tokens, -(-hidden // _ROUND))](
            results, weights, residual, hidden,
            TOP_K=self.spec.top_k, BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip

    def _product(
        self,
        x: torch.Tensor,  # [num_tokens, K], or [num_choices, K] sorted by expert
        weight: torch.Tensor,  # [num_experts, N, K]
        out: torch.Tensor,  # [num_choices, N], or N // 2 columns with an activation; sorted by expert then, else not
        starts: torch.Tensor,
        order: torch.Tensor,
        tile: Tile,
        activation: Activation | None,
    ) -> None:
        (num_experts, _, size_in), pdl = weight.shape, use_pdl(x)
        num_choices, size_out = out.shape
        most_tiles = (num_choices + min(num_experts, num_choices) * (tile.block_m - 1)) // tile.block_m
        _moe_w16a16_kernel[(most_tiles, -(-size_out // tile.block_n))](
            x, weight, out, starts, order, num_experts, size_out,
            K=size_in, TOP_K=self.spec.top_k, ACTIVATION=activation, EXPERTS=next_power_of_2(num_experts),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
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


def moe_w16a16_tile(num_choices: int, num_experts: int, dtype: torch.dtype, deterministic: bool) -> Tile:
    """Tall tiles where experts have many tokens. Deterministic mode has one tile, as others sum in another order.

    There are only two: the warm-up compiles both, with prompts of 32 and of 1,100 tokens (runtime/worker/warmup.py)."""
    if dtype == torch.float32:  # on the FMA units
        return Tile(32, 32, 32, 4, 2)
    if deterministic:
        return Tile(64, 64, 64, 4, 3)
    return Tile(16, 64, 128, 4, 3) if num_choices <= 16 * num_experts else Tile(128, 64, 64, 8, 3)


@jit
def _route_kernel(
    logits_ptr,  # [num_tokens, num_experts]
    ids_ptr,  # [num_tokens, TOP_K] int32
    weights_ptr,  # [num_tokens, TOP_K] fp32
    num_experts,
    TOP_K: tl.constexpr,
    NORMALIZED: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    LANES: tl.constexpr,  # power of two, at least TOP_K
    PDL: tl.constexpr,
):
    """`route_torch`, one program a token; the first of equal experts wins."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    experts, lanes = tl.arange(0, EXPERTS), tl.arange(0, LANES)
    logits = tl.load(logits_ptr + token * num_experts + experts, mask=experts < num_experts, other=float("-inf"))
    logits = logits.to(tl.float32)
    weights = tl.exp(logits - tl.reduce(logits, 0, larger))  # all are NaN if one logit is
    total = tl.sum(weights, axis=0)
    ids = tl.zeros([LANES], tl.int32)
    chosen = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(weights, axis=0)
        # If a NaN makes all comparisons false, use the last expert: the row is lost, but must not fault.
        expert = tl.min(tl.where(weights == best, experts, num_experts - 1), axis=0)
        ids = tl.where(lanes == i, expert, ids)
        chosen = tl.where(lanes == i, best, chosen)
        weights = tl.where(experts == expert, -1.0, weights)
    chosen = chosen / tl.sum(chosen, axis=0) if NORMALIZED else chosen / total
    tl.store(ids_ptr + token * TOP_K + lanes, ids, mask=lanes < TOP_K)
    tl.store(weights_ptr + token * TOP_K + lanes, chosen, mask=lanes < TOP_K)


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
def _moe_w16a16_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_choices, K] sorted by expert
    weight_ptr,  # [num_experts, N, K], with ACTIVATION [num_experts, 2 * N, K]: rows of gate, then of up
    out_ptr,  # [num_choices, N], with ACTIVATION sorted by expert
    starts_ptr,
    order_ptr,
    num_experts,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): tile i of the choices sorted by expert, and tile j of the columns."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, rows, live, choices = choices_of_tile(
        tl.program_id(0), starts_ptr, order_ptr, num_experts, False, EXPERTS, BLOCK_M
    )
    if expert >= num_experts:
        return
    sources = choices // TOP_K if ACTIVATION is not None else tl.where(live, rows, 0)
    targets = rows if ACTIVATION is not None else choices
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    size = (2 if ACTIVATION is not None else 1) * N
    xs = x_ptr + sources.to(tl.int64)[:, None] * K + inner[None, :]
    weights = weight_ptr + (expert.to(tl.int64) * size + tl.minimum(cols, N - 1))[:, None] * K + inner[None, :]
    ups = weights + N.to(tl.int64) * K if ACTIVATION is not None else weights
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = (inner < K - start)[None, :]
        x = tl.load(xs + start, mask=live[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.load(weights + start, mask=inside, other=0.0).T, acc, input_precision="ieee")
        if ACTIVATION is not None:
            up = tl.dot(x, tl.load(ups + start, mask=inside, other=0.0).T, up, input_precision="ieee")
    if ACTIVATION is not None:
        acc = activated(acc, ACTIVATION) * up
    at = out_ptr + targets.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


@jit
def add_results(
    results_ptr,  # float32 [num_choices, N]
    mixture_ptr,  # float32 [num_choices]: the experts' weights
    residual_ptr,  # [num_tokens, N], added to
    counter_ptr,  # int32 zero, one for each token and program of columns
    token,
    cols,
    N,
    TOP_K: tl.constexpr,
):
    """With one choice a program: the last program of a token that stores these columns adds the token's results."""
    tl.debug_barrier()  # all of this program's stores come before its arrival
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == TOP_K - 1:
        tl.store(counter_ptr, 0)
        total = tl.zeros(cols.shape, tl.float32)
        for i in tl.static_range(TOP_K):
            choice = token * TOP_K + i
            result = tl.load(results_ptr + choice * N + cols, mask=cols < N, other=0.0, cache_modifier=".cg")
            total += result.to(tl.float32) * tl.load(mixture_ptr + choice)
        at = residual_ptr + token * N + cols
        total += tl.load(at, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=cols < N)


@jit
def _combine_kernel(
    results_ptr,  # [num_tokens, TOP_K, hidden]
    weights_ptr,  # [num_tokens, TOP_K] fp32
    residual_ptr,  # [num_tokens, hidden] contiguous, added to
    hidden,
    TOP_K: tl.constexpr,
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
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + i
        result = tl.load(results_ptr + choice * hidden + cols, mask=inside, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + choice)
    at = residual_ptr + token * hidden + cols
    total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=inside)
