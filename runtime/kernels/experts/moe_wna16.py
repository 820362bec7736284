"""Mixtures of experts with quantized weights (4 or 8 bits) and 16-bit activations.

Few choices of an expert are bound by the bytes of its weight. As in `wna16_skinny_gemm`, a program has a few weight
rows, upcasts them in registers, and scales the sums of groups. Where an expert has many choices, and in deterministic
mode always, a program upcasts and scales a tile of the weight into shared memory for the matrix units. A number is
rounded once there, so the tile equals that of a dense copy of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from runtime.kernels.experts.moe_routing import (
    MOST_SINGLE,
    RoutedExperts,
    Tile,
    add_results,
    choices_of_tile,
    stacked,
    worst_case_tiles,
)
from runtime.kernels.experts.moe_torch import Router
from runtime.kernels.linear.skinny_blocks import add_chunks, weight_rows_of_block
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.quantized.launch_configs import wna16_sum_order
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_bytes, upcast_nibbles
from runtime.kernels.quantized.wna16_step import add_step, load_scales, load_values, load_x, step_columns
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl
from runtime.spec.decoder_spec import ExpertsSpec

MOST_TOKENS = 16  # of an expert, for one program of `_moe_wna16_few_kernel`
_REGISTERS = 128  # of a thread: two programs share a multiprocessor, and one multiplies while the other one upcasts


@jit
def _moe_wna16_few_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_choices, K] sorted by expert
    values_ptr,  # this and the next two as in `QuantizedWeight`, stacked by expert
    scales_ptr,
    zero_points_ptr,
    bias_ptr,  # [num_experts, N], with BIAS
    out_ptr,  # [num_choices, N], or with ACTIVATION N // 2 columns, sorted by expert
    starts_ptr,  # [num_experts + 1], unused with SINGLE
    order_ptr,  # choices by expert; with SINGLE the expert of each choice
    mixture_ptr,  # [num_choices] float32 weights of experts; this and the next two as in `add_results`
    residual_ptr,
    counters_ptr,
    num_experts,
    N,  # weight rows of an expert
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SINGLE: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    SCALES: tl.constexpr,  # elements between the scales of two experts
    LAYOUT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N with tile j of the choices sorted by expert.

    Chunks of K run side by side, as in `_wna16_skinny_gemm_kernel`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, tokens, live, choices = choices_of_tile(
        tl.program_id(1), starts_ptr, order_ptr, num_experts, SINGLE, EXPERTS, BLOCK_M
    )
    if expert >= num_experts:
        return
    sources = tl.where(live, choices // PER_TOKEN if ACTIVATION is not None else tokens, 0)
    rows = weight_rows_of_block(tl.program_id(0), N, ACTIVATION, BLOCK_N)
    row_of = tl.minimum(rows, N - 1)
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else BLOCK_K
    PER_BYTE: tl.constexpr = 2 if LAYOUT.plane else 1
    WHOLE: tl.constexpr = K == NUM_CHUNKS * CHUNK
    byte_of = values_ptr + (expert.to(tl.int64) * N + row_of) * ROW_BYTES
    scale_of = expert.to(tl.int64) * SCALES + row_of // LAYOUT.scale_rows
    x_of = x_ptr + sources.to(tl.int64) * K
    if NUM_CHUNKS == 1:
        place = tl.arange(0, WIDTH)[None, :]
        cols = place
        values, xs = byte_of[:, None] + place, x_of[:, None] + cols
        x_live, groups, at_scale = live[:, None], tl.zeros((1, 1), tl.int32), scale_of[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        chunks = tl.arange(0, NUM_CHUNKS)[:, None, None]
        place = chunks * (CHUNK // PER_BYTE) + tl.arange(0, WIDTH)[None, None, :]
        cols = chunks * CHUNK + tl.arange(0, WIDTH)[None, None, :]
        values, xs = byte_of[None, :, None] + place, x_of[None, :, None] + cols
        x_live, groups = live[None, :, None], chunks * (CHUNK // LAYOUT.group_size if LAYOUT.group_size else 0)
        at_scale = scale_of[None, :, None] + groups * LAYOUT.scale_stride
        acc = tl.zeros((NUM_CHUNKS, BLOCK_N, BLOCK_M), tl.float32)
    scales, zero_points = scales_ptr + at_scale, zero_points_ptr + at_scale
    for start in tl.range(0, CHUNK, BLOCK_K, num_stages=STAGES):
        w = load_values(values, place, start // PER_BYTE, ROW_BYTES, WHOLE)
        x = load_x(xs, xs, cols, x_live, start, K, LAYOUT, False, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, K, LAYOUT, WHOLE)
        acc = add_step(w, x, step_scales, acc, LAYOUT, NUM_CHUNKS)
    y = add_chunks(acc, NUM_CHUNKS)
    if not LAYOUT.group_size:
        y *= tl.load(scales_ptr + scale_of)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + expert * N + row_of).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.trans(tl.reshape(y, (BLOCK_N // 2, 2, BLOCK_M)), 0, 2, 1))
        y = gated_by(gate, up, ACTIVATION)
        width = N // 2
        outs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        targets = tokens
    else:
        width = N
        outs = rows
        targets = choices
    at = out_ptr + targets.to(tl.int64)[None, :] * width + outs[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=live[None, :] & (outs < width)[:, None])
    if SINGLE and ACTIVATION is None:
        token = tl.program_id(1) // PER_TOKEN
        counter = counters_ptr + token * tl.num_programs(0) + tl.program_id(0)
        add_results(out_ptr, mixture_ptr, residual_ptr, counter, token, rows, N, PER_TOKEN)


@jit
def _moe_wna16_many_kernel(
    x_ptr,  # the same arguments as above
    values_ptr,
    scales_ptr,
    zero_points_ptr,
    bias_ptr,  # [num_experts, N], with BIAS
    out_ptr,
    starts_ptr,
    order_ptr,
    num_experts,
    N,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCALES: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N with tile j of the choices sorted by expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, tokens, live, choices = choices_of_tile(
        tl.program_id(1), starts_ptr, order_ptr, num_experts, False, EXPERTS, BLOCK_M
    )
    if expert >= num_experts:
        return
    sources = tl.where(live, choices // PER_TOKEN if ACTIVATION is not None else tokens, 0)
    rows = weight_rows_of_block(tl.program_id(0), N, ACTIVATION, BLOCK_N)
    row_of = tl.minimum(rows, N - 1)
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else BLOCK_K
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    cols = tl.arange(0, WIDTH)[None, :]
    values = values_ptr + ((expert.to(tl.int64) * N + row_of) * ROW_BYTES)[:, None] + cols
    scale_of = expert.to(tl.int64) * SCALES + row_of // LAYOUT.scale_rows
    scales, zero_points = scales_ptr + scale_of[:, None], zero_points_ptr + scale_of[:, None]
    xs = x_ptr + (sources.to(tl.int64) * K)[:, None] + cols
    groups = tl.zeros((1, 1), tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = load_values(values, cols, start // 2 if LAYOUT.plane else start, ROW_BYTES, WHOLE)
        x, high_x = load_x(xs, xs, cols, live[:, None], start, K, LAYOUT, False, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, K, LAYOUT, WHOLE)
        scale, zero_point, high_scale, high_zero_point = step_scales[0], step_scales[1], step_scales[2], step_scales[3]
        if 2 * LAYOUT.group_size == LAYOUT.plane and LAYOUT.group_size:
            scale, zero_point = _of_halves(cols, scale, step_scales[4]), _of_halves(cols, zero_point, step_scales[5])
            high_scale = _of_halves(cols, high_scale, step_scales[6])
            high_zero_point = _of_halves(cols, high_zero_point, step_scales[7])
        if LAYOUT.plane:
            low, high = upcast_nibbles(w, LAYOUT, x.dtype)
            acc = _add_product(x, low, scale, zero_point, acc, LAYOUT)
            acc = _add_product(high_x, high, high_scale, high_zero_point, acc, LAYOUT)
        else:
            acc = _add_product(x, upcast_bytes(w, LAYOUT, x.dtype), scale, zero_point, acc, LAYOUT)
    if not LAYOUT.group_size:
        acc *= tl.load(scales_ptr + scale_of)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + row_of).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        acc = gated_by(gate, up, ACTIVATION)
        width = N // 2
        outs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        targets = tokens
    else:
        width = N
        outs = rows
        targets = choices
    at = out_ptr + targets.to(tl.int64)[:, None] * width + outs[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (outs < width)[None, :])


@jit
def _of_halves(cols, first, second):
    """One number for each column of a plane: `first` for its first group, `second` for its second."""
    return tl.where(cols < cols.shape[1] // 2, first, second)


@jit
def _add_product(x, numbers, scale, zero_point, acc, LAYOUT: tl.constexpr):
    """acc plus the product of x with upcast columns, which are scaled in float32 and rounded to x's dtype.

    With groups, the columns are of one group."""
    if LAYOUT.encoding == "int4" or LAYOUT.encoding == "uint4":
        numbers -= 136.0 if LAYOUT.encoding == "int4" else 128.0
    if LAYOUT.group_size:
        numbers = numbers.to(tl.float32) * scale
    if LAYOUT.has_zero_points:
        numbers -= zero_point
    return tl.dot(x, numbers.to(x.dtype).T, acc, input_precision="ieee")


class QuantizedExperts(RoutedExperts):
    """`GroupedExperts` with quantized weights and 16-bit activations.

    Few choices take five launches: norm, router, routing and two products. The second adds a token's results."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[QuantizedWeight, QuantizedWeight]],
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self.spec, self.router, self.activation, self.deterministic = spec, router, activation, deterministic
        pairs: list[tuple[QuantizedWeight, QuantizedWeight]] = []  # the last pair that was read

        def tensors() -> Iterator[list[list[torch.Tensor]]]:
            for pairs[:] in ([pair] for pair in weights):
                yield [[t for t in (w.values, w.scales, w.zero_points) if t is not None] for w in pairs[0]]

        stacks = stacked(tensors(), spec.all_experts)
        self.weights = [
            replace(weight, values=values, scales=scales, zero_points=more[0] if more else None)
            for weight, (values, scales, *more) in zip(pairs[0], stacks, strict=True)
        ]

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        out = residual if out is None else out
        x = self.router.logits.norm(residual, norm_weight, eps)
        (num_tokens, hidden), num_choices = x.shape, len(x) * self.spec.choices
        gate_up, down = self.weights
        tile = moe_wna16_tile(num_choices, self.spec.all_experts, self.deterministic)
        is_single = self._is_single(num_tokens, hidden, tile)
        ids, weights = self._route(self.router.logits_of(residual, x, eps))
        starts, order = (ids, ids) if is_single else self._sort(ids)
        inner = x.new_empty(num_choices, down.shape[1])
        results = x.new_empty(num_choices, hidden, dtype=torch.float32 if is_single else x.dtype)
        product = partial(
            self._quantized_product, starts=starts, order=order, mixture=weights, residual=out,
            is_single=is_single, tile=tile,
        )  # fmt: skip
        of_gate_up, of_down = self.biases
        product(x, gate_up, of_gate_up, inner, activation=self.activation)
        product(inner, down, of_down, results, activation=None)
        if not is_single:
            self._combine(results, weights, out)

    def _quantized_product(
        self,
        x: torch.Tensor,  # [num_tokens, K], or [num_choices, K] sorted by expert
        weight: QuantizedWeight,  # tensors of all experts
        bias: torch.Tensor | None,  # [num_experts, N]
        out: torch.Tensor,  # [num_choices, N], or N // 2 columns with an activation; sorted by expert then, else not
        starts: torch.Tensor,
        order: torch.Tensor,
        mixture: torch.Tensor,
        residual: torch.Tensor,
        is_single: bool,
        tile: Tile,
        activation: Activation | None,
    ) -> None:
        (size_out, size_in), num_experts, num_choices = weight.shape, self.spec.all_experts, len(out)
        num_tiles, pdl = num_choices, use_pdl(x)
        if not is_single:
            num_tiles = worst_case_tiles(num_choices, num_experts, tile)
        grid = -(-size_out // tile.block_n), num_tiles
        shared = weight.scales, weight.zero_points_or_scales
        tensors = x, weight.values, *shared, weight.scales if bias is None else bias
        options: dict[str, Any] = {
            "LAYOUT": weight.layout, "K": size_in, "PER_TOKEN": self.spec.choices, "BIAS": bias is not None,
            "ACTIVATION": activation,
            "EXPERTS": next_power_of_2(num_experts), "SCALES": weight.scales.stride(0), "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n, "BLOCK_K": step_columns(weight, tile.block_k), "STAGES": tile.num_stages,
            "PDL": pdl, "launch_pdl": pdl,
        }  # fmt: skip
        if tile.block_m > MOST_TOKENS:
            _moe_wna16_many_kernel[grid](
                *tensors, out, starts, order, num_experts, size_out,
                num_warps=tile.num_warps, maxnreg=_REGISTERS, **options,
            )  # fmt: skip
            return
        num_chunks, chunk = wna16_sum_order(size_out, size_in)
        options["STAGES"] = tile.num_stages * tile.block_k // options["BLOCK_K"]  # keeps as many bytes in flight
        _moe_wna16_few_kernel[grid](
            *tensors, out, starts, order, mixture, residual, split_counters(x.device), num_experts, size_out,
            SINGLE=is_single, NUM_CHUNKS=num_chunks, CHUNK=chunk, num_warps=max(num_chunks, tile.num_warps), **options,
        )  # fmt: skip


def moe_wna16_tile(num_choices: int, num_experts: int, deterministic: bool) -> Tile:
    """Tall tiles where experts have many tokens. Deterministic mode has one tile, as others sum in another order."""
    if deterministic:
        return Tile(64, 64, 64, 4, 3)
    if num_choices <= 16 * num_experts:
        return Tile(8 if num_choices <= MOST_SINGLE else MOST_TOKENS, 32, 128, 2, 3)
    return Tile(128, 128, 64, 8, 2)
