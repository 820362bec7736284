"""Kernels around attention over latents on a CPU: the twin of `latent_store_torch`, and the queries' rotary part."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.cpu.attention.rope_store import rotate
from runtime.kernels.cpu.attention.stored_numbers import LANES, KVForm
from runtime.kernels.cpu.rows import inverse_rms
from runtime.kernels.llvm.language import F32s, Float, I64s, Int, Pointer, U8s, Value, i64, loop, number, share, when


class LatentArguments(NamedTuple):
    """What `latent_store` reads and writes."""

    q: F32s  # [num_tokens, num_heads, head_dim], rows q_stride apart; its last rope_dim elements are rotated in place
    latents: F32s  # [num_tokens, form.head_dim], rows latents_stride apart; the rotary key is rotated in place
    table: F32s  # [2, positions, rope_dim]: cos, and sin with the first half negated
    positions: I64s  # [num_tokens]
    norm: F32s  # [rank]
    kv: U8s  # [positions, form.head_dim] of form.type
    kv_index: I64s  # [num_tokens]
    num_tokens: Int
    num_heads: Int
    head_dim: Int
    q_stride: Int
    latents_stride: Int
    sin_offset: Int  # numbers between cos and sin
    eps: Float


def latent_store(
    given: LatentArguments,
    part: Int,
    parts: Int,
    form: KVForm,
    rope_dim: int,
    interleaved: bool,  # dimension 2 i is rotated with 2 i + 1, else i with i + rope_dim / 2
) -> None:
    """Part i/n: a share of the pairs (token, head); the latent is the last head."""
    rank, heads = form.head_dim - rope_dim, given.num_heads + 1
    turn = _rotate_pairs if interleaved else rotate
    begin, end = share(given.num_tokens * heads, part, parts)
    for task in loop(begin, end):
        token, head = task // heads, task % heads
        cos = given.table + given.positions.load(token) * rope_dim
        with when(head < given.num_heads):
            turn(
                given.q + (token * given.q_stride + head * given.head_dim + (given.head_dim - rope_dim)),
                cos,
                given.sin_offset,
                rope_dim,
            )
        with when(head.equals(given.num_heads)):
            own = given.latents + token * given.latents_stride
            target = given.kv.of(form.type) + given.kv_index.load(token) * form.head_dim
            factor = inverse_rms(own, number(rank, i64), given.eps).repeat(LANES)
            for at in loop(0, rank, LANES):
                target.store(at, own.load(at, LANES) * factor * given.norm.load(at, LANES))
            turn(own + rank, cos, given.sin_offset, rope_dim)
            for at in loop(rank, form.head_dim):
                target.store(at, own.load(at))


def _rotate_pairs(own: Pointer, cos: Pointer, sin_offset: Value, rope_dim: int) -> None:
    """Rotate neighbours in place. The second half of a table row has the angles' sines as they are."""
    half = rope_dim // 2
    for pair in loop(0, half):
        first, second = own.load(pair * 2), own.load(pair * 2 + 1)
        cosine, sine = cos.load(pair + half), (cos + sin_offset).load(pair + half)
        own.store(pair * 2, first * cosine - second * sine)
        own.store(pair * 2 + 1, second * cosine + first * sine)


def copy_heads(
    x: F32s,  # [num_tokens, num_heads, head_dim], rows x_stride apart
    out: F32s,  # [num_tokens, num_heads, width]
    num_tokens: Int,
    num_heads: Int,
    head_dim: Int,
    x_stride: Int,
    width: Int,
    part: Int,
    parts: Int,
    first: int,  # first element in each head of x
    count: int,
    at: int,  # their place in a head of `out`
) -> None:
    """Copy some elements of each head. Part i/n: a share of the tokens."""
    begin, end = share(num_tokens, part, parts)
    for token in loop(begin, end):
        for head in loop(0, num_heads):
            source = x + (token * x_stride + head * head_dim + first)
            target = out + ((token * num_heads + head) * width + at)
            for index in loop(0, count):
                target.store(index, source.load(index))
