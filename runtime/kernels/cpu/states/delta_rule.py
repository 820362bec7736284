"""The gated delta rule on a CPU: the twin of `delta_rule_torch`, for float32 rows.

A prompt's tokens, too, are computed one after another: the chunked form needs more multiplications. LANES columns of
the state remain in the L1 cache while a row's tokens change them. A token's bits do not depend on its row.

The stored state and the ring follow the twin: chunks enter the stored state at once, and steps when no later row can
reject them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.base.kv_cache_spec import RING
from runtime.kernels.cpu.attention.stored_numbers import LANES, load_part, store_part, vectors
from runtime.kernels.cpu.states.state_row import StateRow
from runtime.kernels.llvm.language import (
    F32s,
    Float,
    I32s,
    Int,
    Pointer,
    Value,
    absolute,
    array,
    f32,
    fused,
    i32,
    i64,
    loop,
    maximum,
    minimum,
    number,
    share,
    square_root,
    variable,
    when,
    where,
    where_to,
    zeros,
)
from runtime.kernels.llvm.mathematics import exp, log, sigmoid
from runtime.kernels.step.state_rows import LAG, MOST_PENDING

NORM_EPS = 1e-6  # q's and k's


def delta_inputs(
    qkv: F32s,  # [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], rows qkv_stride apart
    gates: F32s,  # [num_tokens, 2 * value_heads]: logits for the rate, then the decay; rows gates_stride apart
    decay_log: F32s,  # [value_heads]
    decay_bias: F32s,  # [value_heads]
    queries: F32s,  # [num_tokens, key_heads, key_dim], normalized and scaled
    keys: F32s,  # [num_tokens, key_heads, key_dim], normalized
    products: F32s,  # [num_tokens, key_heads] each query times its key
    rates: F32s,  # [num_tokens, value_heads]
    decays: F32s,  # [num_tokens, value_heads]
    num_tokens: Int,
    key_heads: Int,
    group: Int,  # value heads per key head
    qkv_stride: Int,
    gates_stride: Int,
    part: Int,
    parts: Int,
    key_dim: int,
) -> None:
    """Part i/n: a share of the pairs (token, key head)."""
    begin, end = share(num_tokens * key_heads, part, parts)
    value_heads, sizes = key_heads * group, _parts(key_dim)
    for task in loop(begin, end):
        token, head = task // key_heads, task % key_heads
        own = qkv + (token * qkv_stride + head * key_dim)
        query = [x * key_dim**-0.5 for x in _normalized(own, key_dim)]
        key = _normalized(own + key_heads * key_dim, key_dim)
        for out, numbers in ((queries, query), (keys, key)):
            for (at, count), each in zip(sizes, numbers, strict=True):
                store_part(out + task * key_dim, at, each, count)
        products.store(task, _sum([a * b for a, b in zip(query, key, strict=True)]))
        logits = gates + token * gates_stride
        for value_head in loop(head * group, (head + 1) * group):
            place, decay = token * value_heads + value_head, logits.load(value_heads + value_head)
            rates.store(place, sigmoid(logits.load(value_head)))
            exponent = exp(decay_log.load(value_head)) * _softplus(decay + decay_bias.load(value_head))
            decays.store(place, exp(0.0 - exponent))


def delta_rule(
    qkv: F32s,  # [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], rows qkv_stride apart
    queries: F32s,  # this and the next four are `delta_inputs`' results
    keys: F32s,
    products: F32s,
    rates: F32s,
    decays: F32s,
    z: F32s,  # [num_tokens, value_heads * value_dim], rows z_stride apart
    norm_weight: F32s,  # [value_dim]
    slots: I32s,  # [num_rows]
    starts: I32s,  # [num_rows]
    q_starts: I32s,  # [num_rows + 1]
    places: I32s,  # [num_slots + 1, 4], rows place_stride apart
    state: F32s,  # [num_states, value_heads, key_dim, value_dim], states state_stride apart
    positions: I32s,  # [num_states, value_heads], states positions_stride apart
    ring_keys: F32s,  # [num_slots + 1, value_heads, RING, key_dim]; slots and heads with strides
    ring_values: F32s,  # [num_slots + 1, value_heads, RING, value_dim]
    ring_decays: F32s,  # [num_slots + 1, value_heads, RING]
    out: F32s,  # [num_tokens, value_heads * value_dim]
    num_rows: Int,
    key_heads: Int,
    value_heads: Int,
    neighbours: Int,  # value heads in a row with the same key head
    qkv_stride: Int,
    z_stride: Int,
    place_stride: Int,
    state_stride: Int,
    positions_stride: Int,
    keys_slot: Int,  # the rings' strides
    keys_head: Int,
    values_slot: Int,
    values_head: Int,
    decays_slot: Int,
    decays_head: Int,
    steps_only: Int,  # 1: no token belongs to a chunk
    eps: Float,
    part: Int,
    parts: Int,
    key_dim: int,
    value_dim: int,
) -> None:
    """Part i/n: a share of the pairs (row, value head)."""
    for task in loop(*share(num_rows * value_heads, part, parts)):
        row, head = StateRow(task // value_heads, slots, starts, q_starts, places, place_stride), task % value_heads
        key_head = head // neighbours % key_heads
        span = Span(row, Strided(positions + head, positions_stride), steps_only)
        tokens = Tokens(
            span,
            queries=Strided(queries + key_head * key_dim, key_heads * key_dim),
            keys=Strided(keys + key_head * key_dim, key_heads * key_dim),
            products=Strided(products + key_head, key_heads),
            rates=Strided(rates + head, value_heads),
            decays=Strided(decays + head, value_heads),
            values=Strided(qkv + (key_heads * (2 * key_dim) + head * value_dim), qkv_stride),
            outputs=Strided(out + head * value_dim, value_heads * value_dim),
            ring_keys=Strided(ring_keys + (row.slot * keys_slot + head * keys_head), number(key_dim, i64)),
            ring_values=Strided(ring_values + (row.slot * values_slot + head * values_head), number(value_dim, i64)),
            ring_decays=Strided(ring_decays + (row.slot * decays_slot + head * decays_head), number(1, i64)),
        )
        states = Strided(state + head * (key_dim * value_dim), state_stride)
        for first, count in vectors(value_dim):
            Columns(tokens, states, first, count, key_dim, value_dim).compute()
        tokens.keep_keys(key_dim)
        span.keep_positions()
        gate = Strided(z + head * value_dim, z_stride)
        for token in loop(row.first, row.first + row.count):
            _norm_and_gate(tokens.outputs[token], gate[token], norm_weight, eps, value_dim)


class Span:
    """The updates of a row and before it: a task applies those from position `covered` on."""

    def __init__(self, row: StateRow, positions: Strided, steps_only: Value) -> None:
        covered = where(row.start.equals(0), 0, positions[row.own].load().to(i64))  # tokens in the stored state
        middle = minimum(maximum(row.prompt_end - row.start, 0), row.count) * (1 - steps_only)
        chunks_end = row.start + middle
        kept = row.end - MOST_PENDING
        by_chunks, by_steps = maximum(chunks_end, kept), maximum(maximum(covered, row.start - LAG), kept)
        self.row, self.positions, self.covered = row, positions, covered
        self.stored = where(middle > 0, by_chunks, by_steps)  # what `covered` is after the row
        self.takes_snapshot = row.takes_snapshot(chunks_end)

    def keep_positions(self) -> None:
        """Store the numbers of tokens that the stored state and a snapshot have now."""
        self.positions[self.row.own].store(0, self.stored.to(i32))
        with when(self.takes_snapshot):
            self.positions[self.row.snapshot].store(0, self.row.snapshot_end.to(i32))


@dataclass(frozen=True, slots=True)
class Strided:
    """The address of a token's, a position's or a state's elements."""

    pointer: Pointer
    stride: Value

    def __getitem__(self, index: Value) -> Pointer:
        return self.pointer + index * self.stride


