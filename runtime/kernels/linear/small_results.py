"""The small results A x of a row's adapter (LoRA), which the first programs of a product's launch make and the others
await when they have their own sums.

A result is its own flag: its place holds EMPTY_WORD until it has come. A step of one row clears the places of all maps
before its first layer. Programs start in the order of their numbers, so that those that make results never wait for
room that those that await them have.
"""

from __future__ import annotations

from runtime.kernels.triton_language import constexpr, jit, tl

EMPTY_WORD = -0x7FFF8000  # 0x80008000, a denormal number; a result that has its bits is kept as zero
_EMPTY = constexpr(EMPTY_WORD)


@jit
def make_result(
    result,  # its place
    x,  # [K], to be RMS-normalised with NORM
    a,  # [K]: a row of A
    norm,  # [K], read with NORM
    has_adapter,  # if not, nothing is made
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of a program: one row of A, requested before the wait, times x."""
    cols = tl.arange(0, BLOCK_K)
    weights = tl.load(a + cols, mask=cols < tl.where(has_adapter, K, 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if has_adapter:
        acc = tl.zeros((BLOCK_K,), tl.float32)
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            inside = cols < K - start
            values = tl.load(x + start + cols, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                squares += values * values
                values *= tl.load(norm + start + cols, mask=inside, other=0.0).to(tl.float32)
            acc += weights.to(tl.float32) * values
            if start + BLOCK_K < K:
                weights = tl.load(a + start + BLOCK_K + cols, mask=cols < K - start - BLOCK_K, other=0.0)
        total = tl.sum(acc, 0)
        if NORM:
            total *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
        bits = total.to(tl.int32, bitcast=True)
        tl.store(result, tl.where(bits == _EMPTY, 0, bits))


@jit
def await_results(places, mask):
    """The results at these places [n, m], fp32, when all have come; zeros where the mask is false."""
    bits = tl.load(places, mask=mask, other=0, volatile=True)
    while tl.max(tl.max((bits == _EMPTY).to(tl.int32), 1), 0) > 0:
        bits = tl.load(places, mask=mask, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)
