"""Attention over the paged cache of keys and values: softmax(q k^T * scale) v.

A tile is up to TILE neighbouring tokens of one row. The queries of a tile read each chunk of keys and values while it is
in the L1 cache, one query after the other. A query is computed in the same way in any tile: an online softmax (arXiv
1805.02867) over chunks of CHUNK absolute positions, from the first that has a visible position. Hidden positions are
skipped or get weight 0 before anything is multiplied. A token's bits therefore depend on nothing but its own q and the
keys and values that it sees."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from runtime.core.plan import Int32s
from runtime.kernels.cpu.language import (
    F32s,
    Float,
    I32s,
    Int,
    Pointer,
    U8s,
    Value,
    array,
    f16,
    f32,
    fused,
    i32,
    i64,
    lane_numbers,
    loop,
    maximum,
    minimum,
    number,
    share,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.cpu.mathematics import exp, tanh
from runtime.kernels.cpu.stored_numbers import LANES, KVForm, load_part, store_part

TILE = 8  # tokens
CHUNK = 64
_GROUPS = CHUNK // LANES
_LOWEST = -3.4e38  # finite: a token may see no position of its first chunk
_ACCUMULATORS = 8  # vectors of a weighted sum that are kept in registers


def attention(
    q: F32s,  # [num_tokens, num_heads, head_dim], rows q_stride apart
    kv: U8s,  # [2, num_kv_heads, num_positions, head_dim] of form.type
    scales: F32s,  # of the cache, if it is quantized
    tables: I32s,  # [rows, table_stride] blocks of each row
    tiles: I32s,  # [num_tiles, 4]: first token, number of tokens, row of the tables, position of the first token
    out: F32s,  # [num_tokens, num_heads * head_dim]
    q_stride: Int,
    num_positions: Int,  # of a head's cache
    table_stride: Int,
    num_tiles: Int,
    num_heads: Int,
    heads_per_task: Int,  # query heads of one kv head; divides `group`
    scale: Float,  # of scores
    part: Int,
    parts: Int,
    form: KVForm,
    group: int,  # query heads of a kv head
    window: int,  # positions that a token sees, itself included; 0 for all
    soft_cap: float,  # 0 for none
    max_heads: int,  # at least heads_per_task
) -> None:
    """Part i of n: a share of the pairs of a group of heads and a tile."""
    begin, end = share(num_heads // heads_per_task * num_tiles, part, parts)
    states = _States(form, TILE * max_heads)
    queries = _Queries(form, window, soft_cap, states)
    chunk = _Chunk(form, kv, scales, num_heads // group, num_positions)
    for task in loop(begin, end):
        head = task // num_tiles * heads_per_task
        tile = tiles + task % num_tiles * 4
        token, count, row, position = (tile.load(i).to(i64) for i in range(4))
        queries.scale = scale * chunk.open(head // group, tables + row * table_stride)
        states.reset(heads_per_task * count)
        first = maximum(position - (window - 1), 0) // CHUNK if window else 0
        for index in loop(first, (position + count - 1) // CHUNK + 1):
            base = index * CHUNK
            chunk.read(base, *queries.seen(base, position, count))
            for h in loop(0, heads_per_task):
                for t in loop(0, count):
                    begin_seen, end_seen = queries.seen(base, position + t, 1)
                    with when(begin_seen < end_seen):
                        own = q + ((token + t) * q_stride + (head + h) * form.head_dim)
                        queries.score(own, h * count + t, chunk, begin_seen, end_seen)
            for h in loop(0, heads_per_task):
                for t in loop(0, count):
                    begin_seen, end_seen = queries.seen(base, position + t, 1)
                    with when(begin_seen < end_seen):
                        queries.weigh(h * count + t, chunk, begin_seen, end_seen)
            for h in loop(0, heads_per_task):
                for t in loop(0, count):
                    begin_seen, end_seen = queries.seen(base, position + t, 1)
                    with when(begin_seen < end_seen):
                        queries.add_values(h * count + t, chunk, begin_seen, end_seen)
        for h in loop(0, heads_per_task):
            for t in loop(0, count):
                at = ((token + t) * num_heads + head + h) * form.head_dim
                states.finish(h * count + t, out + at, chunk.value_scale)


class _States:
    """Of each query of a tile: the largest score, the sum of weights, and the weighted sum of values."""

    def __init__(self, form: KVForm, count: int) -> None:
        self.form, self.size = form, form.num_vectors * LANES
        self._sums = array(f32, count * self.size)
        self._tops, self._totals = array(f32, count * LANES), array(f32, count * LANES)
        self._weights, self._factors = array(f32, count * CHUNK), array(f32, count * LANES)

    def reset(self, count: Value) -> None:
        for i in loop(0, count * LANES, LANES):
            self._tops.store(i, number(_LOWEST, f32(LANES)))
            self._totals.store(i, zeros(f32(LANES)))
        for i in loop(0, count * self.size, LANES):
            self._sums.store(i, zeros(f32(LANES)))

    def top(self, query: Value) -> Value:
        return self._tops.load(query * LANES, LANES)

    def update(self, query: Value, top: Value, factor: Value, weights: Value) -> None:
        self._tops.store(query * LANES, top)
        total = self._totals.load(query * LANES, LANES)
        self._totals.store(query * LANES, fused(total, factor, weights))
        self._factors.store(query * LANES, factor)

    def factor(self, query: Value) -> Value:
        return self._factors.load(query * LANES, LANES)

    def weights(self, query: Value) -> Pointer:
        return self._weights + query * CHUNK

    def sums(self, query: Value) -> Pointer:
        return self._sums + query * self.size

    def finish(self, query: Value, out: Pointer, value_scale: Value) -> None:
        total = self._totals.load(query * LANES, LANES).reduce(lambda a, b: a + b)
        factor, head_dim = (value_scale / total).repeat(LANES), self.form.head_dim
        for vector in range(self.form.num_vectors):
            at = vector * LANES
            store_part(out, at, self.sums(query).load(at, LANES) * factor, min(LANES, head_dim - at))


class _Chunk:
    """CHUNK positions of a kv head. Keys and values are read in place, or converted into memory of the task."""

    def __init__(self, form: KVForm, kv: Pointer, scales: Pointer, num_kv_heads: Value, num_positions: Value) -> None:
        self.form, self._scales, self._num_positions = form, scales, num_positions
        self._num_kv_heads, self._kv = num_kv_heads, kv.of(form.type)
        self.in_place = form.type == f32 and form.block_size % LANES == 0
        if self.in_place:
            self.stride = form.head_dim
            self._places = array(i64, _GROUPS)
        else:
            self.stride = form.num_vectors * LANES
            self._keys, self._values = array(f32, CHUNK * self.stride), array(f32, CHUNK * self.stride)
        if form.has_token_scales:
            self.key_scales, self.value_scales = array(f32, CHUNK), array(f32, CHUNK)

    def open(self, kv_head: Value, table: Pointer) -> Value:
        """Begin with the keys and values of a row. Return a factor of all scores."""
        form, head = self.form, kv_head * self._num_positions
        self._table, self._first = table, head
        self._head_keys = self._kv + head * form.head_dim
        self._head_values = self._head_keys + self._num_kv_heads * self._num_positions * form.head_dim
        self.value_scale = number(1.0, f32)
        if not form.has_head_scales:
            return number(1.0, f32)
        self.value_scale = self._scales.load(self._num_kv_heads + kv_head)
        return self._scales.load(kv_head)

    def read(self, base: Value, begin: Value, end: Value) -> None:
        """Read the positions from `begin` to `end` of the chunk at position `base`."""
        form = self.form
        if self.in_place:
            for group in loop(begin // LANES, (end + (LANES - 1)) // LANES):
                self._places.store(group, self._place(base + group * LANES) * form.head_dim)
            return
        for i in loop(begin, end):
            place = self._place(base + i)
            for source, target in ((self._head_keys, self._keys), (self._head_values, self._values)):
                row = source + place * form.head_dim
                for vector in range(form.num_vectors):
                    target.store(i * self.stride + vector * LANES, form.load(row, vector))
            if form.has_token_scales:
                pair = self._scales.of(f16) + (self._first + place) * 2
                for j, kept in enumerate((self.key_scales, self.value_scales)):
                    kept.store(i, pair.load(j).to(f32))

    def _place(self, position: Value) -> Value:
        size = self.form.block_size
        return self._table.load(position // size).to(i64) * size + position % size

    def keys(self, group: Value) -> Pointer:
        """The first of LANES keys."""
        if self.in_place:
            return self._head_keys + self._places.load(group)
        return self._keys + group * (LANES * self.stride)

    def values(self, group: Value) -> Pointer:
        if self.in_place:
            return self._head_values + self._places.load(group)
        return self._values + group * (LANES * self.stride)

    def load(self, row: Pointer, position: Any, vector: int) -> Value:
        """A vector of a key or a value, by its position within a group."""
        if self.in_place:
            return self.form.load(row + position * self.stride, vector)
        return row.load(position * self.stride + vector * LANES, LANES)


class _Queries:
    """One query and one chunk."""

    scale: Value

    def __init__(self, form: KVForm, window: int, soft_cap: float, states: _States) -> None:
        self.form, self.window, self.soft_cap, self.states = form, window, soft_cap, states

    def seen(self, base: Value, position: Value, count: Any) -> tuple[Value, Value]:
        """The positions of a chunk that some of `count` tokens see."""
        end = minimum(position + count - base, CHUNK)
        begin = maximum(position - (self.window - 1) - base, 0) if self.window else number(0, i64)
        return begin, end

    def score(self, q: Pointer, query: Value, chunk: _Chunk, begin: Value, end: Value) -> None:
        """The weights of a chunk's positions from `begin` to `end`, at least one."""
        memory, states, groups = self.states.weights(query), self.states, (begin // LANES, (end + (LANES - 1)) // LANES)
        own = [
            load_part(q, v * LANES, min(LANES, self.form.head_dim - v * LANES)) for v in range(self.form.num_vectors)
        ]
        highest = variable(number(_LOWEST, f32(LANES)))
        for group in loop(*groups):
            scores = self._masked(self._scores(own, chunk, group), group, begin, end)
            memory.store(group * LANES, scores)
            highest.set(maximum(scores, highest.now))
        states._factors.store(query * LANES, highest.now)

    def weigh(self, query: Value, chunk: _Chunk, begin: Value, end: Value) -> None:
        memory, states, groups = self.states.weights(query), self.states, (begin // LANES, (end + (LANES - 1)) // LANES)
        old = states.top(query)
        top = maximum(_largest(states.factor(query)), old)
        factor, total = exp(old - top), variable(zeros(f32(LANES)))
        for group in loop(*groups):
            weights = exp(memory.load(group * LANES, LANES) - top)
            total += weights
            if self.form.has_token_scales:
                weights = weights * chunk.value_scales.load(group * LANES, LANES)
            memory.store(group * LANES, weights)
        states.update(query, top, factor, total.now)

    def add_values(self, query: Value, chunk: _Chunk, begin: Value, end: Value) -> None:
        """Add the values of these positions, times their weights."""
        sums, factor, weights = self.states.sums(query), self.states.factor(query), self.states.weights(query)
        for first in range(0, self.form.num_vectors, _ACCUMULATORS):
            vectors = range(first, min(first + _ACCUMULATORS, self.form.num_vectors))
            totals = [variable(sums.load(v * LANES, LANES) * factor) for v in vectors]
            for group in loop(begin // LANES, (end + (LANES - 1)) // LANES):
                values, start = chunk.values(group), group * LANES
                for i in loop(maximum(begin - start, 0), minimum(end - start, LANES)):
                    weight = weights.load(start + i).repeat(LANES)
                    for vector, total in zip(vectors, totals, strict=True):
                        total.set(fused(weight, chunk.load(values, i, vector), total))
            for vector, total in zip(vectors, totals, strict=True):
                sums.store(vector * LANES, total.now)

    def _scores(self, own: list[Value], chunk: _Chunk, group: Value) -> Value:
        keys = chunk.keys(group)

        def products(key: int) -> Value:
            total = own[0] * chunk.load(keys, key, 0)
            for vector, x in enumerate(own[1:], 1):
                total = fused(x, chunk.load(keys, key, vector), total)
            return total

        scores = _sums_of_lanes(products) * self.scale
        if self.form.has_token_scales:
            scale = chunk.key_scales.load(group * LANES, LANES)
            scores = fused(scores, scale, scale * 0.0)  # a scale that is not finite stays so
        return tanh(scores * (1.0 / self.soft_cap)) * self.soft_cap if self.soft_cap else scores

    def _masked(self, scores: Value, group: Value, begin: Value, end: Value) -> Value:
        """-inf at hidden positions."""
        lanes, first = lane_numbers(LANES), (group * LANES).to(i32)
        hidden = lanes >= end.to(i32) - first
        if self.window:
            hidden = hidden | (lanes < begin.to(i32) - first)
        return where(hidden, number(float("-inf"), scores.type), scores)


def _largest(x: Value) -> Value:
    """The largest lane, in all lanes."""
    lanes = x.type.lanes
    for distance in (lanes >> i for i in range(1, lanes.bit_length())):
        x = maximum(x, x.lanes([i ^ distance for i in range(lanes)]))
    return x


def _sums_of_lanes(vector: Callable[[int], Value]) -> Value:
    """[LANES]: lane i is the sum of the lanes of vector i. The vectors are made when they are needed, so that few wait
    in registers.

    Lanes form four groups of four. Steps add lanes 0 and 2, 1 and 3 of each group, then the two sums, then groups 0 and
    2, 1 and 3, then these two."""

    def of_four(first: int) -> Value:
        a, b = (_added(vector(first + i), vector(first + i + 1), [0, 16, 1, 17], [2, 18, 3, 19]) for i in (0, 2))
        return _added(a, b, [0, 1, 16, 17], [2, 3, 18, 19])

    def of_eight(first: int) -> Value:
        return _added_groups(of_four(first), of_four(first + 4), (0, 1, 4, 5), (2, 3, 6, 7))

    return _added_groups(of_eight(0), of_eight(8), (0, 2, 4, 6), (1, 3, 5, 7))


def _added(a: Value, b: Value, left: list[int], right: list[int]) -> Value:
    """The sum of two selections of lanes, alike in all groups of four."""
    return sum_of(a, b, *([start + i for start in range(0, LANES, 4) for i in order] for order in (left, right)))


def _added_groups(a: Value, b: Value, left: tuple[int, ...], right: tuple[int, ...]) -> Value:
    """The sum of two selections of the eight groups of a and b."""
    return sum_of(a, b, *([4 * group + i for group in order for i in range(4)] for order in (left, right)))


def sum_of(a: Value, b: Value, left: list[int], right: list[int]) -> Value:
    """Lanes of a and b in one order plus those in another."""
    return a.lanes_with(b, left) + a.lanes_with(b, right)


def attention_tiles(starts: Int32s, counts: Int32s, tile: int = TILE) -> Int32s:
    """[num_tiles, 4], the tiles of a step: rows of `counts` tokens follow one another, from positions `starts`.

    Cheap and expensive tiles alternate, so that equal shares of the tiles take about equal time."""
    num_tiles = -(-counts // tile)
    row = np.repeat(np.arange(len(counts)), num_tiles)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile
    size, position = np.minimum(tile, counts[row] - done), starts[row] + done
    tiles = np.stack(((np.cumsum(counts) - counts)[row] + done, size, row, position), 1).astype(np.int32)
    rising = np.argsort((2 * position + size) * size, kind="stable")
    cheap = -(-len(row) // 2)
    order = np.empty_like(rising)
    order[0::2], order[1::2] = rising[:cheap], rising[cheap:][::-1]
    return np.ascontiguousarray(tiles[order])


def attention_words(
    q: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    heads_per_task: int,
    scale: float,
) -> Any:
    """The arguments of the kernel."""
    pointers = (0 if x is None else x.data_ptr() for x in (q, kv, scales, tables, tiles, out))
    numbers = q.stride(0), kv.shape[2] * kv.shape[3], tables.stride(0), len(tiles), q.shape[1], heads_per_task
    return (ctypes.c_int64 * 13)(*pointers, *numbers, float_word(scale))


def float_word(x: float) -> int:
    """A float32 argument as a word."""
    return int.from_bytes(struct.pack("<f", x), "little")