@dataclass(frozen=True, slots=True)
class Tokens:
    """One value head's elements: a row's tokens by number in the step, and the ring's by position."""

    span: Span
    queries: Strided
    keys: Strided
    products: Strided
    rates: Strided
    decays: Strided
    values: Strided
    outputs: Strided
    ring_keys: Strided
    ring_values: Strided
    ring_decays: Strided

    def is_new(self, position: Value) -> Value:
        """True if a position belongs to the row, false if its update is in the ring."""
        return position >= self.span.row.start

    def token(self, position: Value) -> Value:
        return self.span.row.first + position - self.span.row.start

    def key(self, position: Value) -> Pointer:
        return self._either(position, self.keys, self.ring_keys)

    def decay(self, position: Value) -> Value:
        return self._either(position, self.decays, self.ring_decays).load()

    def _either(self, position: Value, new: Strided, ring: Strided) -> Pointer:
        return where_to(self.is_new(position), new[self.token(position)], ring[position & (RING - 1)])

    def keep_keys(self, key_dim: int) -> None:
        """Keep the keys and decays of updates that the stored state does not have."""
        for position in loop(maximum(self.span.stored, self.span.row.start), self.span.row.end):
            token, place = self.token(position), position & (RING - 1)
            for at, count in _parts(key_dim):
                store_part(self.ring_keys[place], at, load_part(self.keys[token], at, count), count)
            self.ring_decays[place].store(0, self.decays[token].load())


