"""Mixtures of experts with fp8 activations and fp8 weights (w8a8).

A token's row is quantized once for all its experts. An expert's first product quantizes its own result, with a
scale for each row and each column group of a program.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.choice_tiles import ExpertTiles, Tile, choices_of_tile, tile_and_columns, tiled
from runtime.kernels.experts.moe_routing import MOST_SINGLE, RoutedExperts, add_results, stacked
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3, within
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.quantized.activations import Fp8Activations, quantize_normed_fp8
from runtime.kernels.quantized.fp8_w8a8_gemm import has_fp8_gemm
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.triton_language import TensorDescriptor, jit, tl, use_pdl

_FEW_ROWS = Tile(16, 64, 128, 4, 3)  # few choices for each expert


class Fp8Form(NamedTuple):
    """Constants of `_moe_fp8_w8a8_kernel`."""

    k: int
    per_token: int
    bias: bool
    block_scales: bool
    single: bool  # tile i has choice i alone
    columns_first: bool  # see `tile_and_columns`
    block_m: int
    block_n: int
    block_k: int
    stages: int
    pdl: bool


@jit
def _moe_fp8_w8a8_kernel(
    x_ptr,  # fp8 [num_tokens, K], or without ACTIVATION [num_choices, K]
    x_scales_ptr,  # [num_tokens], or without ACTIVATION [num_choices, K / BLOCK_K]
    weights,  # descriptor: [num_experts * N, K], with ACTIVATION [num_experts * 2 * N, K]: gate's rows, then up's
    scales_ptr,  # float32 [weight rows], or [weight rows / 128, K / 128]
    bias_ptr,  # [rows of weights], with BIAS
    out_ptr,  # [num_choices, N], fp8 with ACTIVATION
    out_scales_ptr,  # [num_choices, N / BLOCK_N], written with ACTIVATION
    experts_ptr,  # this and the next as in `ExpertTiles`
    choices_ptr,  # unused with SINGLE
    mixture_ptr,  # [num_choices] float32 expert weights; these three are used with SINGLE and no ACTIVATION
    residual_ptr,  # [num_tokens, N], added to
    counters_ptr,  # [num_tokens, tiles of N] int32 zeros
    N,
    FORM: tl.constexpr,  # `Fp8Form`
    ACTIVATION: tl.constexpr,
):
    """Program (i, j): choice tile i and weight row tile j."""
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place, column = tile_and_columns(FORM.columns_first)
    expert, choices, live = choices_of_tile(place, experts_ptr, choices_ptr, FORM.single, FORM.block_m)
    if expert < 0:
        return
    sources = choices // FORM.per_token if ACTIVATION is not None else choices
    first = column * FORM.block_n
    cols, inner = first + tl.arange(0, FORM.block_n), tl.arange(0, FORM.block_k)
    size = (2 if ACTIVATION is not None else 1) * N
    row = expert * size + first
    xs = x_ptr + sources.to(tl.int64)[:, None] * FORM.k + inner[None, :]
    acc = tl.full((FORM.block_n, FORM.block_m), 0, tl.float32)
    up = tl.full((FORM.block_n, FORM.block_m), 0, tl.float32)
    for start in tl.range(0, FORM.k, FORM.block_k, num_stages=FORM.stages):
        x = tl.load(xs + start, mask=live[:, None] & (inner < FORM.k - start)[None, :], other=0.0).T
        part = tl.dot(weights.load([row, start]), x)
        if FORM.block_scales:
            block = scales_ptr + start // 128
            part *= tl.load(block + row // 128 * (FORM.k // 128))
        if ACTIVATION is None:
            part *= tl.load(
                x_scales_ptr + sources * (FORM.k // FORM.block_k) + start // FORM.block_k, mask=live, other=0.0
            )[None, :]
        acc += part
        if ACTIVATION is not None:
            part = tl.dot(weights.load([row + N, start]), x)
            if FORM.block_scales:
                part *= tl.load(block + (row + N) // 128 * (FORM.k // 128))
            up += part
    row_of = expert * size + tl.minimum(cols, N - 1)
    if not FORM.block_scales:
        acc *= tl.load(scales_ptr + row_of)[:, None]
        if ACTIVATION is not None:
            up *= tl.load(scales_ptr + row_of + N)[:, None]
    at = choices.to(tl.int64)[None, :] * N + cols[:, None]
    inside = live[None, :] & (cols < N)[:, None]
    if ACTIVATION is not None:
        x_scales = tl.load(x_scales_ptr + sources, mask=live, other=0.0)[None, :]
        gate = acc * x_scales
        up *= x_scales
        if FORM.bias:
            gate += tl.load(bias_ptr + row_of)[:, None].to(tl.float32)
            up += tl.load(bias_ptr + row_of + N)[:, None].to(tl.float32)
        y = tl.where(inside, gated_by(gate, up, ACTIVATION), 0.0)
        largest = larger(largest_magnitude(y, 0), 7.888609052210118e-31)
        tl.store(out_ptr + at, to_e4m3(within(y * (448.0 / largest)[None, :], 448.0)), mask=inside)
        tl.store(out_scales_ptr + choices * (N // FORM.block_n) + column, largest / 448.0, mask=live)
    else:
        if FORM.bias:
            acc += tl.load(bias_ptr + row_of)[:, None].to(tl.float32)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if FORM.single and ACTIVATION is None:
        token = place // FORM.per_token
        counter = counters_ptr + token * tl.cdiv(N, FORM.block_n) + column
        add_results(out_ptr, mixture_ptr, residual_ptr, counter, token, cols, N, FORM.per_token)


class Fp8Experts(RoutedExperts):
    """`GroupedExperts` with fp8 weights and activations.

    Few choices take four launches: routing, quantization and two products. The second adds a token's results."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[QuantizedWeight, QuantizedWeight]],  # that `has_fp8_moe`
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self.spec, self.router, self.activation, self.deterministic = spec, router, activation, deterministic
        tensors = ([(w.values, w.scales[:, : w.shape[0] // w.scale_rows].t()) for w in pair] for pair in weights)
        (self.gate_up, self.gate_up_scales), (self.down, self.down_scales) = stacked(tensors, spec.all_experts)

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        out = residual if out is None else out
        (num_tokens, hidden), ffn = residual.shape, self.down.shape[2]
        num_choices = num_tokens * self.spec.choices
        tile = moe_fp8_tile(num_choices, self.spec.all_experts, self.deterministic)
        is_single = self._is_single(num_tokens, hidden, tile.block_n, may_share=True)
        ids, weights = self._route(self.router.normed_logits(residual, norm_weight, eps))
        tiles = ExpertTiles(ids) if is_single else tiled(ids, self.spec.all_experts, tile.block_m)
        rows = quantize_normed_fp8(residual, norm_weight, eps, self.router.logits.norm)
        inner = Fp8Activations(
            torch.empty((num_choices, ffn), dtype=torch.float8_e4m3fn, device=residual.device),
            torch.empty((num_choices, ffn // tile.block_n), dtype=torch.float32, device=residual.device),
        )
        results = residual.new_empty(num_choices, hidden, dtype=torch.float32 if is_single else residual.dtype)
        product = partial(self._fp8_product, tiles=tiles, weights=weights, residual=out)
        gate_up_bias, down_bias = self.biases
        product(rows, self.gate_up, self.gate_up_scales, gate_up_bias, *inner, tile=tile, activation=self.activation)
        tile = _down_tile(tile)
        product(inner, self.down, self.down_scales, down_bias, results, results, tile=tile, activation=None)
        if not is_single:
            self._combine(results, weights, out)

    def _fp8_product(
        self,
        x: Fp8Activations,  # [num_tokens, K], or without an activation [num_choices, K]
        values: torch.Tensor,  # [num_experts, N, K]
        scales: torch.Tensor,  # [num_experts, N, 1], or block scales
        bias: torch.Tensor | None,  # [num_experts, N]
        out: torch.Tensor,
        out_scales: torch.Tensor,
        tiles: ExpertTiles,
        weights: torch.Tensor,
        residual: torch.Tensor,
        tile: Tile,
        activation: Activation | None,
    ) -> None:
        size_in, size_out, pdl, is_single = values.shape[2], out.shape[1], use_pdl(values), tiles.choices is None
        flat = values.view(-1, size_in)
        descriptor = TensorDescriptor(flat, list(flat.shape), [size_in, 1], [tile.block_n, tile.block_k])
        _moe_fp8_w8a8_kernel[tile.grid(len(tiles.experts), size_out)](
            x.values, x.scales, descriptor, scales, scales if bias is None else bias, out, out_scales, tiles.experts,
            tiles.choices, weights, residual, split_counters(values.device), size_out,
            FORM=Fp8Form(
                k=size_in, per_token=self.spec.choices, bias=bias is not None,
                block_scales=scales.shape[1] < values.shape[1], single=is_single, columns_first=tile.columns_first,
                block_m=tile.block_m, block_n=tile.block_n, block_k=tile.block_k, stages=tile.num_stages, pdl=pdl,
            ),
            ACTIVATION=activation, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip


def moe_fp8_tile(num_choices: int, num_experts: int, deterministic: bool) -> Tile:
    """Tall tiles where experts have many tokens. Deterministic mode has one tile."""
    if num_choices > 16 * num_experts or deterministic:
        return Tile(64, 128, 128, 8, 4)
    return _FEW_ROWS._replace(num_stages=4) if num_choices <= MOST_SINGLE else _FEW_ROWS


def _down_tile(tile: Tile) -> Tile:
    """The second product's tile. A step's columns share a scale, so they are a tile's columns in the first product.
    One result is summed here, not two: more warps took 1.7 times as long."""
    if tile == _FEW_ROWS:
        return tile._replace(block_n=128, block_k=tile.block_n)
    return tile._replace(block_k=tile.block_n, num_warps=4, num_stages=tile.num_stages * tile.block_k // tile.block_n)


def has_fp8_moe(pair: tuple[QuantizedWeight, QuantizedWeight]) -> bool:
    """True if this kernel takes experts with such gate_up and down weights."""
    return all(has_fp8_gemm(weight) and not any(size % 128 for size in weight.shape) for weight in pair)
