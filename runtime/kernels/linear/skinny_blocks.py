"""Blocks in kernels for few rows: a block's weight rows, its chunk sum, and its stored result."""

from __future__ import annotations

from runtime.kernels.norm.gated_activation import gated_by
from runtime.kernels.triton_language import jit, tl


@jit
def weight_rows_of_block(block, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight rows [BLOCK_N] of a block."""
    return weight_rows(block * BLOCK_N + tl.arange(0, BLOCK_N), N, ACTIVATION)


@jit
def weight_rows(rows, N, ACTIVATION: tl.constexpr):
    """The rows as a product takes them: with an activation, gate and up rows alternate."""
    if ACTIVATION is not None:
        rows = rows // 2 + rows % 2 * (N // 2)
    return rows


@jit
def request_weights(weights, cols, start, K: tl.constexpr):
    """Weights from column `start`, zero from column K, which are read once."""
    return tl.load(weights + start, mask=cols < K - start, other=0.0, eviction_policy="evict_first")


@jit
def sums_of_eights(product):
    """Sum 8 neighbouring columns: [rows, columns] to [rows, columns // 8].

    A thread holds 8 columns of a 16-bit weight, 16 bytes. It sums them at once and keeps an eighth of the registers."""
    return tl.sum(tl.reshape(product, (product.shape[0], product.shape[1] // 8, 8)), 2)


@jit
def vector_product(
    w,  # [BLOCK_N, BLOCK_K]: the first weights, requested before
    next_w,  # the second step's weights, used with AHEAD 2
    weights,  # where the first weights are
    xs,  # [1, BLOCK_K]: where x's first columns are
    norm_ptr,  # [K], read with NORM
    cols,  # [1, BLOCK_K], from 0
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps from a load of the weight to its use, 1 or 2
):
    """Weight rows [BLOCK_N, K] times one row of x on the FMA units, fp32 [BLOCK_N]; with NORM, times its RMS norm."""
    acc = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    squares = tl.zeros((1, BLOCK_K // 8), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(xs + start, mask=cols < K - start, other=0.0).to(tl.float32)
        if NORM:
            squares += sums_of_eights(x * x)
            x *= tl.load(norm_ptr + start + cols, mask=cols < K - start, other=0.0).to(tl.float32)
        product = w.to(tl.float32) * x
        ahead = start + AHEAD * BLOCK_K
        if AHEAD == 2:
            w = next_w
        if ahead < K:
            next_w = request_weights(weights, cols, ahead, K)
        if AHEAD == 1:
            w = next_w
        acc += sums_of_eights(product)
    y = tl.sum(acc, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    return y


@jit
def add_chunks(acc, NUM_CHUNKS: tl.constexpr):
    """The sums of chunks [NUM_CHUNKS, BLOCK_N, NUM_TOKENS], added in ascending order."""
    if NUM_CHUNKS == 1:
        total = acc
    elif NUM_CHUNKS == 2:
        first, second = tl.split(tl.permute(acc, (1, 2, 0)))
        total = first + second
    elif NUM_CHUNKS == 4:
        even, odd = tl.split(tl.permute(tl.reshape(acc, (2, 2, acc.shape[1], acc.shape[2])), (2, 3, 0, 1)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = ((first + second) + third) + fourth
    else:
        parts = tl.permute(tl.reshape(acc, (2, 2, 2, acc.shape[1], acc.shape[2])), (3, 4, 0, 1, 2))
        even, odd = tl.split(parts)
        low_even, high_even = tl.split(even)  # chunks 0 and 4, 2 and 6
        low_odd, high_odd = tl.split(odd)
        first, fifth = tl.split(low_even)
        third, seventh = tl.split(high_even)
        second, sixth = tl.split(low_odd)
        fourth, eighth = tl.split(high_odd)
        total = ((((((first + second) + third) + fourth) + fifth) + sixth) + seventh) + eighth
    return total


@jit
def plus(y, other):
    """y + other, both [BLOCK_N, NUM_TOKENS] fp32, as one rounding of the sum.

    Triton turns a plain sum with a single tl.dot into a dot that begins with the other number. Products of many rows
    have their dot in a loop and add the number afterwards, which rounds otherwise."""
    return tl.fma(y, tl.full(y.shape, 1.0, tl.float32), tl.broadcast_to(other, y.shape))


@jit
def store_block(
    y,  # [BLOCK_N, NUM_TOKENS] fp32: the block's weight rows times x.T
    block,
    tokens,  # [NUM_TOKENS]
    rows,  # [BLOCK_N], from `weight_rows_of_block`
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
    """Add the bias, apply the activation, add the residual, and store."""
    if BIAS:
        y = plus(y, tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)[:, None])
    width = N
    cols = rows
    if ACTIVATION is not None:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)  # rounds like a separate activation kernel
        gate, up = tl.split(tl.trans(tl.reshape(y, (BLOCK_N // 2, 2, NUM_TOKENS)), 0, 2, 1))
        y = gated_by(gate, up, ACTIVATION)
        width = N // 2
        cols = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    at = tokens[None, :] * width + cols[:, None]
    inside = (tokens < num_rows)[None, :] & (cols < width)[:, None]
    if RESIDUAL:
        y = plus(y, tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
