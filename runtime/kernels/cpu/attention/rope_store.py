"""Rotary positions for q and k, and storing k and v in the paged cache: the twin of `rope_store_kv_torch`."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.cpu.attention.stored_numbers import LANES, KVForm, load_part, store_part
from runtime.kernels.llvm.language import (
    F32s,
    Float,
    I64s,
    Int,
    Pointer,
    U8s,
    Value,
    absolute,
    f16,
    f32,
    i32,
    loop,
    maximum,
    minimum,
    number,
    rounded,
    share,
    square_root,
    u32,
    when,
    where,
    where_to,
)


class RopeArguments(NamedTuple):
    """What `rope_store` reads and writes."""

    # [num_tokens, num_heads + 2 * num_kv_heads, head_dim], or q alone without `stores`; rows qkv_stride apart; q is
    # rotated in place.
    qkv: F32s
    table: F32s  # [2, positions, head_dim]: cos, and sin with the first half negated
    positions: I64s  # [num_tokens]
    kv: U8s  # [2, num_kv_heads, positions, head_dim] of form.type, heads cache_positions apart
    scales: U8s  # a quantized cache's scales
    kv_index: I64s  # [num_tokens]
    q_norm: F32s  # [head_dim], read if has_norms
    k_norm: F32s
    num_tokens: Int
    num_heads: Int
    num_kv_heads: Int
    qkv_stride: Int
    sin_offset: Int  # numbers between cos and sin
    cache_positions: Int
    eps: Float


def rope_store(
    given: RopeArguments, part: Int, parts: Int, form: KVForm, has_norms: bool, has_v_norm: bool, stores: bool
) -> None:
    """Part i/n: a share of the pairs (token, head)."""
    heads = given.num_heads + given.num_kv_heads * 2 if stores else given.num_heads
    begin, end = share(given.num_tokens * heads, part, parts)
    for task in loop(begin, end):
        token, head = task // heads, task % heads
        own = given.qkv + (token * given.qkv_stride + head * form.head_dim)
        position = given.positions.load(token)
        with when(head < given.num_heads + given.num_kv_heads):
            is_q = head < given.num_heads
            weight = where_to(is_q, given.q_norm, given.k_norm) if has_norms else None
            if weight is not None:
                _norm(own, weight, given.eps, form.head_dim)
            rotate(own, given.table + position * form.head_dim, given.sin_offset, form.head_dim)
        if not stores:
            continue
        if has_v_norm:
            with when(head >= given.num_heads + given.num_kv_heads):
                _norm(own, None, given.eps, form.head_dim)
        with when(head >= given.num_heads):
            kv_head = head - given.num_heads  # k heads, then v heads
            at = given.kv.of(form.type) + (kv_head * given.cache_positions + given.kv_index.load(token)) * form.head_dim
            scale = given.scales.of(f32) + kv_head
            if form.has_token_scales:
                is_value = kv_head >= given.num_kv_heads
                own_head = where(is_value, kv_head - given.num_kv_heads, kv_head)
                place = (own_head * given.cache_positions + given.kv_index.load(token)) * 2
                scale = given.scales.of(f16) + where(is_value, place + 1, place)
            _store(form, own, at, scale)


def _parts(head_dim: int) -> list[tuple[int, int]]:
    """Vectors of a head: first number and count."""
    return [(at, min(LANES, head_dim - at)) for at in range(0, head_dim, LANES)]


def _norm(own: Pointer, weight: Pointer | None, eps: Value, head_dim: int) -> None:
    """Norm a head in place."""
    numbers = [load_part(own, at, count) for at, count in _parts(head_dim)]
    total = numbers[0] * numbers[0]
    for each in numbers[1:]:
        total = total + each * each
    mean = total.reduce(lambda a, b: a + b) / float(head_dim)
    factor = (1.0 / square_root(mean + eps)).repeat(LANES)
    for (at, count), each in zip(_parts(head_dim), numbers, strict=True):
        normed = each * factor if weight is None else each * factor * load_part(weight, at, count)
        store_part(own, at, normed, count)


def rotate(own: Pointer, cos: Pointer, sin_offset: Value, head_dim: int) -> None:
    """Rotate a head in place."""
    half = head_dim // 2
    vectors = [(at, min(LANES, half - at)) for at in range(0, half, LANES)]
    pairs = [(load_part(own, at, count), load_part(own, half + at, count)) for at, count in vectors]
    for (at, count), (low, high) in zip(vectors, pairs, strict=True):
        for first, x, other in ((at, low, high), (half + at, high, low)):
            cosines, sines = load_part(cos, first, count), load_part(cos + sin_offset, first, count)
            store_part(own, first, x * cosines + other * sines, count)


def _store(form: KVForm, own: Pointer, at: Pointer, scale: Pointer) -> None:
    """Store a k or v head, and its scale if it has its own."""
    parts = _parts(form.head_dim)
    numbers = [load_part(own, first, count) for first, count in parts]
    if form.has_head_scales:
        inverse = 1.0 / scale.load()
        numbers = [_to_e4m3(each * inverse) for each in numbers]
    elif form.has_token_scales:
        largest = absolute(numbers[0]).bitcast(i32(LANES))
        for each in numbers[1:]:
            largest = maximum(largest, absolute(each).bitcast(i32(LANES)))
        scale.store(0, largest.reduce(maximum).bitcast(f32) / 127.0)
        own_scale = scale.load().to(f32)
        inverse = where(own_scale > 0.0, 1.0 / own_scale, 0.0 * own_scale)
        numbers = [minimum(maximum(rounded(each * inverse), -127.0), 127.0).to(i32) for each in numbers]
    for (first, count), each in zip(parts, numbers, strict=True):
        store_part(at, first, each, count)


def _to_e4m3(x: Value) -> Value:
    """The nearest e4m3 byte, half to even, within 448; NaN stays NaN."""
    lanes = x.type.lanes
    raw = minimum(maximum(x, -448.0), 448.0).bitcast(u32(lanes))
    size, sign = raw & 0x7FFFFFFF, (raw >> 24) & 0x80
    normal = ((size + (((size >> 20) & 1) + 0x7FFFF)) >> 20) - (120 << 3)
    small = rounded(size.bitcast(f32(lanes)) * 512.0).to(i32).bitcast(u32(lanes))  # steps of 2 ** -9
    byte = where(size < (121 << 23), small, normal)
    is_nan = (x.bitcast(u32(lanes)) & 0x7FFFFFFF) > 0x7F800000
    return where(is_nan, number(0x7F, u32(lanes)), byte) | sign