class Columns:
    """Up to LANES columns of a head's state, a vector for each row.

    `memory` lacks the last token's update, which the next pass over it adds."""

    def __init__(self, tokens: Tokens, states: Strided, first: Any, count: int, key_dim: int, value_dim: int) -> None:
        self.tokens, self.span, self.states = tokens, tokens.span, states
        self.first, self.count, self.key_dim, self.value_dim = first, count, key_dim, value_dim
        self.memory = array(f32, key_dim * LANES)
        self.update = variable(zeros(f32(LANES)))  # the last token's update

    def compute(self) -> None:
        """Apply all tokens' updates, and store new tokens' outputs."""
        span, row = self.span, self.span.row
        own = self.states[row.own] + self.first
        with when(row.start.equals(0)):
            for i in loop(0, self.key_dim):
                store_part(own + i * self.value_dim, 0, zeros(f32(LANES)), self.count)
        self._apply(span.covered, own)
        for position in loop(span.covered + 1, row.end):
            self._apply(position, None)

    def _apply(self, position: Value, stored: Pointer | None) -> None:
        """Apply one token, to `memory` or first of all to the stored state."""
        span, row, tokens = self.span, self.span.row, self.tokens
        is_new, token, place = tokens.is_new(position), tokens.token(position), position & (RING - 1)
        key_product, query_product = self._decayed(position, stored, where(is_new, token, row.first))
        with when(is_new):
            value = load_part(tokens.values[token] + self.first, 0, self.count)
            update = tokens.rates[token].load() * (value - key_product)
            self.update.set(update)
            output = fused(update, tokens.products[token].load(), query_product)
            store_part(tokens.outputs[token] + self.first, 0, output, self.count)
            with when(position >= span.stored):
                store_part(tokens.ring_values[place] + self.first, 0, update, self.count)
        with when(position < row.start):
            self.update.set(load_part(tokens.ring_values[place] + self.first, 0, self.count))
        with when((position + 1).equals(span.stored)):
            self._store(self.states[row.own], position)
        with when(span.takes_snapshot & (position + 1).equals(row.snapshot_end)):
            self._store(self.states[row.snapshot], position)

    def _decayed(self, position: Value, stored: Pointer | None, token: Value) -> tuple[Value, Value]:
        """Decay the state. Return its products with a position's key and a token's query."""
        tokens, step = self.tokens, max(n for n in (4, 2, 1) if self.key_dim % n == 0)
        decay, before, update = tokens.decay(position), tokens.key(position - 1), self.update.now
        key, query = tokens.key(position), tokens.queries[token]
        sums = [[variable(zeros(f32(LANES))) for _ in range(step)] for _ in range(2)]
        for first in loop(0, self.key_dim, step):
            for i in range(step):
                at = first + i
                if stored is not None:
                    numbers = load_part(stored + at * self.value_dim, 0, self.count)
                else:
                    numbers = fused(update, before.load(at), self.memory.load(at * LANES, LANES))
                numbers = numbers * decay
                self.memory.store(at * LANES, numbers)
                for total, factors in zip(sums, (key, query), strict=True):
                    total[i].set(fused(numbers, factors.load(at), total[i].now))
        key_product, query_product = ([each.now for each in total] for total in sums)
        return _pairwise(key_product), _pairwise(query_product)

    def _store(self, state: Pointer, position: Value) -> None:
        """Store the state after the token at `position`, the last one that was applied."""
        key, update = self.tokens.key(position), self.update.now
        for i in loop(0, self.key_dim):
            numbers = fused(update, key.load(i), self.memory.load(i * LANES, LANES))
            store_part(state + self.first + i * self.value_dim, 0, numbers, self.count)


def _norm_and_gate(own: Pointer, gate: Pointer, weight: Pointer, eps: Value, size: int) -> None:
    """Norm a head's output and multiply it with silu(gate), in place."""
    parts = _parts(size)
    numbers = [load_part(own, at, count) for at, count in parts]
    mean = _sum([x * x for x in numbers]) / float(size)
    root = square_root(mean + eps).repeat(LANES)
    for (at, count), x in zip(parts, numbers, strict=True):
        z = load_part(gate, at, count)
        store_part(own, at, load_part(weight, at, count) * (x / root) * (z / (exp(0.0 - z) + 1.0)), count)


def _normalized(own: Pointer, size: int) -> list[Value]:
    numbers = [load_part(own, at, count) for at, count in _parts(size)]
    root = square_root(_sum([x * x for x in numbers]) + NORM_EPS).repeat(LANES)
    return [x / root for x in numbers]


def _softplus(x: Value) -> Value:
    """log(1 + exp(x)), without overflow; NaN stays NaN."""
    return where(x < 0.0, 0.0, x) + log(exp(0.0 - absolute(x)) + 1.0)


def _parts(size: int) -> list[tuple[int, int]]:
    """Vectors of a head: first number and count."""
    return [(at, min(LANES, size - at)) for at in range(0, size, LANES)]


def _sum(vectors: list[Value]) -> Value:
    """The sum of all lanes."""
    total = vectors[0]
    for each in vectors[1:]:
        total = total + each
    return total.reduce(lambda a, b: a + b)


def _pairwise(vectors: list[Value]) -> Value:
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [a + b for a, b in zip(vectors[:half], vectors[half:], strict=True)]
    return vectors[0]
