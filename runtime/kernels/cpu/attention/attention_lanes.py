"""Attention for a tile with LANES tokens: a vector holds one element per token, and keys and values are repeated.

Each lane meets the operations in `attention_rows.py` in the same order, so the bits are the same. Some heads are
computed together, so that they share each key or value element that is loaded."""

from __future__ import annotations

from typing import Any

from runtime.kernels.cpu.attention.attention_rows import LOWEST, Tile, adjusted, quotient
from runtime.kernels.cpu.attention.kv_chunk import CHUNK, Bounds, Chunk, seen_positions
from runtime.kernels.cpu.attention.stored_numbers import LANES, KVForm, load_part, store_part, vectors
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    Pointer,
    Value,
    array,
    bit,
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
from runtime.kernels.llvm.mathematics import exp

_HIDDEN = float("-inf")
_QUAD = 4  # lanes in a group of `_sums_of_lanes`


class Lanes:
    """A tile's queries, a vector for each head: the state of `attention_rows.Rows`, transposed."""

    tile: Tile
    scale: Value

    def __init__(
        self,
        form: KVForm,
        bounds: Bounds,
        soft_cap: float,
        heads: int,  # computed by a task at most
        together: int,  # heads computed at a time
        target: Target,
        has_images: bool,
    ) -> None:
        self.form, self.bounds, self.soft_cap, self.together = form, bounds, soft_cap, together
        self.size = form.num_vectors * LANES
        self.width = min(LANES, target.vector_bytes // 4)  # width of a register, in which products are computed
        registers = 12 if self.width == 8 else 16
        self._keys = 4 if 4 * together * self.width <= 8 * LANES else 2  # that are multiplied together
        self._values = max(n for n in (8, 4, 2) if n * together <= registers)
        head_size = self.size * LANES
        self._queries, self._weights = array(f32, heads * head_size), array(f32, heads * CHUNK * LANES)
        self._results = array(f32, heads * (head_size + LANES * LANES))  # sums: values, and weights by lane
        self._tops, self._highest, self._factors = (array(f32, heads * LANES) for _ in range(3))
        self._parts = array(f32, LANES // _QUAD * self._keys * together * self.width)
        self._rows = array(f32, LANES * (self.size + LANES))  # a head's results, token after token
        self._last_visible = array(i32, LANES) if has_images else None

    def open(self, tile: Tile, scale: Value, sinks: Pointer | None) -> None:
        self.tile, self.scale = tile, scale
        if self._last_visible is not None and tile.last_visible is not None:
            for i in loop(0, LANES):
                self._last_visible.store(i, tile.last_visible.load(minimum(tile.count - 1, i)))
        for i in loop(0, tile.heads * LANES, LANES):
            self._tops.store(i, number(LOWEST, f32(LANES)))
        for i in loop(0, tile.heads * ((self.size + LANES) * LANES), LANES):
            self._results.store(i, zeros(f32(LANES)))
        for head in loop(0, tile.heads):
            if sinks is not None:
                self._tops.store(head * LANES, sinks.load(head).repeat(LANES))
                self._totals(head).store(0, number(1.0, f32(LANES)))
            elif self.bounds.first_key:  # a token that sees nothing gets zeros
                with when(tile.end_seen(number(0, i64)) <= self.bounds.first_key):
                    self._totals(head).store(0, number(1.0, f32))
            for first, count in vectors(self.form.head_dim):
                own = tile.q + head * self.form.head_dim + first
                rows = [own + minimum(tile.count - 1, row) * tile.q_stride for row in range(LANES)]
                for index, vector in enumerate(_transposed([load_part(row, 0, count) for row in rows])):
                    self._queries.store((head * self.size + first + index) * LANES, vector)

    def attend(self, base: Value, chunk: Chunk) -> None:
        """Add the chunk at position `base`."""
        tile = self.tile
        begin, end = seen_positions(base, tile.position, tile.end_seen(tile.count - 1), self.bounds)
        for head in loop(0, tile.heads, self.together):
            for lane in loop(0, LANES, self.width):
                self._score(head, lane, base, chunk, begin, end)
        for head in loop(0, tile.heads):
            self._weigh(head, chunk, begin, end)
        for head in loop(0, tile.heads, self.together):
            for lane in loop(0, LANES, self.width):
                self._add_values(head, lane, base, chunk, begin, end)

    def finish(self, value_scale: Value) -> None:
        tile, head_dim, row_size = self.tile, self.form.head_dim, self.size + LANES
        for head in loop(0, tile.heads):
            for first in loop(0, row_size, LANES):
                block = self._results + (head * row_size + first) * LANES
                for i, vector in enumerate(_transposed([block.load(j * LANES, LANES) for j in range(LANES)])):
                    self._rows.store(first + i * row_size, vector)
            for token in loop(0, tile.count):
                row = self._rows + token * row_size
                out = tile.out + token * tile.out_stride + head * head_dim
                factor = quotient(value_scale, row.load(self.size, LANES)).repeat(LANES)
                for first, count in vectors(head_dim):
                    store_part(out, first, row.load(first, LANES) * factor, count)

    def _positions(self, base: Value, lane: Value) -> tuple[Value, Value]:
        """The position below the first one that each token sees, and the last one, for a register's lanes."""
        own = lane_numbers(self.width) + (self.tile.position - base + lane).to(i32)
        below, last = own - self.bounds.window, own
        if self.bounds.first_key:
            least = (self.bounds.first_key - 1 - base).to(i32).repeat(self.width)
            below = maximum(below, least) if self.bounds.window else least
        if self._last_visible is not None:
            last = self._last_visible.load(lane, self.width) - base.to(i32).repeat(self.width)
        return below, last

    def _sees(self, at: Value, tokens: tuple[Value, Value]) -> Value:
        """The tokens that see a position of the chunk."""
        key, (below, last) = at.to(i32).repeat(self.width), tokens
        return (key <= last) & (key > below) if self.bounds.hide else key <= last

    def _score(self, head: Value, lane: Value, base: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """Scores for a chunk's position groups that tokens see."""
        heads, step, width = range(self.together), self._keys, self.width
        weights = [self._weights + (head + h) * (CHUNK * LANES) + lane for h in heads]
        highest = [variable(number(LOWEST, f32(width))) for _ in heads]
        positions = self._positions(base, lane)
        for group in loop(begin // LANES, (end + (LANES - 1)) // LANES):
            keys, start = chunk.keys(group), group * LANES
            for key in loop(0, minimum(end - start, LANES), step):
                products = self._products(head, lane, chunk, keys + key * chunk.stride)
                for i in range(step):
                    at = start + key + i
                    key_scale = chunk.key_scales.load(at).repeat(width) if self.form.has_token_scales else None
                    hidden = self._sees(at, positions).equals(number(0, bit(width)))
                    for h in heads:
                        scores = adjusted(products[h][i], self.scale, key_scale, self.soft_cap)
                        scores = where(hidden, number(_HIDDEN, scores.type), scores)
                        weights[h].store(at * LANES, scores)
                        highest[h].set(maximum(scores, highest[h].now))
        for h in heads:
            for key in loop((end + (step - 1)) // step * step, (end + (LANES - 1)) // LANES * LANES):
                weights[h].store(key * LANES, number(_HIDDEN, f32(width)))
            self._highest.store((head + h) * LANES + lane, highest[h].now)

    def _products(self, head: Value, lane: Value, chunk: Chunk, keys: Pointer) -> list[list[Value]]:
        """Of each head the products with neighbouring keys. `_sums_of_lanes` states the order of a sum."""
        head_dim, size = self.form.head_dim, self._keys * self.together * self.width
        queries = [self._queries + (head + h) * (self.size * LANES) + lane for h in range(self.together)]

        def lane_vectors(first: Any) -> list[Value]:
            totals = [zeros(f32(self.width))] * (self._keys * self.together)
            for start in range(0, head_dim, LANES):
                index = first + start
                if isinstance(index, int) and index >= head_dim:
                    continue
                xs = [q.load(index * LANES, self.width) for q in queries]
                ys = [chunk.number(keys, i, index, self.width) for i in range(self._keys)]
                pairs = [(x, y) for x in xs for y in ys]
                totals = [fused(x, y, t) if start else x * y for (x, y), t in zip(pairs, totals, strict=True)]
            return totals

        groups = LANES // _QUAD
        for group in loop(0, groups) if head_dim % LANES == 0 else range(groups):
            lanes = [lane_vectors(group * _QUAD + i) for i in range(_QUAD)]
            sums = _added(_added(lanes[0], lanes[2]), _added(lanes[1], lanes[3]))
            for i, total in enumerate(sums):
                self._parts.store(group * size + i * self.width, total)
        parts = [
            [self._parts.load(group * size + i * self.width, self.width) for i in range(self._keys * self.together)]
            for group in range(groups)
        ]
        sums = _added(_added(parts[0], parts[2]), _added(parts[1], parts[3]))
        return [sums[h * self._keys : (h + 1) * self._keys] for h in range(self.together)]

    def _weigh(self, head: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """Weights from scores."""
        weights, at = self._weights + head * (CHUNK * LANES), head * LANES
        totals = self._totals(head)
        old = self._tops.load(at, LANES)
        top = maximum(self._highest.load(at, LANES), old)
        factor = exp(old - top)
        self._tops.store(at, top)
        self._factors.store(at, factor)
        for lane in loop(0, LANES):
            total = variable(zeros(f32(LANES)))
            for key in loop(begin // LANES * LANES + lane, (end + (LANES - 1)) // LANES * LANES, LANES):
                weight = exp(weights.load(key * LANES, LANES) - top)
                total += weight
                if self.form.has_token_scales:
                    weight = weight * chunk.value_scales.load(key).repeat(LANES)
                weights.store(key * LANES, weight)
            totals.store(lane * LANES, fused(totals.load(lane * LANES, LANES), factor, total.now))

    def _totals(self, head: Value) -> Pointer:
        """A head's weight sums, by position modulo LANES."""
        return self._results + (head * (self.size + LANES) + self.size) * LANES

    def _add_values(self, head: Value, lane: Value, base: Value, chunk: Chunk, begin: Value, end: Value) -> None:
        """Add values times their weights."""
        tile, head_dim, step = self.tile, self.form.head_dim, self._values
        first_end = seen_positions(base, tile.position, tile.end_seen(number(0, i64)), self.bounds)[1]
        last = tile.count - 1
        last_begin = seen_positions(base, tile.position + last, tile.end_seen(last), self.bounds)[0]
        last_begin, positions = minimum(last_begin, end), self._positions(base, lane)
        first_end = maximum(first_end, last_begin)
        parts: list[tuple[Value, Value, tuple[Value, Value] | None]]
        parts = [(last_begin, first_end, None), (first_end, end, positions)]  # seen by all tokens, and by some
        if self.bounds.window:
            parts.insert(0, (begin, last_begin, positions))
        whole = head_dim // step * step
        for index in loop(0, whole, step) if whole else ():
            self._add_numbers(head, lane, chunk, index, step, parts)
        if whole < head_dim:
            self._add_numbers(head, lane, chunk, number(whole, i64), head_dim - whole, parts)

    def _add_numbers(
        self,
        head: Value,
        lane: Value,
        chunk: Chunk,
        first: Value,  # element of a head
        count: int,
        parts: list[tuple[Value, Value, tuple[Value, Value] | None]],
    ) -> None:
        heads, width = range(self.together), self.width
        weights = [self._weights + (head + h) * (CHUNK * LANES) + lane for h in heads]
        sums = [self._results + ((head + h) * (self.size + LANES) + first) * LANES + lane for h in heads]
        factors = [self._factors.load((head + h) * LANES + lane, width) for h in heads]
        totals = [[variable(sums[h].load(i * LANES, width) * factors[h]) for i in range(count)] for h in heads]
        for begin, end, positions in parts:
            for group in loop(begin // LANES, (end + (LANES - 1)) // LANES):
                values, start = chunk.values(group), group * LANES
                for key in loop(maximum(begin - start, 0), minimum(end - start, LANES)):
                    each = [weights[h].load((start + key) * LANES, width) for h in heads]
                    sees = None if positions is None else self._sees(start + key, positions)
                    for i in range(count):
                        value = chunk.number(values, key, first + i, width)
                        for h in heads:
                            now = totals[h][i].now
                            added = fused(each[h], value, now)
                            totals[h][i].set(added if sees is None else where(sees, added, now))
        for h in heads:
            for i, total in enumerate(totals[h]):
                sums[h].store(i * LANES, total.now)


def _added(a: list[Value], b: list[Value]) -> list[Value]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _transposed(rows: list[Value]) -> list[Value]:
    """LANES vectors with LANES lanes: result j's lane i is row i's lane j."""
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
