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


class FewForm(NamedTuple):
    """Constants of `_few_choices_kernel`."""

    k: int
    norm: bool
    bias: bool
    experts: int  # shared ones excluded
    choices: int
    shared: int
    warps: int
    block_n: int
    block_k: int
    ahead: int
    prefetches: bool
    pdl: bool


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
    FORM: tl.constexpr,  # `FewForm`
    ACTIVATION: tl.constexpr,  # None for the second product
):
    """Program (t, i, j): weight rows from i * BLOCK_N for a choice of token t; the shared experts are the first j."""
    token, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    choice = (place + FORM.choices - FORM.shared) % FORM.choices
    at = token * FORM.choices + choice
    rows = tl.minimum(weight_rows_of_block(block, N, ACTIVATION, FORM.block_n), N - 1)
    cols = tl.arange(0, FORM.block_k)[None, :]
    row_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * FORM.k + cols
    size = N.to(tl.int64) * FORM.k
    expert = FORM.experts + place
    if ACTIVATION is not None:
        if FORM.prefetches and place < FORM.shared:
            _prefetch(weight_ptr + expert * size, block, N, FORM, ACTIVATION)
        if FORM.pdl:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if place >= FORM.shared:
            expert = tl.load(ids_ptr + at)
    else:
        expert = tl.load(ids_ptr + at)
    weights = row_ptrs + expert * size
    w = request_weights(weights, cols, 0, FORM.k)
    next_w = w
    if FORM.ahead == 2 and FORM.block_k < FORM.k:
        next_w = request_weights(weights, cols, FORM.block_k, FORM.k)
    if FORM.pdl and ACTIVATION is None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xs = x_ptr + (token if ACTIVATION is not None else at) * x_stride + cols
    y = vector_product(
        w, next_w, weights, xs, norm_ptr, cols, eps, FORM.k, FORM.norm, FORM.block_n, FORM.block_k, FORM.ahead
    )
    if FORM.bias:
        y += tl.load(bias_ptr + expert * N + rows).to(tl.float32)
    width = N
    outs = block * FORM.block_n + tl.arange(0, FORM.block_n)
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(y, (FORM.block_n // 2, 2)))
        y = gated_by(gate, up, ACTIVATION)
        width = N // 2
        outs = block * (FORM.block_n // 2) + tl.arange(0, FORM.block_n // 2)
    tl.store(out_ptr + at * width + outs, y.to(out_ptr.dtype.element_ty), mask=outs < width)
    if ACTIVATION is None:
        counter = counters_ptr + token * tl.num_programs(1) + block
        add_results(out_ptr, mixture_ptr, residual_ptr, counter, token, outs, N, FORM.choices)


@jit
def _prefetch(weight_ptr, block, N, FORM: tl.constexpr, ACTIVATION: tl.constexpr):
    """Request the weight rows of a block for the second-level cache; a thread requests one row, or none."""
    threads = tl.arange(0, 32 * FORM.warps)
    rows = tl.minimum(weight_rows(block * FORM.block_n + threads, N, ACTIVATION), N - 1)
    size = FORM.k * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    places = (weight_ptr + rows.to(tl.int64) * FORM.k).to(tl.int64)
    sizes = tl.where(threads < FORM.block_n, size, 0)
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
            rows.stride(0), size_out, eps,
            # Only sm_90 and later have `_prefetch`'s instruction, which requests multiples of 16 bytes.
            FORM=FewForm(
                k=size_in, norm=norm is not None, bias=bias is not None, experts=spec.num_experts, choices=spec.choices,
                shared=spec.shared, warps=tile.num_warps, block_n=tile.block_n,
                block_k=max(min(tile.block_k, next_power_of_2(size_in)), 8), ahead=tile.stages,
                prefetches=pdl and size_in * weight.element_size() % 16 == 0, pdl=pdl,
            ),
            ACTIVATION=own_activation, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip
