"""Linear layers over at most 16 rows, a decode step's products. Reading the weight takes most of their time.

A program has a few weight rows and the whole of K, so results do not need a second pass and do not depend on timing. It
requests its first weights before it waits for the previous kernel. One row is multiplied on the FMA units. More rows,
and in deterministic mode one row as well, use the tensor cores in the order of `sum_order`.

The activation or the residual addition after a product is part of its kernel. On the FMA units, so is the norm before
it: RMSNorm divides the row by one number, which the kernel applies to the result after summing the squares in the same
loop. With more rows, programs would repeat more norms than a separate kernel costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear.lora import RowAdapters, add_adapters_torch
from runtime.kernels.linear.skinny_blocks import (
    add_chunks,
    request_weights,
    store_block,
    vector_product,
    weight_rows_of_block,
)
from runtime.kernels.linear.skinny_gemm_configs import SKINNY_GEMM_CONFIGS, SkinnyGemmConfig
from runtime.kernels.linear.small_results import await_results, make_result
from runtime.kernels.linear.sum_order import sum_order
from runtime.kernels.linear.tiles import output_of
from runtime.kernels.norm.gated_activation import Activation, gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

MAX_ROWS = 16
_RESULT_COLUMNS = 1024  # columns of A at once, for each warp in a program that computes A x


def skinny_gemm_torch(
    x: torch.Tensor,  # [num_rows, K], num_rows <= MAX_ROWS
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    *,
    norm_weight: torch.Tensor | None = None,  # [K]: x is RMS-normalised first
    eps: float = 0.0,
    residual: torch.Tensor | None = None,  # [num_rows, N], must not overlap x; added to in place and returned
    activation: Activation | None = None,  # N = 2 * ffn, gate rows, then up rows: act(gate) * up
    out_dtype: torch.dtype | None = None,  # dtype of a result without residual; None for x's dtype
    out: torch.Tensor | None = None,  # contiguous, for a result without residual
    adapters: RowAdapters | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N] (or [num_rows, ffn], or the residual), step by step."""
    if norm_weight is not None:
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if adapters is not None:
        add_adapters_torch(y, x, adapters.rows, adapters.adapters)
    if activation is not None:
        y = gated_activation_torch(y, activation)
    if residual is not None:
        return residual.add_(y)
    return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


