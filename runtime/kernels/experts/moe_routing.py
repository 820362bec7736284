"""Routing for grouped mixtures: tokens' choices, in tiles made on the device, and the sum of their results.

A step can be a CUDA graph, so a launch must not depend on how many tokens chose an expert. A launch makes choice
tiles with one expert each, and one product covers all experts with a grid for the most tiles.
"""

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

TALL = 32  # choices in a tile
MOST_SINGLE = 32  # up to this many choices, each may have its own programs, even if some share an expert
_LANES = 32  # lanes per warp
_IN_WARP = constexpr(_LANES)
_LEAST = constexpr(-(1 << 31))  # lower than any number's key
# Arrays that `_route_token` reads. If they were aligned for Triton, a lane would load several neighbouring experts, and
# experts would be spread over warps.
_ROUTED_ARRAYS = ["logits_ptr", "choice_bias_ptr"]
_ROUND = 1024  # choices that a program compares at once, or columns that it adds at once
_SHORT_ROUND = 128  # the same for a one-warp program
_COUNTED = 4 * _ROUND  # choices that a program counts; more are counted by several programs, in rows
_MOST_PARTS = 8  # programs that place one expert's choices
_ROWS_AT_ONCE = constexpr(8)


class Tile(NamedTuple):
    """How a product over all experts is cut, and its launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def columns_first(self) -> bool:
        """True if a choice tile's programs follow one another. Large tiles are then read from memory once."""
        return self.block_m >= TALL

    def grid(self, num_tiles: int, num_columns: int) -> tuple[int, int]:
        """The grid for choice tiles and columns (`tile_and_columns`)."""
        grid = num_tiles, -(-num_columns // self.block_n)
        return grid[::-1] if self.columns_first else grid


class ExpertTiles(NamedTuple):
    """The choices of a step, in tiles for one expert each. A choice is token * choices of a token + its place."""

    experts: torch.Tensor  # int32 [num_tiles]; -1 for a tile without choices
    # int32 [num_tiles, block_m]: choices by token, then -1. None if tile i has choice i alone; so is `done`.
    choices: torch.Tensor | None = None
    done: torch.Tensor | None = None  # int32 [num_tiles]: zeros, to count a tile's finished programs


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

    def _tiled(self, ids: torch.Tensor, block_m: int) -> ExpertTiles:
        """The choices in tiles of block_m; the number of tiles is the worst case's."""
        num_experts, pdl, num_choices = self.spec.all_experts, use_pdl(ids), len(ids)
        experts = ids.new_empty(worst_case_tiles(num_choices, num_experts, block_m))
        choices, done = ids.new_empty(len(experts), block_m), torch.empty_like(experts)
        block, warps = (_SHORT_ROUND, 1) if max(num_choices, block_m) <= _SHORT_ROUND else (_ROUND, 4)
        bins, num_rows, counts = next_power_of_2(num_experts + 1), -(-num_choices // _COUNTED), ids
        if num_rows > 1:
            counts = ids.new_empty(num_rows, bins)
            _count_choices_kernel[(num_rows,)](
                ids, counts, num_choices, bins, COUNTED=_COUNTED, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
            )
        rows_of_a_part = -(-num_rows // _MOST_PARTS)
        _tile_choices_kernel[(num_experts, -(-num_rows // rows_of_a_part))](
            ids, counts, experts, choices, done, num_choices, len(experts), rows_of_a_part, BINS=bins, BLOCK_M=block_m,
            COUNTED=_COUNTED if num_rows > 1 else 0, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
        return ExpertTiles(experts, choices, done)

    def _combine(self, results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        (num_tokens, hidden), pdl = residual.shape, use_pdl(residual)
        _combine_kernel[(num_tokens, -(-hidden // _ROUND))](
            results, weights, residual, hidden,
            PER_TOKEN=self.spec.choices, BLOCK=_ROUND, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


def worst_case_tiles(num_choices: int, num_experts: int, block_m: int) -> int:
    """The most tiles that a number of choices can need, however they are spread over the experts."""
    return (num_choices + min(num_experts, num_choices) * (block_m - 1)) // block_m


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


@jit(do_not_specialize=["num_choices"])
def _count_choices_kernel(
    ids_ptr,  # [num_choices] int32
    counts_ptr,  # [num_rows, BINS] int32
    num_choices,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: how often each expert is chosen among COUNTED choices, in row i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.program_id(0) * COUNTED
    counts = _counts(ids_ptr, begin, tl.minimum(begin + COUNTED, num_choices), BINS, BLOCK)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@jit
def _counts(ids_ptr, begin, end, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is chosen among some choices, [BINS]."""
    counts, lanes = tl.zeros([BINS], tl.int32), tl.arange(0, BLOCK)
    for at in range(begin, end, BLOCK):
        counts += tl.histogram(tl.load(ids_ptr + at + lanes, mask=at + lanes < end, other=BINS - 1), BINS)
    return counts


@jit(do_not_specialize=["num_choices", "num_tiles", "rows_of_a_part"])
def _tile_choices_kernel(
    ids_ptr,  # [num_choices] int32
    counts_ptr,  # [num_rows, BINS] int32, with COUNTED
    experts_ptr,  # this and the next two as in `ExpertTiles`
    choices_ptr,
    done_ptr,
    num_choices,
    num_tiles,
    rows_of_a_part,
    BINS: tl.constexpr,  # a power of two, more than the experts
    BLOCK_M: tl.constexpr,
    COUNTED: tl.constexpr,  # choices in a row of counts; 0 without rows
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (e, i): expert e's tiles, in expert order, with choices from part i. The last expert adds tiles without
    choices.

    Those come last, because a program without work delays others."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, lanes, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    first_row = tl.program_id(1) * rows_of_a_part
    if COUNTED:
        counts, earlier = _added_counts(counts_ptr, tl.cdiv(num_choices, COUNTED), first_row, BINS)
    else:
        counts = _counts(ids_ptr, 0, num_choices, BINS, BLOCK)
        earlier = tl.zeros([BINS], tl.int32)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    used = (count + BLOCK_M - 1) // BLOCK_M
    place = first * BLOCK_M
    if tl.program_id(1) == 0:
        size = used
        if expert == tl.num_programs(0) - 1:
            size = num_tiles - first
        for at in range(0, size, BLOCK):
            tile = at + lanes
            tl.store(experts_ptr + first + tile, tl.where(tile < used, expert, -1), mask=tile < size)
            tl.store(done_ptr + first + tile, 0, mask=tile < size)
        tl.store(choices_ptr + place + count + lanes, -1, mask=count + lanes < used * BLOCK_M)
    place += tl.sum(tl.where(bins == expert, earlier, 0), axis=0)
    begin, end = first_row * COUNTED, num_choices
    if COUNTED:
        end = tl.minimum(begin + rows_of_a_part * COUNTED, num_choices)
    for at in range(begin, end, BLOCK):
        ids = tl.load(ids_ptr + at + lanes, mask=at + lanes < end, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(choices_ptr + place + tl.cumsum(mine, axis=0) - 1, at + lanes, mask=mine == 1)
        place += tl.sum(mine, axis=0)


@jit
def _added_counts(counts_ptr, num_rows, first_row, BINS: tl.constexpr):
    """How often each expert is chosen in all rows, and in those before `first_row`, both [BINS]."""
    rows, bins = tl.arange(0, _ROWS_AT_ONCE)[:, None], tl.arange(0, BINS)[None, :]
    counts, earlier = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for at in range(0, num_rows, _ROWS_AT_ONCE):
        some = tl.load(counts_ptr + (at + rows) * BINS + bins, mask=at + rows < num_rows, other=0)
        counts += tl.sum(some, axis=0)
        earlier += tl.sum(tl.where(at + rows < first_row, some, 0), axis=0)
    return counts, earlier


@jit
def tile_and_columns(COLUMNS_FIRST: tl.constexpr):
    """This program's choice tile and column tile. Consecutive programs have neighbouring columns if COLUMNS_FIRST."""
    if COLUMNS_FIRST:
        tile, columns = tl.program_id(1), tl.program_id(0)
    else:
        tile, columns = tl.program_id(0), tl.program_id(1)
    return tile, columns


@jit
def choices_of_tile(tile, experts_ptr, choices_ptr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert, -1 without choices; its choices [BLOCK_M], and which choices exist.

    With SINGLE, tile i has only choice i, and choices_ptr is not read."""
    expert = tl.load(experts_ptr + tile)
    lanes = tl.arange(0, BLOCK_M)
    choices = tile + lanes
    live = lanes == 0
    if not SINGLE:
        choices = tl.load(choices_ptr + tile * BLOCK_M + lanes)
        live = choices >= 0
    return expert, tl.where(live, choices, 0), live


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
