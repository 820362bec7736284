"""Each head's products with its own matrix: q with kv_b's key part, attended latents with its value part.

A step with few rows reads the matrices once, with many small programs. Each has its part of a matrix in registers
before the previous kernel ends. In deterministic mode tiles have one shape, and
all sums one order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl

_MANY = 64  # tokens from which tiles are large
_WHOLE_ROWS = 512  # matrix rows that fit into a program's registers


class HeadProductForm(NamedTuple):
    """Constants of `_head_product_kernel`."""

    k: int
    n: int
    k_stride: int  # distance of matrix rows
    n_stride: int  # distance of matrix columns
    block_m: int
    block_n: int
    block_k: int
    pdl: bool


@jit(do_not_specialize=["num_tokens"])
def _head_product_kernel(
    x_ptr,  # [num_tokens, num_heads, K], tokens x_stride and heads x_head_stride apart
    weight_ptr,  # each head's matrix [K, N], weight_stride apart
    out_ptr,  # [num_tokens, num_heads, N], tokens out_stride and heads out_head_stride apart
    num_tokens,
    x_stride,
    x_head_stride,
    weight_stride,
    out_stride,
    out_head_stride,
    FORM: tl.constexpr,  # `HeadProductForm`
):
    head = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0) * FORM.block_m + tl.arange(0, FORM.block_m)
    cols = tl.program_id(1) * FORM.block_n + tl.arange(0, FORM.block_n)
    ks = tl.arange(0, FORM.block_k)
    weights = weight_ptr + head * weight_stride + ks[:, None] * FORM.k_stride + cols[None, :] * FORM.n_stride
    xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + head * x_head_stride + ks[None, :]
    is_token, is_col = (tokens < num_tokens)[:, None], (cols < FORM.n)[None, :]
    WHOLE: tl.constexpr = FORM.block_k >= FORM.k
    if WHOLE:  # loaded before the wait: no kernel in a step writes weights
        whole = tl.load(weights, mask=is_col & (ks < FORM.k)[:, None], other=0.0)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.full([FORM.block_m, FORM.block_n], 0, tl.float32)
    if WHOLE:
        x = tl.load(xs, mask=is_token & (ks < FORM.k)[None, :], other=0.0)
        acc = tl.dot(x, whole, acc, input_precision="ieee")
    for start in range(FORM.k if WHOLE else 0, FORM.k, FORM.block_k):
        x = tl.load(xs + start, mask=is_token & (ks < FORM.k - start)[None, :], other=0.0)
        weight = tl.load(weights + start * FORM.k_stride, mask=is_col & (ks < FORM.k - start)[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    at = out_ptr + (tokens.to(tl.int64) * out_stride + head * out_head_stride)[:, None] + cols[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_token & is_col)


def head_product_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [num_tokens, num_heads, K] with each head's matrix [K, N]: [num_tokens, num_heads, N]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def head_product_triton(
    x: torch.Tensor, weight: torch.Tensor, deterministic: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`head_product_torch` as one kernel. x and `out` may have strided tokens and heads."""
    (num_tokens, num_heads, size_in), size_out = x.shape, weight.shape[2]
    if out is None:
        out = torch.empty((num_tokens, num_heads, size_out), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    block_m, block_n, block_k, warps, stages = _tile(num_tokens, size_in, x.dtype, deterministic)
    pdl = use_pdl(x)
    _head_product_kernel[(-(-num_tokens // block_m), -(-size_out // block_n), num_heads)](
        x, weight, out, num_tokens, x.stride(0), x.stride(1), weight.stride(0), out.stride(0), out.stride(1),
        FORM=HeadProductForm(
            k=size_in, n=size_out, k_stride=weight.stride(1), n_stride=weight.stride(2), block_m=block_m,
            block_n=block_n, block_k=block_k, pdl=pdl,
        ),
        num_warps=warps, num_stages=stages, **{"launch_pdl": True} if pdl else {},
    )  # fmt: skip
    return out


def _tile(num_tokens: int, size_in: int, dtype: torch.dtype, deterministic: bool) -> tuple[int, int, int, int, int]:
    """(tokens, columns and rows of a matrix that a program multiplies at a time, warps, pipeline stages)."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if deterministic or num_tokens < _MANY:
        return 16, 64 if size_in <= 256 else 32, min(max(16, next_power_of_2(size_in)), _WHOLE_ROWS), 4, 3
    return 128 if num_tokens >= 2 * _MANY else 64, 128, 64, 8, 3
