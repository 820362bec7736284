"""One head's chunk of keys and values, as attention reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.kernels.cpu.attention.stored_numbers import LANES, KVForm
from runtime.kernels.llvm.language import Pointer, Value, array, f16, f32, i64, loop, maximum, minimum, number

CHUNK = 64  # positions; chunks begin at multiples of it


class Chunk:
    """CHUNK positions of a kv head. Keys and values are read in place, or converted into memory of the task."""

    def __init__(self, form: KVForm, kv: Pointer, scales: Pointer, num_kv_heads: Value, num_positions: Value) -> None:
        self.form, self._scales, self._num_positions = form, scales, num_positions
        self._num_kv_heads, self._kv = num_kv_heads, kv.of(form.type)
        self.in_place = form.type == f32 and form.block_size % LANES == 0
        if self.in_place:
            self.stride = form.head_dim
            self._places = array(i64, (CHUNK // LANES))
        else:
            self.stride = form.num_vectors * LANES
            self._keys = self._values = array(f32, CHUNK * self.stride)
            if not form.is_latent:
                self._values = array(f32, CHUNK * self.stride)
        if form.has_token_scales:
            self.key_scales, self.value_scales = array(f32, CHUNK), array(f32, CHUNK)

    def open(self, kv_head: Value, table: Pointer) -> Value:
        """Begin with the keys and values of a row. Return a factor of all scores."""
        form, head = self.form, kv_head * self._num_positions
        self._table, self._first = table, head
        self._head_keys = self._kv + head * form.head_dim
        self._head_values = self._head_keys
        if not form.is_latent:
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
            pairs = ((self._head_keys, self._keys), (self._head_values, self._values))
            for source, target in pairs[:1] if form.is_latent else pairs:
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

    def number(self, row: Pointer, position: Any, index: Any, lanes: int) -> Value:
        """One number of a key or a value, repeated."""
        return row.load(number(position, i64) * self.stride + index).repeat(lanes)

    def load(self, row: Pointer, position: Any, vector: int) -> Value:
        """A vector of a key or a value, by its position within a group."""
        if self.in_place:
            return self.form.load(row + position * self.stride, vector)
        return row.load(position * self.stride + vector * LANES, LANES)


class Bounds(NamedTuple):
    """Constants that hide positions before a token."""

    window: int  # positions that a token sees, itself included; 0 for all
    first_key: int  # first position that any token sees, below CHUNK

    @property
    def hide(self) -> bool:
        """True if a token may not see all positions before it."""
        return self.window + self.first_key > 0


def seen_positions(base: Value, position: Value, stop: Value, bounds: Bounds) -> tuple[Value, Value]:
    """Begin and end of a chunk's positions that neighbouring tokens see together: the first is at `position`, and the
    last sees the positions before `stop`."""
    begin, end = number(0, i64), minimum(stop - base, CHUNK)
    if bounds.window:
        begin = maximum(position - (bounds.window - 1) - base, 0)
    if bounds.first_key:
        begin = maximum(bounds.first_key - base, begin)
    return begin, end
