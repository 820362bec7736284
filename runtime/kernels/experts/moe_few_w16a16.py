"""Products for few choices with dense weights, in two launches after the routing.

A program multiplies one choice's weight rows on the FMA units, as one-row products in
`linear/skinny_gemm.py`. The first launch includes the norm and the activation. The second adds the results of a token's
experts to the residual, in the token's last program that stores these columns.

Both request weights before they wait for the launch before them. The first requests the shared experts, because every
token takes them. The second requests all chosen experts, because the routing is older than the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_routing import add_results
from runtime.kernels.experts.moe_torch import ExpertBiases
from runtime.kernels.linear.skinny_blocks import request_weights, vector_product, weight_rows, weight_rows_of_block
from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_PREFETCH = constexpr(
    "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.b32 $0, 0;\n}"
)


class FewTiles(NamedTuple):
    """How both products are cut, as products of one row."""

    gate_up: SkinnyGemmConfig
    down: SkinnyGemmConfig


# A step has 256 columns for each warp, because a thread keeps 8 columns of a row.
TILES = FewTiles(SkinnyGemmConfig(4, 1024, 4, 2), SkinnyGemmConfig(4, 512, 2, 2))


@jit
def _few_choices_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_tokens, CHOICES, K]; rows x_stride apart
    norm_ptr,  # [K], read with NORM
    weight_ptr,  # [all experts, N, K]; with ACTIVATION gate rows, then up rows
    bias_ptr,  # [all experts, N], with BIAS
    out_ptr,  # [num_tokens, CHOICES, N], or with ACTIVATION N // 2 columns
    ids_ptr,  # [num_tokens, CHOICES] int32
    mixture_ptr,  # [num_tokens, CHOICES] fp32 expert weights; this and the next two without ACTIVATION
    residual_ptr,  # [num_tokens, N] contiguous, added to
    counters_ptr,
    x_stride,
    N,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # None for the second product
    EXPERTS: tl.constexpr,  # shared ones excluded
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, i, j): weight rows from i * BLOCK_N for a choice of token t; the shared experts are the first j."""
    token, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    choice = (place + CHOICES - SHARED) % CHOICES
    at = token * CHOICES + choice
    rows = tl.minimum(weight_rows_of_block(block, N, ACTIVATION, BLOCK_N), N - 1)
    cols = tl.arange(0, BLOCK_K)[None, :]
    row_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * K + cols
    size = N.to(tl.int64) * K
    expert = EXPERTS + place
    if ACTIVATION is not None:
        if PREFETCHES and place < SHARED:
            _prefetch(weight_ptr + expert * size, block, N, K, ACTIVATION, WARPS, BLOCK_N)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if place >= SHARED:
            expert = tl.load(ids_ptr + at)
    else:
        expert = tl.load(ids_ptr + at)
    weights = row_ptrs + expert * size
    w = request_weights(weights, cols, 0, K)
    next_w = w
    if AHEAD == 2 and BLOCK_K < K:
        next_w = request_weights(weights, cols, BLOCK_K, K)
    if PDL and ACTIVATION is None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xs = x_ptr + (token if ACTIVATION is not None else at) * x_stride + cols
    y = vector_product(w, next_w, weights, xs, norm_ptr, cols, eps, K, NORM, BLOCK_N, BLOCK_K, AHEAD)
    if BIAS:
        y += tl.load(bias_ptr + expert * N + rows).to(tl.float32)
    width = N
    outs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        y = gated_by(gate, up, ACTIVATION)
        width = N // 2
        outs = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + at * width + outs, y.to(out_ptr.dtype.element_ty), mask=outs < width)
    if ACTIVATION is None:
        counter = counters_ptr + token * tl.num_programs(1) + block
        add_results(out_ptr, mixture_ptr, residual_ptr, counter, token, outs, N, CHOICES)


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


def summed_columns() -> int:
    """The columns per program that adds a token's results."""
    return TILES.down.block_n


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
    inner = x.new_empty(len(ids), down.shape[2])
    results = torch.empty(len(ids), len(x[0]), dtype=torch.float32, device=x.device)
    counters = split_counters(x.device)
    products = (
        (x, norm_weight, gate_up, biases.gate_up, inner, TILES.gate_up, activation),
        (inner, None, down, biases.down, results, TILES.down, None),
    )
    for rows, norm, weight, bias, to, tile, own_activation in products:
        (_, size_out, size_in), pdl = weight.shape, use_pdl(x)
        _few_choices_kernel[(len(x), -(-size_out // tile.block_n), spec.choices)](
            rows, x if norm is None else norm, weight, x if bias is None else bias, to, ids, weights, out, counters,
            rows.stride(0), size_out, eps, K=size_in, NORM=norm is not None, BIAS=bias is not None,
            ACTIVATION=own_activation, EXPERTS=spec.num_experts, CHOICES=spec.choices, SHARED=spec.shared,
            WARPS=tile.num_warps, BLOCK_N=tile.block_n, BLOCK_K=max(min(tile.block_k, next_power_of_2(size_in)), 8),
            AHEAD=tile.stages,
            # Only sm_90 and later have `_prefetch`'s instruction, which requests multiples of 16 bytes.
            PREFETCHES=pdl and size_in * weight.element_size() % 16 == 0,
            PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip
