"""Steps of requests through one layer with a state, by two implementations that must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.base.kv_cache_spec import RING
from runtime.kernels.step.state_rows import DeltaForm, DeltaState, StateRows


class Heads(NamedTuple):
    """The shape of a layer with the gated delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    tiled: bool = False  # the order of value heads

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


QWEN = Heads(16, 32, 128, 128)


@dataclass(slots=True)
class Span:
    """A row of a step. `slot` None is the null slot."""

    slot: int | None
    start: int
    count: int
    prompt_end: int
    snapshot_end: int = 0
    snapshot: int = 0


class Weights(NamedTuple):
    """Of one layer: the convolution's, then the delta rule's."""

    conv: torch.Tensor
    decay_log: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor


def make_weights(heads: Heads, dtype: torch.dtype, device: str = "cpu") -> Weights:
    return Weights(
        torch.randn(heads.channels, heads.width).to(device, dtype),
        torch.rand(heads.value_heads).mul(16).add(0.1).log().to(device),
        torch.randn(heads.value_heads).sub(3).to(device),
        torch.rand(heads.value_dim).add(0.5).to(device, dtype),
    )


def make_state(heads: Heads, num_states: int, num_slots: int, dtype: torch.dtype, device: str = "cpu") -> DeltaState:
    """Poisoned memory: a request's first row must not read it."""
    value_heads, key_dim, value_dim = heads.value_heads, heads.key_dim, heads.value_dim
    states = torch.full((num_states, value_heads * key_dim * value_dim + 4), torch.nan, device=device)
    pending = torch.full((num_slots + 1, value_heads, RING * (key_dim + value_dim + 1)), torch.nan, device=device)
    keys, values, decays = pending.split([RING * key_dim, RING * value_dim, RING], -1)
    inputs = torch.full((num_states, RING * heads.channels + 8), torch.nan, device=device, dtype=dtype)
    return DeltaState(
        inputs[:, :-8].view(num_states, RING, heads.channels),
        states[:, :-4].view(num_states, value_heads, key_dim, value_dim),
        torch.full((num_states, value_heads), 1 << 30, dtype=torch.int32, device=device),
        keys.unflatten(-1, (RING, -1)), values.unflatten(-1, (RING, -1)), decays,
    )  # fmt: skip


def clone(state: DeltaState) -> DeltaState:
    return copy.deepcopy(state)


def make_rows(spans: list[Span], num_slots: int, device: str = "cpu", steps_only: bool = False) -> StateRows:
    """A slot's row of the state cache is its number + 1."""
    places = torch.zeros(num_slots + 1, 7, dtype=torch.int32)
    places[-1, 1] = 1 << 30
    counts = torch.tensor([span.count for span in spans])
    for span in spans:
        if span.slot is not None:
            places[span.slot, :4] = torch.tensor(
                [span.slot + 1, span.prompt_end, span.snapshot_end, span.snapshot], dtype=torch.int32
            )
    slots = torch.tensor([num_slots if span.slot is None else span.slot for span in spans], dtype=torch.int32)
    starts = torch.tensor([span.start for span in spans], dtype=torch.int32)
    q_starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return StateRows(
        slots.to(device), starts.to(device), q_starts.to(device), places.to(device)[:, :4], len(spans),
        int(counts.sum()), int(counts.max()), steps_only,
    )  # fmt: skip


class Inputs(NamedTuple):
    """Of a step's tokens, before the convolution."""

    qkv: torch.Tensor
    z: torch.Tensor
    gates: torch.Tensor


def make_inputs(heads: Heads, num_tokens: int, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Views of one product, as of fused maps."""
    sizes = [heads.channels, heads.value_heads * heads.value_dim, 2 * heads.value_heads]
    return Inputs(*torch.randn(num_tokens, sum(sizes) + 16, device=device).to(dtype)[:, :-16].split(sizes, 1))


Layer = Callable[..., torch.Tensor]  # of inputs, weights, rows, a state, and whether value heads are tiled


def layer_of(conv: Callable[..., torch.Tensor], rule: Callable[..., torch.Tensor]) -> Layer:
    """The convolution and the delta rule behind it."""

    def layer(
        inputs: Inputs, weights: Weights, rows: StateRows, state: DeltaState, tiled: bool = False
    ) -> torch.Tensor:
        mixed = conv(inputs.qkv, weights.conv, None, rows, state)
        return rule(mixed, inputs.z, inputs.gates, DeltaForm(*weights[1:], 1e-6, tiled), rows, state)

    return layer