class VectorForm(NamedTuple):
    """Constants of `_vector_kernel`."""

    pdl: bool
    k: int
    bias: bool
    residual: bool
    block_n: int
    block_k: int  # 8 or more
    ahead: int  # steps from a load of the weight to its use, 1 or 2
    norm: bool
    rank: int  # 0 without adapters
    num_ranks: int
    result_k: int  # columns of A at once


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _vector_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    weight_ptr,  # [N, K] contiguous
    bias_ptr,  # [N]; read with BIAS, as are the next two with NORM and RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [num_rows, N] contiguous
    rows_ptr,  # [num_rows], not written by the previous kernel; used with RANK, as are the next three
    a_ptr,  # [max_loras, NUM_RANKS, K]
    b_ptr,  # [max_loras, N, RANK]
    results_ptr,  # [num_rows, NUM_RANKS] int32, as kernels/linear/small_results.py has them
    out_ptr,  # [num_rows, N] contiguous, or N // 2 columns with ACTIVATION
    x_stride,
    end_0,  # outputs up to the end of an adapter's first part; end_1: its second
    end_1,
    num_rows,  # not specialised: a new number of rows must not compile a kernel while serving
    N,
    eps,
    FORM: tl.constexpr,  # `VectorForm`
    ACTIVATION: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N with row j of x.

    With adapters, NUM_RANKS programs come first and compute one element of A x each."""
    block, token = tl.program_id(0), tl.program_id(1)
    if FORM.rank:
        index = tl.load(rows_ptr + token).to(tl.int64)
        results = results_ptr + token * FORM.num_ranks
        if block < FORM.num_ranks:
            a = a_ptr + ((index - 1) * FORM.num_ranks + block) * FORM.k
            make_result(
                results + block, x_ptr + token * x_stride, a, norm_ptr, index > 0, eps, FORM.k, FORM.norm,
                FORM.result_k, FORM.pdl,
            )  # fmt: skip
            return
        block -= FORM.num_ranks
    rows = weight_rows_of_block(block, N, ACTIVATION, FORM.block_n)
    cols = tl.arange(0, FORM.block_k)[None, :]
    weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * FORM.k + cols
    w = request_weights(weights, cols, 0, FORM.k)
    next_w = w
    if FORM.ahead == 2 and FORM.block_k < FORM.k:
        next_w = request_weights(weights, cols, FORM.block_k, FORM.k)
    if FORM.rank:  # x does not matter
        ranks = tl.arange(0, FORM.rank)[None, :]
        part = (rows >= end_0).to(tl.int32) + (rows >= end_1).to(tl.int32)
        has = (rows < tl.where(index > 0, N, 0))[:, None]
        b = tl.load(b_ptr + ((index - 1) * N + rows)[:, None] * FORM.rank + ranks, mask=has, other=0.0)
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    xs = x_ptr + token * x_stride + cols
    y = vector_product(
        w, next_w, weights, xs, norm_ptr, cols, eps, FORM.k, FORM.norm, FORM.block_n, FORM.block_k, FORM.ahead
    )
    if FORM.rank:
        y += tl.sum(b.to(tl.float32) * await_results(results + part[:, None] * FORM.rank + ranks, has), 1)
    store_block(
        y[:, None], block, token + tl.arange(0, 1), rows, bias_ptr, residual_ptr, out_ptr, num_rows, N,
        FORM.bias, FORM.residual, ACTIVATION, 1, FORM.block_n,
    )  # fmt: skip


class TileForm(NamedTuple):
    """Constants of `_tile_kernel`."""

    pdl: bool
    k: int
    bias: bool
    residual: bool
    block_n: int
    block_k: int  # columns per step, in each chunk
    ahead: int  # steps, 1 or 2, of weights requested before the wait
    num_chunks: int  # 1, 2 or 4; a warp sums one chunk
    chunk: int  # columns; a multiple of `block_k`
    num_tokens: int  # 8 or 16, at least num_rows
    stages: int


@jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,  # see above
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    num_rows,
    N,
    FORM: tl.constexpr,  # `TileForm`
    ACTIVATION: tl.constexpr,
):
    """Program i: weight rows from i * BLOCK_N with all rows of x, padded to NUM_TOKENS."""
    rows = weight_rows_of_block(tl.program_id(0), N, ACTIVATION, FORM.block_n)
    tokens = tl.arange(0, FORM.num_tokens)
    weight_rows = tl.minimum(rows, N - 1).to(tl.int64)
    if FORM.num_chunks == 1:
        cols = tl.arange(0, FORM.block_k)[None, :]
        weights = weight_ptr + weight_rows[:, None] * FORM.k + cols  # [BLOCK_N, BLOCK_K]
        xs = x_ptr + (tokens * x_stride)[:, None] + cols  # [NUM_TOKENS, BLOCK_K]
        live = (tokens < num_rows)[:, None]
        acc = tl.full((FORM.block_n, FORM.num_tokens), 0, tl.float32)
    else:
        cols = tl.arange(0, FORM.num_chunks)[:, None, None] * FORM.chunk + tl.arange(0, FORM.block_k)[None, None, :]
        weights = weight_ptr + weight_rows[None, :, None] * FORM.k + cols  # [NUM_CHUNKS, BLOCK_N, BLOCK_K]
        xs = x_ptr + (tokens * x_stride)[None, :, None] + cols
        live = (tokens < num_rows)[None, :, None]
        acc = tl.full((FORM.num_chunks, FORM.block_n, FORM.num_tokens), 0, tl.float32)
    # The last steps' weights come first, so that they and the loop's loads do not wait for one another.
    TAIL: tl.constexpr = FORM.chunk - FORM.ahead * FORM.block_k
    WHOLE: tl.constexpr = FORM.k == FORM.num_chunks * FORM.chunk
    last_w = _load_weights(weights, cols, FORM.chunk - FORM.block_k, FORM.k, WHOLE)
    if FORM.ahead == 2:
        tail_w = _load_weights(weights, cols, TAIL, FORM.k, WHOLE)
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    last_x = _load_rows(xs, cols, live, FORM.chunk - FORM.block_k, FORM.k, WHOLE)
    if FORM.ahead == 2:
        tail_x = _load_rows(xs, cols, live, TAIL, FORM.k, WHOLE)
    for start in tl.range(0, TAIL, FORM.block_k, num_stages=FORM.stages):
        w = _load_weights(weights, cols, start, FORM.k, WHOLE)
        acc = _add_product(w, _load_rows(xs, cols, live, start, FORM.k, WHOLE), acc, FORM.num_chunks)
    if FORM.ahead == 2:
        acc = _add_product(tail_w, tail_x, acc, FORM.num_chunks)
    acc = _add_product(last_w, last_x, acc, FORM.num_chunks)
    acc = add_chunks(acc, FORM.num_chunks)
    store_block(
        acc, tl.program_id(0), tokens, rows, bias_ptr, residual_ptr, out_ptr, num_rows, N, FORM.bias, FORM.residual,
        ACTIVATION, FORM.num_tokens, FORM.block_n,
    )  # fmt: skip


@jit
def _load_weights(weights, cols, start, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        w = tl.load(weights + start, eviction_policy="evict_first")
    else:
        w = tl.load(weights + start, mask=cols < K - start, other=0.0, eviction_policy="evict_first")
    return w


@jit
def _load_rows(xs, cols, live, start, K: tl.constexpr, WHOLE: tl.constexpr):
    return tl.load(xs + start, mask=live if WHOLE else live & (cols < K - start), other=0.0)


@jit
def _add_product(w, x, acc, NUM_CHUNKS: tl.constexpr):
    return tl.dot(w, x.T if NUM_CHUNKS == 1 else tl.trans(x, 0, 2, 1), acc)


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
    adapters: RowAdapters | None = None,  # only for one row or float32; not with `fixed_order`
    fixed_order: bool = False,  # one row, too, follows `sum_order`; not for float32
) -> torch.Tensor:
    """`skinny_gemm_torch` as one kernel with fp32 sums; x's rows may be strided."""
    (num_rows, size_in), size_out = x.shape, weight.shape[0]
    pdl = use_pdl(x)
    out = output_of(x, size_out if activation is None else size_out // 2, out_dtype, out, residual)
    one_by_one = (num_rows == 1 and not fixed_order) or x.dtype == torch.float32  # tensor cores lack fp32
    config = skinny_gemm_config(size_out, size_in, 1 if one_by_one else max(num_rows, 2))
    grid_n = -(-size_out // config.block_n)
    shared = pdl, size_in, bias is not None, residual is not None, config.block_n
    options = {"ACTIVATION": activation, "num_warps": config.num_warps, "launch_pdl": pdl}
    bias = x if bias is None else bias  # a pointer that the kernel does not read without BIAS
    if one_by_one:
        adapter_args, (end_0, end_1), rank, num_ranks = (x, x, x, x), (0, 0), 0, 0
        if adapters is not None:
            (rows, stacks, _), (end_0, end_1) = adapters, adapters.adapters.first_ends
            adapter_args = rows, stacks.a, stacks.b, stacks.results
            rank, num_ranks = stacks.rank, stacks.a.shape[1]
        block_k = max(min(config.block_k, next_power_of_2(size_in)), 8)
        # Adapters take more registers, which must not reduce the programs on a multiprocessor.
        max_registers = max(2 * config.block_n * block_k // (32 * config.num_warps), 64)
        result_k = min(next_power_of_2(size_in), _RESULT_COLUMNS * config.num_warps)
        _vector_kernel[(num_ranks + grid_n, num_rows)](
            x, weight, bias, x if norm_weight is None else norm_weight, out, *adapter_args, out, x.stride(0),
            end_0, end_1, num_rows, size_out, eps,
            VectorForm(*shared, block_k, config.stages, norm_weight is not None, rank, num_ranks, result_k),
            maxnreg=max_registers if rank else None, **options,
        )  # fmt: skip
        return out
    if norm_weight is not None:
        x = rms_norm_triton(x, norm_weight, eps)
    num_chunks, chunk = sum_order(size_out, size_in)
    ahead = min(config.ahead, chunk // config.block_k)
    _tile_kernel[(grid_n,)](
        x, weight, bias, out, out, x.stride(0), num_rows, size_out,
        TileForm(*shared, config.block_k, ahead, num_chunks, chunk, 8 if num_rows <= 8 else 16, config.stages),
        **options,
    )  # fmt: skip
    return out


def skinny_gemm_config(size_out: int, size_in: int, num_rows: int) -> SkinnyGemmConfig:
    """The measured configuration of a weight [size_out, size_in], or the rule for other shapes."""
    most = next(n for n in (1, 8, 16) if num_rows <= n)
    if (config := SKINNY_GEMM_CONFIGS.get((size_out, size_in, most))) is not None:
        return config
    if num_rows == 1:
        return SkinnyGemmConfig(block_n=4, block_k=1024, num_warps=4)
    return {
        1: SkinnyGemmConfig(block_n=32, block_k=128, num_warps=2, stages=4, ahead=2),
        2: SkinnyGemmConfig(block_n=16, block_k=128, num_warps=2, stages=6, ahead=2),
        4: SkinnyGemmConfig(block_n=16, block_k=128, num_warps=4, stages=4),
    }[sum_order(size_out, size_in).num_chunks]
