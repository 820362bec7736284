"""Mixtures of experts with 16-bit or 32-bit activations and dense weights.

They take four launches for few choices, six for more, and seven for several thousand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.choice_tiles import ExpertTiles, Tile, choices_of_tile, tile_and_columns, tiled
from runtime.kernels.experts.moe_few_w16a16 import add_few_choices, summed_columns
from runtime.kernels.experts.moe_routing import RoutedExperts, stacked
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.triton_language import jit, tl, use_pdl


class GroupedExperts(RoutedExperts):
    """`Experts` for any number of experts and tokens."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[torch.Tensor, torch.Tensor]],
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self.spec, self.router, self.activation, self.deterministic = spec, router, activation, deterministic
        ((self.gate_up,), (self.down,)) = stacked(([[part] for part in parts] for parts in weights), spec.all_experts)

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        if self._is_single(len(residual), residual.shape[1], summed_columns()):
            self._add_few(residual, norm_weight, eps, residual if out is None else out)
            return
        x = self.router.logits.norm(residual, norm_weight, eps)
        num_choices, hidden = len(x) * self.spec.choices, x.shape[1]
        ids, weights = self._route(self.router.logits_of(residual, x, eps))
        inner = x.new_empty(num_choices, self.down.shape[2])
        results = x.new_empty(num_choices, hidden)
        up_tile, down_tile = moe_w16a16_tiles(num_choices, self.spec.all_experts, x.dtype, self.deterministic)
        tiles = tiled(ids, self.spec.all_experts, up_tile.block_m)
        gate_up_bias, down_bias = self.biases
        self._product(x, self.gate_up, gate_up_bias, inner, tiles, up_tile, self.activation)
        self._product(inner, self.down, down_bias, results, tiles, down_tile, None)
        self._combine(results, weights, residual if out is None else out)

    def _add_few(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`add_to` in four launches for one token, and in five for a few."""
        router = self.router
        if router.logits.norm is rms_norm_triton:
            x, norm, logits = residual, norm_weight, router.normed_logits(residual, norm_weight, eps)
        else:
            x, norm = router.logits.norm(residual, norm_weight, eps), None
            logits = router.logits_of(residual, x, eps)
        ids, weights = self._route(logits)
        add_few_choices(
            x, norm, eps, self.spec, self.gate_up, self.down, self.biases, self.activation, ids, weights, out
        )

    def _product(
        self,
        x: torch.Tensor,  # [num_tokens, K], or without an activation [num_choices, K]
        weight: torch.Tensor,  # [num_experts, N, K]
        bias: torch.Tensor | None,  # [num_experts, N]
        out: torch.Tensor,  # [num_choices, N], or N // 2 columns with an activation
        tiles: ExpertTiles,
        tile: Tile,
        activation: Activation | None,
    ) -> None:
        size_in, size_out, pdl = weight.shape[2], out.shape[1], use_pdl(x)
        _moe_w16a16_kernel[tile.grid(len(tiles.experts), size_out)](
            x, weight, weight if bias is None else bias, out, tiles.experts, tiles.choices, size_out,
            FORM=DenseForm(
                k=size_in, per_token=self.spec.choices, bias=bias is not None, columns_first=tile.columns_first,
                block_m=tile.block_m, block_n=tile.block_n, block_k=tile.block_k, pdl=pdl,
            ),
            ACTIVATION=activation, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip


def moe_w16a16_tiles(num_choices: int, num_experts: int, dtype: torch.dtype, deterministic: bool) -> tuple[Tile, Tile]:
    """The tiles of both products, equally tall: taller where experts have more tokens. Deterministic mode has one
    tile, as others sum in another order.

    The warm-up's prompts and the graphs' sizes compile them (runtime/worker/warmup.py)."""
    mean = num_choices / num_experts
    if dtype == torch.float32:  # runs on the FMA units
        both = Tile(32, 32, 32, 4, 2)
    elif deterministic:
        both = Tile(64, 64, 64, 4, 3)
    elif mean <= 16:
        both = Tile(16, 64, 128, 4, 3)
    elif mean <= 64:
        return Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)
    else:
        return Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3)
    return both, both


class DenseForm(NamedTuple):
    """Constants of `_moe_w16a16_kernel`."""

    k: int
    per_token: int
    bias: bool
    columns_first: bool  # see `tile_and_columns`
    block_m: int
    block_n: int
    block_k: int
    pdl: bool


@jit
def _moe_w16a16_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_choices, K]
    weight_ptr,  # [num_experts, N, K], with ACTIVATION [num_experts, 2 * N, K]: gate rows, then up rows
    bias_ptr,  # one element for each weight row, with BIAS
    out_ptr,  # [num_choices, N]
    experts_ptr,  # this and the next as in `ExpertTiles`
    choices_ptr,
    N,
    FORM: tl.constexpr,  # `DenseForm`
    ACTIVATION: tl.constexpr,
):
    """Program (i, j): choice tile i and column tile j."""
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, column = tile_and_columns(FORM.columns_first)
    expert, choices, live = choices_of_tile(tile, experts_ptr, choices_ptr, False, FORM.block_m)
    if expert < 0:
        return
    sources = choices // FORM.per_token if ACTIVATION is not None else choices
    cols = column * FORM.block_n + tl.arange(0, FORM.block_n)
    inner = tl.arange(0, FORM.block_k)
    size = (2 if ACTIVATION is not None else 1) * N
    xs = x_ptr + sources.to(tl.int64)[:, None] * FORM.k + inner[None, :]
    weights = weight_ptr + (expert.to(tl.int64) * size + tl.minimum(cols, N - 1))[:, None] * FORM.k + inner[None, :]
    ups = weights + N.to(tl.int64) * FORM.k if ACTIVATION is not None else weights
    acc = tl.full((FORM.block_m, FORM.block_n), 0, tl.float32)
    up = tl.full((FORM.block_m, FORM.block_n), 0, tl.float32)
    for start in range(0, FORM.k, FORM.block_k):
        inside = (inner < FORM.k - start)[None, :] if FORM.k % FORM.block_k else tl.full((1, FORM.block_k), 1, tl.int1)
        x = tl.load(xs + start, mask=live[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.load(weights + start, mask=inside, other=0.0).T, acc, input_precision="ieee")
        if ACTIVATION is not None:
            up = tl.dot(x, tl.load(ups + start, mask=inside, other=0.0).T, up, input_precision="ieee")
    if FORM.bias:
        bias = bias_ptr + expert * size + tl.minimum(cols, N - 1)
        acc += tl.load(bias).to(tl.float32)[None, :]
        if ACTIVATION is not None:
            up += tl.load(bias + N).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        acc = gated_by(acc, up, ACTIVATION)
    at = out_ptr + choices.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])
