"""Linear layers over at most 16 rows: the products of a decode step, whose time goes into reading weights.

Both kernels give a program a few rows of the weight and the whole of K, so results need no second pass and do not
depend on timing, and both request their first weights before they wait for the kernel before them. One row is
multiplied on the FMA units; more rows go through the tensor cores, with every warp on its own part of K. What follows
a product, the activation or the residual addition, is folded in, and for one row the norm before it: RMSNorm divides
the row by one number, which is applied to the result while the squares are summed in the same loop. (Of more rows each
program would repeat more norms than a kernel of their own costs.)
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from runtime.kernels._triton import jit, next_power_of_2, tl, use_pdl
from runtime.kernels.rms_norm import rms_norm_triton
from runtime.kernels.skinny_gemm_configs import SKINNY_GEMM_CONFIGS, SkinnyGemmConfig

MAX_ROWS = 16

Activation = Literal["silu", "gelu_tanh"]


def skinny_gemm_torch(
    x: torch.Tensor,  # [num_rows, K], num_rows <= MAX_ROWS
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    norm_weight: torch.Tensor | None = None,  # [K]: x is RMS-normalised first
    eps: float = 0.0,
    residual: torch.Tensor | None = None,  # [num_rows, N], must not overlap x; added to in place and returned
    activation: Activation | None = None,  # N = 2 * ffn, rows of gate, then of up: act(gate) * up
    out_dtype: torch.dtype | None = None,  # of a result without residual; x's dtype if None
    out: torch.Tensor | None = None,  # contiguous, for a result without residual
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N] (or [num_rows, ffn], or the residual), step by step."""
    if norm_weight is not None:
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if activation is not None:
        gate, up = y.chunk(2, -1)
        y = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    if residual is not None:
        return residual.add_(y)
    return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


