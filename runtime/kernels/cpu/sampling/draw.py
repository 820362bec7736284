"""Each logits row's best token, greedy or with noise by position (C4), without a copy of the logits.

The noise has the integers of `runtime/kernels/sampling/gumbel.py`, bit for bit. A vocabulary tile has one key,
which orders by score and then by lowest id (`token_keys.py`). A row's largest key is its token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from runtime.kernels.llvm.language import (
    F32s,
    I32s,
    I64s,
    Int,
    Pointer,
    Value,
    Variable,
    bit,
    f32,
    i32,
    i64,
    loop,
    minimum,
    number,
    u32,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import log

TILE = 4096  # tokens
_LANES = 16
_FAILED = (1 << 63) - 1
_MUL_1, _MUL_2, _GOLDEN = 0x7FEB352D, 0x846CA68B, 0x9E3779B9


def draw(
    logits: F32s,  # [rows, vocab], rows `stride` apart
    temperatures: F32s,  # [rows]; 0 for greedy
    seeds: I64s,  # [rows]
    positions: I32s,  # [rows] positions to be drawn
    keys: I64s,  # [rows, tiles]
    num_rows: Int,
    vocab: Int,
    stride: Int,
    first_id: Int,  # the first column's token id
    part: Int,
    parts: Int,
    checked: bool,  # a logit that is not finite fails its tile
) -> None:
    """Part i of n: every n-th tile from i on."""
    tiles = (vocab + (TILE - 1)) // TILE
    for task in loop(part, num_rows * tiles, parts):
        row, tile = task // tiles, task % tiles
        own = logits + row * stride
        begin, end = tile * TILE, minimum(tile * TILE + TILE, vocab)
        temperature, best = temperatures.load(row), variable(number(-_FAILED, i64))
        bad = variable(zeros(f32))
        is_drawn = temperature > 0.0
        with when(is_drawn):
            noised = partial(_noised, temperature, *_row_key(positions.load(row), seeds.load(row)))
            _best(own, begin, end, first_id, best, bad, noised)
        with when(is_drawn.equals(number(0, bit))):
            _best(own, begin, end, first_id, best, bad, lambda x, ids: x)
        found = best.now
        if checked:
            found = where(bad.now.equals(0.0), found, number(_FAILED, i64))
        keys.store(task, found)


def _best(
    own: Pointer,
    begin: Value,
    end: Value,
    first_id: Value,
    best: Variable,
    bad: Variable,
    score: Callable[[Value, Value], Value],  # score by logit and id
) -> None:
    """Enlarge `best` to the largest key in a token range, and make `bad` NaN if a logit is not finite."""
    whole = begin + (end - begin) // _LANES * _LANES
    lanes = number(0, i32(_LANES))
    for lane in range(1, _LANES):
        lanes = lanes.with_lane(lane, number(lane, i32))
    for width, start, stop in ((_LANES, begin, whole), (1, whole, end)):
        scores = variable(number(-float("inf"), f32(width)))
        found = variable(zeros(i32(width)))
        wrong = variable(zeros(f32(width)))
        for at in loop(start, stop, width):
            x = own.load(at, width)
            ids = (first_id + at).to(i32)
            ids = lanes + ids if width > 1 else ids
            new = score(x, ids)
            wrong += x - x
            found.set(where(new > scores.now, ids, found.now))
            scores.set(where(new > scores.now, new, scores.now))
        keys = _keys(scores.now, found.now)
        best.set(_larger(best.now, keys.reduce(_larger)))
        bad += wrong.now.reduce(lambda a, b: a + b)


def _noised(temperature: Value, first: Value, second: Value, x: Value, ids: Value) -> Value:
    return x / temperature + _noise(ids, first, second)


def _larger(a: Value, b: Value) -> Value:
    return where(a > b, a, b)


def _keys(scores: Value, ids: Value) -> Value:
    """Keys of scores and ids, i64."""
    bits = (scores + 0.0).bitcast(i32(scores.type.lanes))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(i64) << 32) | (0x7FFFFFFF - ids).to(i64)


def _hash(h: Value, key: Value | int) -> Value:
    """lowbias32, with the key added in the middle; u32."""
    h = (h ^ (h >> 16)) * _MUL_1
    h = h ^ key
    h = (h ^ (h >> 15)) * _MUL_2
    return h ^ (h >> 16)


def _row_key(position: Value, seed: Value) -> tuple[Value, Value]:
    low, high = seed.to(u32), (seed >> 32).to(u32)
    first = _hash(_hash(position.to(u32) ^ low, 0) ^ high, _GOLDEN)
    return first, _hash(first ^ low, 0)


def _noise(ids: Value, first: Value, second: Value) -> Value:
    """Gumbel noise of token ids, f32."""
    k = _hash(ids.to(u32) ^ first, second) >> 9
    rest = 1.0 - (k.to(i32).to(f32) + 0.5) * 2.0**-23
    return 0.0 - log(0.0 - log(rest))
