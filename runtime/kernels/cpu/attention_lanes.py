"""Attention of a tile of LANES tokens: a vector holds a number of each token, and keys and values are repeated.

Each lane meets the operations of `attention_rows.py` in the same order, so the bits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtime.kernels.cpu.attention_rows import LOWEST, Tile, adjusted, quotient
from runtime.kernels.cpu.kv_chunk import CHUNK, Chunk, seen_positions
from runtime.kernels.cpu.language import (
    Pointer,
    Value,
    array,
    bit,
    f32,
    fused,
    i32,
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
from runtime.kernels.cpu.mathematics import exp
from runtime.kernels.cpu.stored_numbers import LANES, KVForm, load_part, store_part

_HIDDEN = float("-inf")


class Lanes:
    """The queries of a tile, a vector for each head: the state of `attention_rows.Rows`, transposed."""

    tile: Tile
    scale: Value

    def __init__(self, form: KVForm, window: int, soft_cap: float, max_heads: int, vector_bytes: int) -> None:
        self.form, self.window, self.soft_cap = form, window, soft_cap
        self.size = form.num_vectors * LANES * LANES
        wide = vector_bytes == 64
        self._keys_at_once = 4 if wide and form.head_dim <= 128 else 2
        self._values_at_once = 8 if wide else 4
        self._queries, self._sums = array(f32, max_heads * self.size), array(f32, max_heads * self.size)
        self._weights = array(f32, max_heads * CHUNK * LANES)
        self._tops, self._highest, self._factors = (array(f32, max_heads * LANES) for _ in range(3))
        self._totals = array(f32, max_heads * LANES * LANES)  # of positions modulo LANES
        self._square = array(f32, LANES * LANES)

    def open(self, tile: Tile, scale: Value) -> None:
        self.tile, self.scale = tile, scale
        for i in loop(0, tile.heads * LANES, LANES):
            self._tops.store(i, number(LOWEST, f32(LANES)))
        for i in loop(0, tile.heads * (LANES * LANES), LANES):
            self._totals.store(i, zeros(f32(LANES)))
        for i in loop(0, tile.heads * self.size, LANES):
            self._sums.store(i, zeros(f32(LANES)))
        for head in loop(0, tile.heads):
            for first, count in self._blocks():
                own = tile.q + head * self.form.head_dim + first
                rows = [load_part(own + minimum(tile.count - 1, row) * tile.q_stride, 0, count) for row in range(LANES)]
                for i, vector in enumerate(_transposed(rows)):
                    self._queries.store(head * self.size + (first + i) * LANES, vector)

    def attend(self, base: Value, chunk: Chunk) -> None:
        """Add the chunk at position `base`."""
        tile = self.tile
        begin, end = seen_positions(base, tile.position, tile.count, self.window)
        first_end = seen_positions(base, tile.position, 1, self.window)[1]
        last_begin = seen_positions(base, tile.position + (tile.count - 1), 1, self.window)[0]
        masked = (first_end < end) | (begin < last_begin)
        for head in loop(0, tile.heads):
            self._score(head, base, chunk, end)
        for head in loop(0, tile.heads):
            self._weigh(head, chunk)
        for head in loop(0, tile.heads):
            with when(masked):
                self._add_values(head, base, chunk, begin, end, True)
            with when(masked.equals(number(0, bit))):
                self._add_values(head, base, chunk, begin, end, False)

    def finish(self, value_scale: Value) -> None:
        tile, square, factors = self.tile, self._square, self._factors
        for head in loop(0, tile.heads):
            totals = self._totals + head * (LANES * LANES)
            for i, vector in enumerate(_transposed([totals.load(j * LANES, LANES) for j in range(LANES)])):
                square.store(i * LANES, vector)
            for token in loop(0, tile.count):
                factors.store(token, quotient(value_scale, square.load(token * LANES, LANES)))
            for first, count in self._blocks():
                sums = self._sums + head * self.size + first * LANES
                for i, vector in enumerate(_transposed([sums.load(j * LANES, LANES) for j in range(LANES)])):
                    square.store(i * LANES, vector)
                for token in loop(0, tile.count):
                    out = tile.out + token * tile.out_stride + head * self.form.head_dim + first
                    store_part(out, 0, square.load(token * LANES, LANES) * factors.load(token).repeat(LANES), count)

    def _blocks(self) -> Iterator[tuple[Any, int]]:
        """The first of LANES numbers of a head, and how many there are."""
        whole, rest = divmod(self.form.head_dim, LANES)
        if whole:
            for first in loop(0, whole * LANES, LANES):
                yield first, LANES
        if rest:
            yield whole * LANES, rest

    def _score(self, head: Value, base: Value, chunk: Chunk, end: Value) -> None:
        step, weights, highest = self._keys_at_once, self._weights + head * (CHUNK * LANES), head * LANES
        highest = variable(number(LOWEST, f32(LANES)))
        queries = self._queries + head * self.size
        position = lane_numbers(LANES) + (self.tile.position - base).to(i32)  # of each token, in the chunk
        for group in loop(0, (end + (LANES - 1)) // LANES):
            keys, start = chunk.keys(group), group * LANES
            for key in loop(0, minimum(end - start, LANES), step):
                for i, scores in enumerate(self._products(queries, chunk, keys, key)):
                    at = start + key + i
                    key_scale = chunk.key_scales.load(at).repeat(LANES) if self.form.has_token_scales else None
                    scores = adjusted(scores, self.scale, key_scale, self.soft_cap)
                    scores = where(self._seen(at, position), scores, number(_HIDDEN, scores.type))
                    weights.store(at * LANES, scores)
                    highest.set(maximum(scores, highest.now))
        for key in loop((end + (step - 1)) // step * step, CHUNK):
            weights.store(key * LANES, number(_HIDDEN, f32(LANES)))
        self._highest.store(head * LANES, highest.now)

    def _seen(self, at: Value, position: Value) -> Value:
        """The tokens that see a position of the chunk."""
        key = at.to(i32).repeat(LANES)
        seen = key <= position
        return seen & (key > position - self.window) if self.window else seen

    def _products(self, queries: Pointer, chunk: Chunk, keys: Pointer, key: Value) -> list[Value]:
        """The products of all queries with neighbouring keys. `_sums_of_lanes` states the order of a sum."""
        count, head_dim, rows = self._keys_at_once, self.form.head_dim, keys + key * chunk.stride

        def of_lane(lane: int) -> list[Value]:
            totals: list[Value] = []
            for index in range(lane, head_dim, LANES):
                x = queries.load(index * LANES, LANES)
                factors = [chunk.number(rows, i, index) for i in range(count)]
                totals = (
                    [fused(x, y, t) for y, t in zip(factors, totals, strict=True)]
                    if totals
                    else [x * y for y in factors]
                )
            return totals or [zeros(f32(LANES))] * count

        def added(a: list[Value], b: list[Value]) -> list[Value]:
            return [x + y for x, y in zip(a, b, strict=True)]

        def of_group(group: int) -> list[Value]:
            first = 4 * group
            even = added(of_lane(first), of_lane(first + 2))
            return added(even, added(of_lane(first + 1), of_lane(first + 3)))

        even = added(of_group(0), of_group(2))
        return added(even, added(of_group(1), of_group(3)))

    def _weigh(self, head: Value, chunk: Chunk) -> None:
        """Weights from scores."""
        weights, totals, at = (
            self._weights + head * (CHUNK * LANES),
            self._totals + head * (LANES * LANES),
            head * LANES,
        )
        old = self._tops.load(at, LANES)
        top = maximum(self._highest.load(at, LANES), old)
        factor = exp(old - top)
        self._tops.store(at, top)
        self._factors.store(at, factor)
        for lane in loop(0, LANES):
            total = zeros(f32(LANES))
            for first in range(0, CHUNK, LANES):
                key = lane + first
                weight = exp(weights.load(key * LANES, LANES) - top)
                total = total + weight if first else weight
                if self.form.has_token_scales:
                    weight = weight * chunk.value_scales.load(key).repeat(LANES)
                weights.store(key * LANES, weight)
            totals.store(lane * LANES, fused(totals.load(lane * LANES, LANES), factor, total))

    def _add_values(self, head: Value, base: Value, chunk: Chunk, begin: Value, end: Value, masked: bool) -> None:
        sums, head_dim, step = self._sums + head * self.size, self.form.head_dim, self._values_at_once
        position = lane_numbers(LANES) + (self.tile.position - base).to(i32)
        whole = head_dim // step * step
        for first, count in ((0, step), (whole, head_dim - whole)):
            for index in loop(first, whole if first < whole else head_dim, step) if count else ():
                self._add_to(
                    sums + index * LANES, head, chunk, (index, count), (begin, end), position if masked else None
                )

    def _add_to(
        self,
        sums: Pointer,
        head: Value,
        chunk: Chunk,
        numbers: tuple[Value, int],  # the first and how many
        seen: tuple[Value, Value],
        position: Value | None,  # of each token; None if all see all
    ) -> None:
        """Add values times their weights to some numbers of a head."""
        weights, factor = self._weights + head * (CHUNK * LANES), self._factors.load(head * LANES, LANES)
        (index, count), (begin, end) = numbers, seen
        totals = [variable(sums.load(i * LANES, LANES) * factor) for i in range(count)]
        for group in loop(begin // LANES, (end + (LANES - 1)) // LANES):
            values, start = chunk.values(group), group * LANES
            for key in loop(maximum(begin - start, 0), minimum(end - start, LANES)):
                weight = weights.load((start + key) * LANES, LANES)
                sees = None if position is None else self._seen(start + key, position)
                for i, total in enumerate(totals):
                    now = total.now
                    added = fused(weight, chunk.number(values, key, index + i), now)
                    total.set(added if sees is None else where(sees, added, now))
        for i, total in enumerate(totals):
            sums.store(i * LANES, total.now)


def _transposed(rows: list[Value]) -> list[Value]:
    """LANES vectors of LANES: lane i of result j is lane j of row i."""
    for distance in (1, 2, 4, 8):
        low = [i if i & distance == 0 else LANES + i - distance for i in range(LANES)]
        high = [i + distance if i & distance == 0 else LANES + i for i in range(LANES)]
        rows = [
            rows[i].lanes_with(rows[i + distance], low)
            if i & distance == 0
            else rows[i - distance].lanes_with(rows[i], high)
            for i in range(LANES)
        ]
    return rows
