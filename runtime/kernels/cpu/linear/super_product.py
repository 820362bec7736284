"""Products of weights with super scales, as K types have: integer scales multiply integer sums.

Rows in int16 have one scale for a super group. Its result is its float16 factors times exact integers, so few
operations are of floats. Rows in int8 have a scale for each chunk, because int8 loses ten times as much otherwise.
Operations follow the column order, and a row meets the same ones whatever the other rows are.

Many rows meet a weight in panels: a block's super group lies unpacked in the L1 cache while a panel's rows pass."""

from __future__ import annotations

from runtime.kernels.cpu.linear.dot import Dot, pair_dot, paired, stored_factors
from runtime.kernels.cpu.linear.product_memory import QUADS, Block, Results, RowTile, Scales, StoredRows, StoredWeight
from runtime.kernels.cpu.linear.weight_form import COLUMNS, QUAD, ROWS, WeightForm, row_span
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    Pointer,
    Value,
    Variable,
    array,
    f32,
    i16,
    i32,
    loop,
    minimum,
    u8,
    variable,
    zeros,
)

_PANEL = 64  # rows; their activations take 16 KiB in the L1 cache for each limb
_SUMS = 8  # vectors of integer sums that a tile keeps in registers


def multiply_super_blocks(
    target: Target,
    form: WeightForm,
    weight: StoredWeight,
    stored_rows: StoredRows,
    results: Results,
    blocks: tuple[Value, Value],  # begin and end
    first_row: Value,
    end_row: Value,
    is_one_row: bool,
) -> None:
    """Multiply some blocks of a weight with some rows."""
    lanes, per = min(ROWS, target.vector_bytes // 4), form.super_size // COLUMNS
    supers = stored_rows.num_chunks // per
    if is_one_row:
        for block in loop(*blocks):
            row = RowTile(stored_rows, first_row, 1, lanes)
            for half in range(ROWS // lanes):
                packed = _Packed(target, form, weight, block, half, lanes, stored_rows.num_chunks)
                total = variable(zeros(f32(lanes)))
                for index in loop(0, supers):
                    packed.move_to(index)
                    ((result,),) = _results(packed, row, index * per, [[total.now]])
                    total.set(result)
                results.write(first_row, block * ROWS + half * lanes, total.now)
        return
    unpacked, totals = _Unpacked(target, form, lanes), array(f32, _PANEL * ROWS)
    for begin in loop(first_row, end_row, _PANEL):
        end = minimum(begin + _PANEL, end_row)
        for block in loop(*blocks):
            packed = _Packed(target, form, weight, block, 0, ROWS, stored_rows.num_chunks)
            for at in loop(0, (end - begin) * ROWS, ROWS):
                totals.store(at, zeros(f32(ROWS)))
            for index in loop(0, supers):
                packed.move_to(index)
                unpacked.fill(packed)
                _add_panel(unpacked, stored_rows, begin, end, index * per, totals)
            for row_number in loop(begin, end):
                results.write(row_number, block * ROWS, totals.load((row_number - begin) * ROWS, ROWS))


def _add_panel(
    unpacked: _Unpacked, stored_rows: StoredRows, begin: Value, end: Value, first_chunk: Value, totals: Pointer
) -> None:
    """Add a super group's results for the rows of a panel to their totals."""
    lanes, halves = unpacked.lanes, ROWS // unpacked.lanes
    most, row = max(_SUMS // (halves * stored_rows.limbs), 1), variable(begin)
    for tile in (1 << i for i in reversed(range(most.bit_length()))):
        for first in loop(row.now, end - (tile - 1), tile):
            row.set(first + tile)
            own = [totals + (first - begin + m) * ROWS for m in range(tile)]
            before = [[each.load(half * lanes, lanes) for half in range(halves)] for each in own]
            after = _results(unpacked, RowTile(stored_rows, first, tile, lanes), first_chunk, before)
            for each, results in zip(own, after, strict=True):
                for half, result in enumerate(results):
                    each.store(half * lanes, result)


def _results(
    weight: _Packed | _Unpacked, rows: RowTile, first_chunk: Value, totals: list[list[Value]]
) -> list[list[Value]]:
    """Totals of each row and half, f32 [lanes], after a super group."""
    halves, chunks = len(totals[0]), weight.form.super_size // COLUMNS
    per = row_span(8 * rows.limbs, weight.form) // COLUMNS  # chunks that share a scale in x
    kinds = [
        [[variable(zeros(f32(weight.lanes))) for _ in range(halves)] for _ in range(rows.tile)]
        for _ in range(1 + weight.form.has_minimum)
    ]
    for begin in loop(0, chunks, per):
        for sums, more in zip(kinds, _span(weight, rows, first_chunk, (begin, begin + per), halves), strict=True):
            for m in range(rows.tile):
                scale = rows.scale(m, first_chunk + begin)
                for half in range(halves):
                    sums[m][half] += scale * more[m][half]
    results = [list(each) for each in totals]
    for half in range(halves):
        factor, *minimum_factor = weight.factors(half)
        for m in range(rows.tile):
            results[m][half] = results[m][half] + factor * kinds[0][m][half]
            for smallest in minimum_factor:
                results[m][half] = results[m][half] - smallest * kinds[1][m][half]
    return results


def _span(
    weight: _Packed | _Unpacked, rows: RowTile, first_chunk: Value, chunks: tuple[Value, Value], halves: int
) -> list[list[list[Value]]]:
    """A span's sums as floats, f32 [lanes] of each row and half: for scales, and perhaps for minimums."""
    offset = weight.form.offset

    def scaled(own: list[Variable], below: list[Variable]) -> Value:
        numbers = [a - b * offset if offset else a.now for a, b in zip(own, below, strict=True)]
        high, *low = (each.to(f32) for each in numbers)
        return high * 256.0 + low[0] if low else high

    def whole(below: list[Variable]) -> Value:
        return ((below[0] << 8) + below[1] if len(below) == 2 else below[0].now).to(f32)

    sums, belows = _integers(weight, rows, first_chunk, chunks, halves)
    kinds = [[[scaled(*pair) for pair in zip(*row, strict=True)] for row in zip(sums, belows, strict=True)]]
    return [*kinds, [[whole(below) for below in row] for row in belows]] if weight.form.has_minimum else kinds


_Sums = list[list[list[Variable]]]  # i32 [lanes] of each row, half and limb


def _integers(
    weight: _Packed | _Unpacked, rows: RowTile, first_chunk: Value, chunks: tuple[Value, Value], halves: int
) -> tuple[_Sums, _Sums]:
    """Two sums: values times scales; activations times minimums, or times scales without minimums."""
    form, target, lanes = weight.form, weight.target, weight.lanes
    sums, belows = (
        [[[variable(zeros(i32(lanes))) for _ in range(rows.limbs)] for _ in range(halves)] for _ in range(rows.tile)]
        for _ in range(2)
    )
    groups = COLUMNS // form.group_size
    for index in loop(*chunks):
        quads = [weight.quads(index, half) for half in range(halves)]
        for group in range(groups):
            dots = [
                [Dot(target, lanes, form.value_bits, rows.limbs, is_scaled=True) for _ in range(halves)]
                for _ in range(rows.tile)
            ]
            for quad in range(group * QUADS // groups, (group + 1) * QUADS // groups):
                for m in range(rows.tile):
                    x = rows.quad(m, first_chunk + index, quad)
                    for half in range(halves):
                        dots[m][half].add(quads[half][quad], x)
            for half in range(halves):
                scale = weight.scale(index, group, half)
                for m in range(rows.tile):
                    for total, more in zip(sums[m][half], dots[m][half].scaled_totals(scale), strict=True):
                        total += more
    for index in loop(*chunks):
        factors = [weight.pairs(index, half).bitcast(i16(2 * lanes)) for half in range(halves)]
        for m in range(rows.tile):
            for limb in range(rows.limbs):
                own = rows.half_sums(m, first_chunk + index, limb)
                for half in range(halves):
                    belows[m][half][limb] += pair_dot(target, own, factors[half])
    return sums, belows


class _Packed:
    """A block's super group as it is stored, or some rows of it. Chunk indices count from its first one."""

    def __init__(
        self, target: Target, form: WeightForm, weight: StoredWeight, block: Value, half: int, lanes: int, chunks: Value
    ) -> None:
        self.target, self.form, self.lanes = target, form, lanes
        self._block = Block(target, form, weight.values, block, half, lanes, chunks)
        self._scales = Scales(form, *weight[1:], block, half, lanes, chunks)

    def move_to(self, index: Value) -> None:
        """Take another super group of the block."""
        self._index, self._first = index, index * (self.form.super_size // COLUMNS)

    def factors(self, half: int) -> list[Value]:
        return self._scales.super_factors(self._index)

    def quads(self, index: Value, half: int) -> list[Value]:
        return self._block.quads(self._first + index)

    def scale(self, index: Value, group: int, half: int) -> Value:
        return stored_factors(self.target, self._stored(index, group, 0))

    def pairs(self, index: Value, half: int) -> Value:
        """Two factors for the sums of half chunks, as int16 in a word."""
        kind = 1 if self.form.has_minimum else 0
        groups = COLUMNS // self.form.group_size
        return paired(self._stored(index, 0, kind), self._stored(index, groups - 1, kind))

    def _stored(self, index: Value, group: int, kind: int) -> Value:
        groups = COLUMNS // self.form.group_size
        return self._scales.stored((self._first + index) * groups + group)[kind].to(i32)


class _Unpacked:
    """Memory for a block's super group, in the layout that a tile multiplies."""

    def __init__(self, target: Target, form: WeightForm, lanes: int) -> None:
        self.target, self.form, self.lanes = target, form, lanes
        self._groups = COLUMNS // form.group_size
        chunks = form.super_size // COLUMNS
        self._values = array(u8, chunks * COLUMNS * ROWS)
        self._scales, self._pairs = (array(i32, chunks * count * ROWS) for count in (self._groups, 1))
        self._factors = array(f32, (1 + form.has_minimum) * ROWS)

    def fill(self, packed: _Packed) -> None:
        for index in loop(0, self.form.super_size // COLUMNS):
            for quad, values in enumerate(packed.quads(index, 0)):
                self._values.store((index * QUADS + quad) * (QUAD * ROWS), values)
            for group in range(self._groups):
                self._scales.store((index * self._groups + group) * ROWS, packed.scale(index, group, 0))
            self._pairs.store(index * ROWS, packed.pairs(index, 0))
        for kind, factor in enumerate(packed.factors(0)):
            self._factors.store(kind * ROWS, factor)

    def factors(self, half: int) -> list[Value]:
        return [
            self._factors.load(kind * ROWS + half * self.lanes, self.lanes) for kind in range(1 + self.form.has_minimum)
        ]

    def quads(self, index: Value, half: int) -> list[Value]:
        first = index * (QUADS * QUAD * ROWS) + half * self.lanes * QUAD
        return [self._values.load(first + quad * (QUAD * ROWS), QUAD * self.lanes) for quad in range(QUADS)]

    def scale(self, index: Value, group: int, half: int) -> Value:
        return self._scales.load((index * self._groups + group) * ROWS + half * self.lanes, self.lanes)

    def pairs(self, index: Value, half: int) -> Value:
        return self._pairs.load(index * ROWS + half * self.lanes, self.lanes)
