"""Requests of layers with a state, computed in rows of many shapes: what came out, and what the state cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from runtime.base.kv_cache_spec import CHUNK, RING, StateGroupSpec
from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule import delta_rule_triton
from runtime.kernels.states.delta_rule_torch import delta_rule_torch
from runtime.kernels.step.state_rows import DeltaForm, StateRows
from runtime.worker.state_cache import StateCache

_FINAL = 3  # single steps at the end, after which the stored state does not depend on the rows before


class Place(NamedTuple):
    """Where a layer computes."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    padded: bool = False  # steps have rows of the null slot, as graphs have, and steps of drafts are `steps_only`


CPU = Place()


@dataclass(frozen=True)
class Layer:
    """One layer with a state, and its random weights."""

    kind: str  # short_conv, causal_conv or delta_rule
    channels: int = 40  # of a convolution
    width: int = 3
    has_bias: bool = False
    key_heads: int = 1  # of the delta rule
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    tiled: bool = False

    @property
    def size_in(self) -> int:
        if self.kind == "delta_rule":
            heads = 2 * self.key_heads * self.key_dim + 2 * self.value_heads * self.value_dim
            return heads + 2 * self.value_heads
        return self.channels * (3 if self.kind == "short_conv" else 1)

    def cache(self, num_states: int, num_slots: int, place: Place = CPU) -> StateCache:
        """A cache that holds NaN."""
        delta = (self.value_heads, self.key_dim, self.value_dim) if self.kind == "delta_rule" else ()
        spec = StateGroupSpec((0,), self.channels, str(place.dtype).removeprefix("torch."), *delta)
        cache = StateCache(spec, num_states, num_slots, torch.device(place.device))
        cache.rows.fill_(0xFF)
        cache._pending.fill_(torch.nan)
        return cache

    def operation(self, operations: Any, place: Place = CPU) -> Callable[[torch.Tensor, StateRows, Any], torch.Tensor]:
        """The layer with the operations of `operations`, of tokens [num_tokens, size_in]."""
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int, dtype: torch.dtype = place.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(place.device, dtype)

        if self.kind != "delta_rule":
            weight, bias = draw(self.channels, self.width), draw(self.channels) if self.has_bias else None
            apply = getattr(operations, self.kind)
            return lambda x, rows, state: apply(x, weight, bias, rows, state)
        heads, of_value = self.value_heads, self.value_heads * self.value_dim
        sizes = [2 * self.key_heads * self.key_dim + of_value, of_value, 2 * heads]
        decay_log, decay_bias = draw(heads, dtype=torch.float32), draw(heads, dtype=torch.float32)
        form = DeltaForm(decay_log, decay_bias, draw(self.value_dim), 1e-6, self.tiled)

        def delta(x: torch.Tensor, rows: StateRows, state: Any) -> torch.Tensor:
            qkv, z, gates = x.split(sizes, 1)
            result: torch.Tensor = operations.delta_rule(qkv, z, gates, form, rows, state)
            return result

        return delta


LAYERS = {
    "short_conv": Layer("short_conv", channels=70),
    "short_conv bias": Layer("short_conv", channels=16, width=4, has_bias=True),
    "causal_conv": Layer("causal_conv", channels=33, width=4),
    "causal_conv bias": Layer("causal_conv", channels=32, width=2, has_bias=True),
    "delta_rule": Layer("delta_rule"),
    "delta_rule groups": Layer("delta_rule", key_heads=2, value_heads=6, key_dim=24, value_dim=16),
    "delta_rule tiled": Layer("delta_rule", key_heads=2, value_heads=6, value_dim=16, tiled=True),
    "delta_rule 128": Layer("delta_rule", key_heads=1, value_heads=1, key_dim=128, value_dim=128),
}


class Twins:
    """The operations of torch."""

    causal_conv, short_conv = staticmethod(causal_conv_torch), staticmethod(short_conv_torch)
    delta_rule = staticmethod(delta_rule_torch)


class Kernels:
    """The operations of Triton."""

    causal_conv, short_conv = staticmethod(causal_conv_triton), staticmethod(short_conv_triton)
    delta_rule = staticmethod(delta_rule_triton)


@dataclass
class Request:
    """A request, and the rows that compute it."""

    prompt_len: int
    rows: list[tuple[int, int]]  # tokens and accepted tokens of each row; a prompt's rows are accepted as a whole
    snapshot: int = 0  # position of a snapshot, or 0
    seed: int = 0
    fault: tuple[int, int] | None = None  # position and column of a NaN among the inputs
    start: int = 0  # of the next row
    outputs: list[torch.Tensor] = field(default_factory=list)  # by position

    @property
    def num_tokens(self) -> int:
        return sum(accepted for _, accepted in self.rows)

    def inputs(self, size: int, start: int, count: int, accepted: int) -> torch.Tensor:
        """Tokens from position `start` on; rejected ones are noise."""
        numbers = np.random.default_rng(self.seed).standard_normal((start + count, size), np.float32)[start:]
        tokens = torch.from_numpy(numbers)
        if self.fault is not None and start <= self.fault[0] < start + count:
            tokens[self.fault[0] - start, self.fault[1]] = torch.nan
        tokens[accepted:] = 3 * tokens[accepted:].flip(1)
        return tokens

    def alone(self) -> Request:
        """The same tokens: the prompt's chunks in one row, then single steps."""
        chunks = self.prompt_len - 1
        rows = [(chunks, chunks)] if chunks else []
        return Request(self.prompt_len, rows + [(1, 1)] * (self.num_tokens - chunks), self.snapshot, self.seed)


