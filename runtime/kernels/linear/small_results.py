"""Results A x for a row's LoRA adapter, shared between one launch's programs.

The first programs of a product compute A x; the other programs wait for it after their own sums. A result is its own
flag: its place holds EMPTY_WORD until the result is stored. A one-row step clears all layers' places before
its first layer. Programs are scheduled in index order, so producers always run before the consumers that wait for them.
"""

from __future__ import annotations

from runtime.kernels.triton_language import constexpr, jit, tl

EMPTY_WORD = -0x7FFF8000  # 0x80008000, a denormal number; a result with these bits is stored as zero
_EMPTY = constexpr(EMPTY_WORD)


@jit
def make_result(
    result,  # where to store it
    x,  # [K], not yet RMS-normalised with NORM
    a,  # [K]: one row of A
    norm,  # [K], read with NORM
    has_adapter,  # if false, nothing is computed
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A whole program: one row of A, requested before the wait, times x."""
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
    """Wait for the results at these places [n, m], fp32; zeros where the mask is false."""
    bits = tl.load(places, mask=mask, other=0, volatile=True)
    while tl.max(tl.max((bits == _EMPTY).to(tl.int32), 1), 0) > 0:
        bits = tl.load(places, mask=mask, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)
