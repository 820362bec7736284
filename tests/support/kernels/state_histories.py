"""Requests of layers with a state, computed in rows of many shapes: what came out, and what the state cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

from runtime.core.plan import MAX_DRAFT_TOKENS
from runtime.kernels.cpu.states import compiled_states
from runtime.kernels.cpu.states.compiled_states import CompiledStates
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.launcher import Launcher
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule_torch import delta_rule_torch
from runtime.kernels.states.state_rows import StateRows
from runtime.spec.kv_cache_spec import CHUNK, StateGroupSpec
from runtime.worker.state_cache import StateCache
from tests.support.kernels.compiled import call

_FINAL = 3  # single steps at the end, after which the stored state does not depend on the rows before


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

    @property
    def size_in(self) -> int:
        if self.kind == "delta_rule":
            heads = 2 * self.key_heads * self.key_dim + 2 * self.value_heads * self.value_dim
            return heads + 2 * self.value_heads
        return self.channels * (3 if self.kind == "short_conv" else 1)

    def cache(self, num_states: int, num_slots: int) -> StateCache:
        """A cache that holds NaN."""
        delta = (self.value_heads, self.key_dim, self.value_dim) if self.kind == "delta_rule" else ()
        spec = StateGroupSpec((0,), self.channels, "float32", *delta)
        cache = StateCache(spec, num_states, num_slots, torch.device("cpu"))
        cache.rows.fill_(0xFF)
        cache._pending.fill_(torch.nan)
        return cache

    def operation(self, operations: Any) -> Callable[[torch.Tensor, StateRows, Any], torch.Tensor]:
        """The layer with the operations of `operations`, of tokens [num_tokens, size_in]."""
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        if self.kind != "delta_rule":
            weight, bias = draw(self.channels, self.width), draw(self.channels) if self.has_bias else None
            apply = getattr(operations, self.kind)
            return lambda x, rows, state: apply(x, weight, bias, rows, state)
        heads, of_value = self.value_heads, self.value_heads * self.value_dim
        sizes = [2 * self.key_heads * self.key_dim + of_value, of_value, 2 * heads]
        constants = draw(heads), draw(heads), draw(self.value_dim), 1e-6

        def delta(x: torch.Tensor, rows: StateRows, state: Any) -> torch.Tensor:
            qkv, z, gates = x.split(sizes, 1)
            result: torch.Tensor = operations.delta_rule(qkv, z, gates, *constants, rows, state)
            return result

        return delta


class Twins:
    """The operations of torch."""

    causal_conv, short_conv = staticmethod(causal_conv_torch), staticmethod(short_conv_torch)
    delta_rule = staticmethod(delta_rule_torch)


class _PartsLauncher(Launcher):
    """Runs kernels in a number of parts, for a target."""

    def __init__(self, target: Target | None, parts: int) -> None:
        super().__init__()
        self._target, self._parts = target, parts

    def launch(self, function: Any, arguments: Any, parts: int) -> None:
        call(function[0], tuple(arguments), self._target, self._parts, **function[1])


@contextmanager
def compiled(target: Target | None = None, parts: int = 1) -> Iterator[CompiledStates]:
    """Compiled operations for a target, in parts."""
    with patch.object(compiled_states, "kernel", lambda function, **constants: (function, constants)):
        yield CompiledStates(_PartsLauncher(target, parts))


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


def play(layer: Layer, requests: list[Request], operations: Any, rows_per_step: int = 3) -> StateCache:
    """Compute all rows, some of them together, and then single steps. Fills `outputs`."""
    cache = layer.cache(2 * len(requests) + 1, len(requests))
    apply, state = layer.operation(operations), cache.layers[0]
    places = torch.zeros(len(requests) + 1, 4, dtype=torch.int32)
    for slot, request in enumerate(requests):
        places[slot] = torch.tensor((2 * slot + 1, request.prompt_len - 1, request.snapshot, 2 * slot + 2))
    waiting = deque((slot, deque([*request.rows, *[(1, 1)] * _FINAL])) for slot, request in enumerate(requests))
    while waiting:
        step, later = [], []
        for _ in range(min(rows_per_step, len(waiting))):
            slot, rows = waiting.popleft()
            step.append((slot, requests[slot].start, *rows.popleft()))
            later += [(slot, rows)] if rows else []
        waiting += later
        tokens = torch.cat([requests[slot].inputs(layer.size_in, *own) for slot, *own in step])
        state_rows = _state_rows([own[:3] for own in step], places)
        out = apply(tokens, state_rows, state).clone()
        if all(start >= requests[slot].prompt_len - 1 for slot, start, _, _ in step):
            out = apply(tokens, state_rows, state).clone()  # a step may be planned again
        for own_out, (slot, _, _, accepted) in zip(out.split([own[2] for own in step]), step, strict=True):
            requests[slot].outputs += own_out[:accepted]
            requests[slot].start += accepted
    return cache


def _state_rows(rows: list[tuple[int, int, int]], places: torch.Tensor) -> StateRows:
    """Rows of slot, start and number of tokens."""
    slots, starts, counts = zip(*rows, strict=True)
    edges = np.cumsum((0, *counts))
    columns = (torch.from_numpy(np.array(x, np.int32)) for x in (slots, starts, edges))
    return StateRows(*columns, places, len(rows), int(edges[-1]), max(counts))


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
