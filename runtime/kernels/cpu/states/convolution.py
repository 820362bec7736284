"""Causal depthwise convolutions: the twins of `causal_conv_torch` and `short_conv_torch`, for float32 rows.

A token's sum follows the taps' order, so `short_conv` has its twin's bits. `causal_conv` differs in its
exponential's last bits."""

from __future__ import annotations

from typing import NamedTuple

from runtime.base.kv_cache_spec import RING
from runtime.kernels.cpu.attention.stored_numbers import LANES
from runtime.kernels.cpu.states.state_row import StateRow
from runtime.kernels.llvm.language import (
    F32s,
    I32s,
    Int,
    Value,
    f32,
    loop,
    maximum,
    minimum,
    share,
    variable,
    when,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import exp


class ConvolutionArguments(NamedTuple):
    """What `convolution` reads and writes."""

    x: F32s  # [num_tokens, channels], rows x_stride apart; if gated, input gate, output gate, x
    weight: F32s  # [channels, width]
    bias: F32s  # [channels], read if has_bias
    inputs: F32s  # [num_states, RING, channels], states state_stride apart
    slots: I32s  # [num_rows]
    starts: I32s  # [num_rows]
    q_starts: I32s  # [num_rows + 1]
    places: I32s  # [num_slots + 1, 4], rows place_stride apart
    out: F32s  # [num_tokens, channels]
    num_rows: Int
    channels: Int
    x_stride: Int
    state_stride: Int
    place_stride: Int


def convolution(
    given: ConvolutionArguments,
    part: Int,
    parts: Int,
    width: int,
    has_bias: bool,
    gated: bool,  # short_conv, without an activation; else causal_conv, with silu
) -> None:
    """Part i/n: a share of the channels, in all rows."""
    whole = given.channels // LANES
    begin, end = share(whole + given.channels % LANES, part, parts)  # vectors, then single channels
    for index in loop(0, given.num_rows):
        row = StateRow(index, given.slots, given.starts, given.q_starts, given.places, given.place_stride)
        for lanes in (LANES, 1):
            is_whole = lanes == LANES
            units = (begin, minimum(end, whole)) if is_whole else (maximum(begin, whole), end)
            for unit in loop(*units):
                first = unit * LANES if is_whole else unit + whole * (LANES - 1)
                own = Channels(
                    given.x, given.inputs, given.x_stride, given.state_stride, given.channels, first, lanes, gated
                )
                own.convolve(row, given.weight, given.bias if has_bias else None, given.out, width)
                own.keep(row, width)


class Channels:
    """Neighbouring channels, which one vector holds."""

    def __init__(
        self, x: F32s, inputs: F32s, x_stride: Int, state_stride: Int, channels: Int, first: Value, lanes: int,
        gated: bool,
    ) -> None:  # fmt: skip
        self._x, self._inputs, self._x_stride, self._state_stride = x + first, inputs + first, x_stride, state_stride
        self._channels, self._first, self._lanes, self._gated = channels, first, lanes, gated

    def convolve(self, row: StateRow, weight: F32s, bias: F32s | None, out: F32s, width: int) -> None:
        """The outputs of a row's tokens."""
        lanes = self._lanes
        raw = weight.load(self._first * width, lanes * width)
        taps = [raw.lanes(range(w, lanes * width, width)) for w in range(width)] if width > 1 else [raw]
        before = []  # inputs from tokens before the next one
        for back in range(width - 1, 0, -1):
            position = row.start - back
            kept = self._kept(row.own, position)
            before.append(variable(where((position >= 0), kept, zeros(kept.type))))
        none = zeros(f32(lanes)) if bias is None else bias.load(self._first, lanes)
        for token in loop(row.first, row.first + row.count):
            known = [*(each.now for each in before), self._input(token)]
            total = none
            for tap, value in zip(taps, known, strict=True):
                total = total + value * tap
            for each, value in zip(before, known[1:], strict=True):
                each.set(value)
            if self._gated:
                total = (self._x + token * self._x_stride).load(self._channels, lanes) * total
            else:
                total = total / (exp(0.0 - total) + 1.0)
            out.store(token * self._channels + self._first, total)

    def keep(self, row: StateRow, width: int) -> None:
        """Store the last inputs of a row, and those before a snapshot."""
        with when(row.takes_snapshot(row.end)):
            oldest = maximum(maximum(row.snapshot_end - RING, row.start - (width - 1)), 0)
            for position in loop(oldest, minimum(row.start, row.snapshot_end)):
                self._store(row.snapshot, position, self._kept(row.own, position))
            self._keep_own(row, row.snapshot, row.snapshot_end)
        self._keep_own(row, row.own, row.end)

    def _keep_own(self, row: StateRow, target: Value, end: Value) -> None:
        """Store the last inputs before position `end` that belong to tokens of the row."""
        for position in loop(maximum(end - RING, row.start), end):
            self._store(target, position, self._input(row.first + position - row.start))

    def _input(self, token: Value) -> Value:
        own = self._x + token * self._x_stride
        if not self._gated:
            return own.load(0, self._lanes)
        return own.load(0, self._lanes) * own.load(self._channels * 2, self._lanes)

    def _place(self, state: Value, position: Value) -> Value:
        return state * self._state_stride + (position & (RING - 1)) * self._channels

    def _kept(self, state: Value, position: Value) -> Value:
        return self._inputs.load(self._place(state, position), self._lanes)

    def _store(self, state: Value, position: Value, value: Value) -> None:
        self._inputs.store(self._place(state, position), value)