def play(
    layer: Layer, requests: list[Request], operations: Any, rows_per_step: int = 3, place: Place = CPU
) -> StateCache:
    """Compute all rows, some of them together, and then single steps. Fills `outputs`."""
    cache = layer.cache(2 * len(requests) + 1, len(requests), place)
    apply, state = layer.operation(operations, place), cache.layers[0]
    places = torch.zeros(len(requests) + 1, 4, dtype=torch.int32)
    for slot, request in enumerate(requests):
        places[slot] = torch.tensor((2 * slot + 1, request.prompt_len - 1, request.snapshot, 2 * slot + 2))
    places[-1, 1] = 1 << 30
    waiting = deque((slot, deque([*request.rows, *[(1, 1)] * _FINAL])) for slot, request in enumerate(requests))
    while waiting:
        step, later = [], []
        for _ in range(min(rows_per_step, len(waiting))):
            slot, rows = waiting.popleft()
            step.append((slot, requests[slot].start, *rows.popleft()))
            later += [(slot, rows)] if rows else []
        waiting += later
        is_decode = all(start >= requests[slot].prompt_len - 1 for slot, start, _, _ in step)
        steps_only = place.padded and is_decode and max(count for _, _, count, _ in step) <= MAX_DRAFT_TOKENS + 1
        padding = [(len(requests), 0, count) for count in ((1, 1) if steps_only else (30,)) if place.padded]
        numbers = [requests[slot].inputs(layer.size_in, *own) for slot, *own in step]
        numbers += [torch.ones(count, layer.size_in) for _, _, count in padding]
        tokens = torch.nn.functional.pad(torch.cat(numbers), (0, 16)).to(place.device, place.dtype)[:, :-16]
        own_rows = state_rows([*(own[:3] for own in step), *padding], places, place.device, steps_only)
        out = apply(tokens, own_rows, state).clone()
        if is_decode:
            out = apply(tokens, own_rows, state).clone()  # a step may be planned again
        outs = out.split([own[2] for own in [*step, *padding]])
        for own_out, (slot, _, _, accepted) in zip(outs, step, strict=False):
            requests[slot].outputs += own_out[:accepted]
            requests[slot].start += accepted
    return cache


def played(
    layer: Layer, given_requests: list[Request], operations: Any, rows_per_step: int = 3, place: Place = CPU
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of each request by position, and what the cache keeps of each."""
    copies = [replace(request, outputs=[]) for request in given_requests]
    state = play(layer, copies, operations, rows_per_step, place).layers[0]
    outputs, kept = list[torch.Tensor](), list[torch.Tensor]()
    for slot, request in enumerate(copies):
        outputs.append(torch.stack(request.outputs))
        for row, end in ((2 * slot + 1, request.start), (2 * slot + 2, request.snapshot)):
            last = torch.arange(max(end - layer.width + 1, 0), end) % RING
            if end:
                is_delta = layer.kind == "delta_rule"
                kept += [state.state[row], state.positions[row]] if is_delta else [state.inputs[row, last]]
    return outputs, kept


def state_rows(
    rows: list[tuple[int, int, int]], places: torch.Tensor, device: str = "cpu", steps_only: bool = False
) -> StateRows:
    """Rows of slot, start and number of tokens."""
    slots, starts, counts = zip(*rows, strict=True)
    edges = np.cumsum((0, *counts))
    columns = (torch.from_numpy(np.array(x, np.int32)).to(device) for x in (slots, starts, edges))
    return StateRows(*columns, places.to(device), len(rows), int(edges[-1]), max(counts), steps_only)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A prompt in chunks that end anywhere, and rows with drafts."""
    prompt_len = draw(st.integers(1, 3 * CHUNK))
    chunks = prompt_len - 1
    cuts = sorted(draw(st.sets(st.sampled_from([0, *range(CHUNK, chunks, CHUNK)]))) | {0})
    # The last row of a prompt may contain its last token, which is a step, and known tokens behind it.
    behind = draw(st.sampled_from([0, 1, 1, 14]))
    edges = [*cuts, chunks + behind] if chunks + behind else [0]
    rows = [(b - a, b - a) for a, b in pairwise(edges)]
    for count in draw(st.lists(st.integers(1, MAX_DRAFT_TOKENS + 1), max_size=5)):
        rows.append((count, draw(st.integers(1, count))))
    snapshot = draw(st.sampled_from([0, *range(CHUNK, chunks + 1, CHUNK)]))
    return Request(prompt_len, rows or [(1, 1)], snapshot, draw(st.integers(0, 99)))
