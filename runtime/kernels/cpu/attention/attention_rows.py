"""Attention for few tokens: one query after the other, in vectors of neighbouring key or value elements.

A score is a sum of LANES partial sums, added as `_sums_of_lanes` does; `attention_lanes.py` computes the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runtime.kernels.cpu.attention.kv_chunk import CHUNK, Bounds, Chunk, seen_positions
from runtime.kernels.cpu.attention.stored_numbers import LANES, KVForm, load_part, store_part
from runtime.kernels.llvm.language import (
    Pointer,
    Value,
    array,
    f32,
    fused,
    i32,
    i64,
    lane_numbers,
    loop,
    maximum,
    minimum,
    number,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import exp, tanh

LOWEST = -3.4e38  # finite: a token may see no position in its first chunk
_ACCUMULATORS = 8  # vectors in a weighted sum that are kept in registers


class Tile:
    """One row's neighbouring tokens, and one kv head's query heads."""

    def __init__(
        self,
        q: Pointer,
        q_stride: Value,
        out: Pointer,
        out_stride: Value,
        position: Value,
        count: Value,
        heads: Value,
        last_visible: Pointer | None,  # the last position that each token sees; None for its own
    ) -> None:
        self.q, self.q_stride, self.out, self.out_stride = q, q_stride, out, out_stride
        self.position, self.count, self.heads = position, count, heads  # the first token's position; tokens; heads
        self.last_visible = last_visible

    def end_seen(self, token: Value) -> Value:
        """The position behind the last one that a token sees."""
        if self.last_visible is None:
            return self.position + token + 1
        return self.last_visible.load(token).to(i64) + 1


def adjusted(scores: Value, scale: Value, key_scale: Value | None, soft_cap: float) -> Value:
    """Scores with their scale, perhaps times the scale of keys, and with the soft cap."""
    scores = scores * scale
    if key_scale is not None:
        scores = fused(scores, key_scale, key_scale * 0.0)  # a scale that is not finite stays so
    return tanh(scores * (1.0 / soft_cap)) * soft_cap if soft_cap else scores


class Rows:
    """A tile's queries: each has its largest score, weight sum, and weighted value sum."""

    tile: Tile
    scale: Value

    def __init__(self, form: KVForm, bounds: Bounds, soft_cap: float, count: int) -> None:
        self.form, self.bounds, self.soft_cap = form, bounds, soft_cap
        self.size = form.num_vectors * LANES
        self._sums, self._weights = array(f32, count * self.size), array(f32, count * CHUNK)
        self._tops, self._totals, self._factors = (array(f32, count * LANES) for _ in range(3))

    def open(self, tile: Tile, scale: Value, sinks: Pointer | None) -> None:
        self.tile, self.scale = tile, scale
        count = tile.heads * tile.count
        for i in loop(0, count * LANES, LANES):
            self._tops.store(i, number(LOWEST, f32(LANES)))
            self._totals.store(i, zeros(f32(LANES)))
        if sinks is not None:
            for head in loop(0, tile.heads):
                for query in loop(head * tile.count, (head + 1) * tile.count):
                    self._tops.store(query * LANES, sinks.load(head).repeat(LANES))
                    self._totals.store(query * LANES, number(1.0, f32))
        elif self.bounds.first_key:  # a token that sees nothing gets zeros
            with when(tile.end_seen(number(0, i64)) <= self.bounds.first_key):
                for head in loop(0, tile.heads):
                    self._totals.store(head * tile.count * LANES, number(1.0, f32))
        for i in loop(0, count * self.size, LANES):
            self._sums.store(i, zeros(f32(LANES)))

    def attend(self, base: Value, chunk: Chunk) -> None:
        """Add the chunk at position `base`."""
        for head, token, query, seen in self._queries(base):
            own = self.tile.q + token * self.tile.q_stride + head * self.form.head_dim
            self._score(own, query, chunk, *seen)
        for _, _, query, seen in self._queries(base):
            self._weigh(query, chunk, *seen)
        for _, _, query, seen in self._queries(base):
            self._add_values(query, chunk, *seen)

    def finish(self, value_scale: Value) -> None:
        head_dim, tile = self.form.head_dim, self.tile
        for head in loop(0, tile.heads):
            for token in loop(0, tile.count):
                query = head * tile.count + token
                out = tile.out + token * tile.out_stride + head * head_dim
                factor = quotient(value_scale, self._totals.load(query * LANES, LANES)).repeat(LANES)
                for vector in range(self.form.num_vectors):
                    at = vector * LANES
                    value = self._sums.load(query * self.size + at, LANES) * factor
                    store_part(out, at, value, min(LANES, head_dim - at))

    def _queries(self, base: Value) -> Iterator[tuple[Value, Value, Value, tuple[Value, Value]]]:
        """Head, token, index and seen positions for each query that sees a part of a chunk."""
        for head in loop(0, self.tile.heads):
            for token in loop(0, self.tile.count):
                position, stop = self.tile.position + token, self.tile.end_seen(token)
                begin, end = seen_positions(base, position, stop, self.bounds)
                with when(begin < end):
                    yield head, token, head * self.tile.count + token, (begin, end)

    def _score(self, q: Pointer, query: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """The scores of a chunk's positions from `begin` to `end`, at least one."""
        head_dim, memory = self.form.head_dim, self._weights + query * CHUNK
        own = [load_part(q, v * LANES, min(LANES, head_dim - v * LANES)) for v in range(self.form.num_vectors)]
        highest = variable(number(LOWEST, f32(LANES)))
        for group in _groups(begin, end):
            key_scale = chunk.key_scales.load(group * LANES, LANES) if self.form.has_token_scales else None
            scores = adjusted(_products(own, chunk, group), self.scale, key_scale, self.soft_cap)
            scores = self._masked(scores, group, begin, end)
            memory.store(group * LANES, scores)
            highest.set(maximum(scores, highest.now))
        self._factors.store(query * LANES, highest.now)

    def _masked(self, scores: Value, group: Value, begin: Value, end: Value) -> Value:
        """-inf at hidden positions."""
        lanes, first = lane_numbers(LANES), (group * LANES).to(i32)
        hidden = lanes >= end.to(i32) - first
        if self.bounds.hide:
            hidden = hidden | (lanes < begin.to(i32) - first)
        return where(hidden, number(float("-inf"), scores.type), scores)

    def _weigh(self, query: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """Weights from scores."""
        memory, at = self._weights + query * CHUNK, query * LANES
        old = self._tops.load(at, LANES)
        top = maximum(_largest(self._factors.load(at, LANES)), old)
        factor, total = exp(old - top), variable(zeros(f32(LANES)))
        for group in _groups(begin, end):
            weights = exp(memory.load(group * LANES, LANES) - top)
            total += weights
            if self.form.has_token_scales:
                weights = weights * chunk.value_scales.load(group * LANES, LANES)
            memory.store(group * LANES, weights)
        self._tops.store(at, top)
        self._factors.store(at, factor)
        self._totals.store(at, fused(self._totals.load(at, LANES), factor, total.now))

    def _add_values(self, query: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """Add values times their weights."""
        sums, weights = self._sums + query * self.size, self._weights + query * CHUNK
        factor = self._factors.load(query * LANES, LANES)
        for first in range(0, self.form.num_vectors, _ACCUMULATORS):
            vectors = range(first, min(first + _ACCUMULATORS, self.form.num_vectors))
            totals = [variable(sums.load(v * LANES, LANES) * factor) for v in vectors]
            for group in _groups(begin, end):
                values, start = chunk.values(group), group * LANES
                for i in loop(maximum(begin - start, 0), minimum(end - start, LANES)):
                    weight = weights.load(start + i).repeat(LANES)
                    for vector, total in zip(vectors, totals, strict=True):
                        total.set(fused(weight, chunk.load(values, i, vector), total))
            for vector, total in zip(vectors, totals, strict=True):
                sums.store(vector * LANES, total.now)


def quotient(value_scale: Value, totals: Value) -> Value:
    """The factor for the weighted value sum, from the weight sums by position modulo LANES."""
    return value_scale / totals.reduce(lambda a, b: a + b)


def _groups(begin: Value, end: Value) -> Iterator[Value]:
    return loop(begin // LANES, (end + (LANES - 1)) // LANES)


def _products(own: list[Value], chunk: Chunk, group: Value) -> Value:
    """The products of a query with LANES keys."""
    keys = chunk.keys(group)

    def product(key: int) -> Value:
        total = own[0] * chunk.load(keys, key, 0)
        for vector, x in enumerate(own[1:], 1):
            total = fused(x, chunk.load(keys, key, vector), total)
        return total

    return _sums_of_lanes(product)


def _largest(x: Value) -> Value:
    """The largest lane, in all lanes."""
    lanes = x.type.lanes
    for distance in (lanes >> i for i in range(1, lanes.bit_length())):
        x = maximum(x, x.lanes([i ^ distance for i in range(lanes)]))
    return x


def _sums_of_lanes(vector: Callable[[int], Value]) -> Value:
    """Return [LANES]: lane i is the sum over vector i's lanes. The vectors are made when they are needed, so that few
    wait in registers.

    Lanes form four groups of four. Steps add each group's lanes 0 and 2, 1 and 3, then the two sums, then groups 0 and
    2, 1 and 3, then these two."""

    def sum_four(first: int) -> Value:
        a, b = (_added(vector(first + i), vector(first + i + 1), [0, 16, 1, 17], [2, 18, 3, 19]) for i in (0, 2))
        return _added(a, b, [0, 1, 16, 17], [2, 3, 18, 19])

    def sum_eight(first: int) -> Value:
        return _added_groups(sum_four(first), sum_four(first + 4), (0, 1, 4, 5), (2, 3, 6, 7))

    return _added_groups(sum_eight(0), sum_eight(8), (0, 2, 4, 6), (1, 3, 5, 7))


def _added(a: Value, b: Value, left: list[int], right: list[int]) -> Value:
    """The sum of two lane selections, alike in each four lanes."""
    return _sum_of(a, b, *([start + i for start in range(0, LANES, 4) for i in order] for order in (left, right)))


def _added_groups(a: Value, b: Value, left: tuple[int, ...], right: tuple[int, ...]) -> Value:
    """The sum of two selections among the eight groups in a and b."""
    return _sum_of(a, b, *([4 * group + i for group in order for i in range(4)] for order in (left, right)))


def _sum_of(a: Value, b: Value, left: list[int], right: list[int]) -> Value:
    """Lanes of a and b in one order plus those in another."""
    return a.lanes_with(b, left) + a.lanes_with(b, right)
