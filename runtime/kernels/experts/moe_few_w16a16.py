"""Products of few choices with dense weights, in two launches after the routing.

A program multiplies on the FMA units, as products of one row in `linear/skinny_gemm.py`. The first launch includes the
norm and the activation; the second adds the results of a token's experts to the residual. Both request weights before
they wait for the launch before them. The first requests the shared experts, because every token takes them. The second
requests all chosen experts, because the routing is older than the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from runtime.kernels.experts.moe_torch import ExpertBiases
from runtime.kernels.linear.skinny_blocks import (
    request_weights,
    sums_of_eights,
    vector_product,
    weight_rows,
    weight_rows_of_block,
)
from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl
from runtime.spec.decoder_spec import ExpertsSpec

_PREFETCH = constexpr(
    "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.b32 $0, 0;\n}"
)


class FewTiles(NamedTuple):
    """How both products are cut, as products of one row."""

    gate_up: SkinnyGemmConfig
    down: SkinnyGemmConfig


# Measured on an H200. A step has 256 columns for each warp, because 8 columns of a row stay in a thread.
TILES = FewTiles(SkinnyGemmConfig(4, 1024, 4, 2), SkinnyGemmConfig(8, 512, 2, 6))


@jit
def _few_gate_up_kernel(
    x_ptr,  # [num_tokens, K], rows x_stride apart
    norm_ptr,  # [K], read with NORM
    weight_ptr,  # [all experts, 2 * N, K]: rows of gate, then of up
    bias_ptr,  # [all experts, 2 * N], with BIAS
    out_ptr,  # [num_tokens, CHOICES, N]
    ids_ptr,  # [num_tokens, CHOICES] int32
    x_stride,
    N,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,  # without the shared ones
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, i, j): columns from i * BLOCK_N // 2 of a choice of token t; the shared experts are the first j."""
    token, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    choice = (place + CHOICES - SHARED) % CHOICES
    rows = tl.minimum(weight_rows_of_block(block, 2 * N, ACTIVATION, BLOCK_N), 2 * N - 1)
    cols = tl.arange(0, BLOCK_K)[None, :]
    of_rows = weight_ptr + rows.to(tl.int64)[:, None] * K
    size = 2 * N.to(tl.int64) * K
    expert = EXPERTS + place
    if PREFETCHES and place < SHARED:
        _prefetch(weight_ptr + expert * size, block, 2 * N, K, ACTIVATION, WARPS, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if place >= SHARED:
        expert = tl.load(ids_ptr + token * CHOICES + choice)
    weights = of_rows + expert * size + cols
    w = request_weights(weights, cols, 0, K)
    next_w = w
    if AHEAD == 2 and BLOCK_K < K:
        next_w = request_weights(weights, cols, BLOCK_K, K)
    xs = x_ptr + token * x_stride + cols
    y = vector_product(w, next_w, weights, xs, norm_ptr, cols, eps, K, NORM, BLOCK_N, BLOCK_K, AHEAD)
    if BIAS:
        y += tl.load(bias_ptr + expert * 2 * N + rows).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
    outs = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    out = out_ptr + (token * CHOICES + choice) * N + outs
    tl.store(out, gated_by(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=outs < N)


@jit
def _few_down_kernel(
    x_ptr,  # [num_tokens, CHOICES, K]
    weight_ptr,  # [all experts, N, K]
    bias_ptr,  # [all experts, N], with BIAS
    ids_ptr,  # [num_tokens, CHOICES] int32
    weights_ptr,  # [num_tokens, CHOICES] fp32
    residual_ptr,  # [num_tokens, N] contiguous, added to
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, i): columns from i * BLOCK_N of token t, the weighted sum over its choices.

    Steps run over the columns of one expert after another, the shared ones first."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of an expert
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    outs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outs, N - 1)
    cols = tl.arange(0, BLOCK_K)[None, :]
    places = weight_ptr + rows.to(tl.int64)[:, None] * K + cols
    size = N.to(tl.int64) * K
    ids_ptr += token * CHOICES
    weights_ptr += token * CHOICES
    xs = x_ptr + token * CHOICES * K + cols
    if PREFETCHES:
        for each in tl.static_range(CHOICES):
            _prefetch(weight_ptr + tl.load(ids_ptr + each) * size, block, N, K, None, WARPS, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    residual = tl.load(residual_ptr + token * N + outs, mask=outs < N, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for step in tl.range(CHOICES * STEPS, num_stages=STAGES):
        choice = (step // STEPS + CHOICES - SHARED) % CHOICES
        start = step % STEPS * BLOCK_K
        x = tl.load(xs + choice * K + start, mask=cols < K - start, other=0.0)
        w = request_weights(places + tl.load(ids_ptr + choice) * size, cols, start, K)
        acc += sums_of_eights(w.to(tl.float32) * (x.to(tl.float32) * tl.load(weights_ptr + choice)))
    y = tl.sum(acc, 1) + residual.to(tl.float32)
    if BIAS:
        for each in tl.static_range(CHOICES):
            bias = tl.load(bias_ptr + tl.load(ids_ptr + each) * N + rows).to(tl.float32)
            y += bias * tl.load(weights_ptr + each)
    tl.store(residual_ptr + token * N + outs, y.to(residual_ptr.dtype.element_ty), mask=outs < N)


@jit
def _prefetch(
    weight_ptr, block, N, K: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Request the weight rows of a block for the second-level cache; a thread requests one row, or none."""
    threads = tl.arange(0, 32 * WARPS)
    rows = tl.minimum(weight_rows(block * BLOCK_N + threads, N, ACTIVATION), N - 1)
    size = K * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    places = (weight_ptr + rows.to(tl.int64) * K).to(tl.int64)
    sizes = tl.where(threads < BLOCK_N, size, 0)
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [places, sizes], dtype=tl.int32, is_pure=False, pack=1)


def add_few_choices(
    x: torch.Tensor,  # [num_tokens, hidden]: the hidden states, or their norm without `norm_weight`
    norm_weight: torch.Tensor | None,
    eps: float,
    spec: ExpertsSpec,
    gate_up: torch.Tensor,  # [all experts, 2 * ffn, hidden]
    down: torch.Tensor,  # [all experts, hidden, ffn]
    biases: ExpertBiases,
    activation: Activation,
    ids: torch.Tensor,  # int32 [num_tokens * choices], not written by the launch before but one
    weights: torch.Tensor,  # float32 [num_tokens * choices]
    out: torch.Tensor,  # [num_tokens, hidden] contiguous, added to
) -> None:
    """Add the mixture of each token to `out`."""
    (num_tokens, hidden), ffn, pdl = x.shape, down.shape[2], use_pdl(x)
    inner = x.new_empty(len(ids), ffn)
    tile, down_tile = TILES
    _few_gate_up_kernel[(num_tokens, -(-2 * ffn // tile.block_n), spec.choices)](
        x, x if norm_weight is None else norm_weight, gate_up, x if biases.gate_up is None else biases.gate_up, inner,
        ids, x.stride(0), ffn, eps,
        NORM=norm_weight is not None, BIAS=biases.gate_up is not None, ACTIVATION=activation,
        AHEAD=tile.stages, **_options(tile, gate_up, spec, pdl),
    )  # fmt: skip
    _few_down_kernel[(num_tokens, -(-hidden // down_tile.block_n))](
        inner, down, inner if biases.down is None else biases.down, ids, weights, out, hidden,
        BIAS=biases.down is not None, STAGES=down_tile.stages, **_options(down_tile, down, spec, pdl),
    )  # fmt: skip


def _options(tile: SkinnyGemmConfig, weight: torch.Tensor, spec: ExpertsSpec, pdl: bool) -> dict[str, Any]:
    """The arguments that both launches share."""
    size_in = weight.shape[-1]
    return {
        "K": size_in, "EXPERTS": spec.num_experts, "CHOICES": spec.choices, "SHARED": spec.shared,
        "WARPS": tile.num_warps, "BLOCK_N": tile.block_n,
        "BLOCK_K": max(min(tile.block_k, next_power_of_2(size_in)), 8),
        # Only sm_90 and later have the instruction of `_prefetch`, which requests multiples of 16 bytes.
        "PREFETCHES": pdl and size_in * weight.element_size() % 16 == 0,
        "PDL": pdl, "num_warps": tile.num_warps, "launch_pdl": pdl,
    }  # fmt: skip