@jit
def _weight_rows(N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    """The program's rows of the weight [BLOCK_N]: with an activation, rows of gate and of up in turn."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION is not None:
        rows = rows // 2 + rows % 2 * (N // 2)
    return rows


@jit
def _finish(
    y,  # [BLOCK_N, NUM_TOKENS] fp32: the program's rows of the weight times x.T
    tokens,  # [NUM_TOKENS]
    rows,  # [BLOCK_N]
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    N,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bias, activation, residual; stores."""
    if BIAS:
        y += tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)[:, None]
    width = N
    cols = rows
    if ACTIVATION is not None:
        gate, up = tl.split(tl.trans(tl.reshape(y, (BLOCK_N // 2, 2, NUM_TOKENS)), 0, 2, 1))
        scaled = gate
        if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
            scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + tl.exp(-scaled)) * up
        width = N // 2
        cols = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = tokens[None, :] * width + cols[:, None]
    inside = (tokens < num_rows)[None, :] & (cols < width)[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_rows"])
def _vector_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    weight_ptr,  # [N, K] contiguous
    bias_ptr,  # [N]; this and the next two are read if BIAS, NORM, RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [num_rows, N] contiguous
    out_ptr,  # [num_rows, N] contiguous, or N // 2 columns with ACTIVATION
    x_stride,
    num_rows,  # not specialised on: a number that was not seen at start must not compile a kernel while serving
    N,
    eps,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least 8
    AHEAD: tl.constexpr,  # steps from a load of the weight to its use, 1 or 2
    PDL: tl.constexpr,
):
    """Program (i, j): rows i * BLOCK_N and on of the weight with row j of x."""
    token = tl.program_id(1)
    rows = _weight_rows(N, ACTIVATION, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)[None, :]
    weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + cols
    w = tl.load(weights, mask=cols < K, other=0.0, eviction_policy="evict_first")
    next_w = w
    if AHEAD == 2 and BLOCK_K < K:
        next_w = tl.load(weights + BLOCK_K, mask=cols < K - BLOCK_K, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    xs = x_ptr + token * x_stride + cols
    # A thread holds 8 neighbouring columns, 16 bytes: it sums those at once and keeps an eighth of the registers.
    acc = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    squares = tl.zeros((1, BLOCK_K // 8), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(xs + start, mask=cols < K - start, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(x * x, (1, BLOCK_K // 8, 8)), 2)
            x *= tl.load(norm_ptr + start + cols, mask=cols < K - start, other=0.0).to(tl.float32)
        product = w.to(tl.float32) * x
        ahead = start + AHEAD * BLOCK_K
        if AHEAD == 2:
            w = next_w
        if ahead < K:
            next_w = tl.load(weights + ahead, mask=cols < K - ahead, other=0.0, eviction_policy="evict_first")
        if AHEAD == 1:
            w = next_w
        acc += tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // 8, 8)), 2)
    y = tl.sum(acc, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    _finish(
        y[:, None], token + tl.arange(0, 1), rows, bias_ptr, residual_ptr, out_ptr, num_rows, N,
        BIAS, RESIDUAL, ACTIVATION, 1, BLOCK_N,
    )  # fmt: skip


@jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,  # the same arguments as above
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of a step along K, one a warp
    NUM_TOKENS: tl.constexpr,  # 8 or 16, at least num_rows
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: rows i * BLOCK_N and on of the weight with all rows of x, padded to NUM_TOKENS."""
    rows = _weight_rows(N, ACTIVATION, BLOCK_N)
    tokens = tl.arange(0, NUM_TOKENS)
    PART: tl.constexpr = BLOCK_K // PARTS
    cols = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[None, :, None] * K + cols  # [PARTS, BLOCK_N, PART]
    xs = x_ptr + (tokens * x_stride)[None, :, None] + cols  # [PARTS, NUM_TOKENS, PART]
    live = (tokens < num_rows)[None, :, None]
    first_w = tl.load(weights, mask=cols < K, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_x = tl.load(xs, mask=live & (cols < K), other=0.0)
    acc = tl.zeros((PARTS, BLOCK_N, NUM_TOKENS), tl.float32)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(weights + start, eviction_policy="evict_first")
            x = tl.load(xs + start, mask=live, other=0.0)
        else:
            w = tl.load(weights + start, mask=cols < K - start, other=0.0, eviction_policy="evict_first")
            x = tl.load(xs + start, mask=live & (cols < K - start), other=0.0)
        acc = tl.dot(w, tl.trans(x, 0, 2, 1), acc)
    acc = tl.dot(first_w, tl.trans(first_x, 0, 2, 1), acc)  # last, so that the loop's loads do not wait for it
    _finish(
        tl.sum(acc, 0), tokens, rows, bias_ptr, residual_ptr, out_ptr, num_rows, N,
        BIAS, RESIDUAL, ACTIVATION, NUM_TOKENS, BLOCK_N,
    )  # fmt: skip


def skinny_gemm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_gemm_torch` as one kernel with fp32 sums; x's rows may be strided."""
    (num_rows, size_in), size_out = x.shape, weight.shape[0]
    pdl = use_pdl(x)
    if residual is not None:
        out = residual
    elif out is None:
        width = size_out if activation is None else size_out // 2
        out = torch.empty((num_rows, width), dtype=out_dtype or x.dtype, device=x.device)
    one_by_one = num_rows == 1 or x.dtype == torch.float32  # tensor cores have no fp32
    config = skinny_gemm_config(size_out, size_in, 1 if one_by_one else num_rows)
    grid_n = -(-size_out // config.block_n)
    options = {
        "K": size_in, "BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation,
        "BLOCK_N": config.block_n, "PDL": pdl, "num_warps": config.num_warps, "launch_pdl": pdl,
    }  # fmt: skip
    bias = x if bias is None else bias  # the kernel needs a pointer, but does not read it without BIAS
    if one_by_one:
        _vector_kernel[(grid_n, num_rows)](
            x, weight, bias, x if norm_weight is None else norm_weight, out, out, x.stride(0), num_rows, size_out, eps,
            NORM=norm_weight is not None, BLOCK_K=max(min(config.block_k, next_power_of_2(size_in)), 8),
            AHEAD=config.stages, **options,
        )  # fmt: skip
        return out
    if norm_weight is not None:
        x = rms_norm_triton(x, norm_weight, eps)
    _tile_kernel[(grid_n,)](
        x, weight, bias, out, out, x.stride(0), num_rows, size_out,
        BLOCK_K=config.block_k, PARTS=config.num_warps, NUM_TOKENS=8 if num_rows <= 8 else 16, STAGES=config.stages,
        **options,
    )  # fmt: skip
    return out


def skinny_gemm_config(size_out: int, size_in: int, num_rows: int) -> SkinnyGemmConfig:
    """The measured configuration of a weight [size_out, size_in], or a rule's for shapes without a measurement."""
    most = next(n for n in (1, 8, 16) if num_rows <= n)
    if (config := SKINNY_GEMM_CONFIGS.get((size_out, size_in, most))) is not None:
        return config
    if num_rows == 1:
        return SkinnyGemmConfig(block_n=4, block_k=1024, num_warps=4)
    return SkinnyGemmConfig(block_n=16, block_k=512, num_warps=4, stages=3)
