"""A step's rows for layers with a state, and the memory of one such layer.

A layer without attention summarizes all earlier tokens in a fixed-size state. A request owns one row of the state
cache; other rows hold snapshots for the prefix cache. A row's tokens are computed in two ways:

    positions  0 ............. prompt_end - 1 | prompt_end ............
    form       chunks of CHUNK tokens         | one token after another

`prompt_end` is the position of the prompt's last token. Chunks begin at multiples of CHUNK, so a token's bits do not
depend on how its prompt was cut into steps. Rows end at such a multiple or reach `prompt_end`.

The stored state lags behind: later steps may reject the last tokens or compute them again. Their updates stay in a
ring, by position modulo RING. A row may therefore start at any of the last positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.base.kv_cache_spec import RING
from runtime.base.types import MAX_DRAFT_TOKENS

LAG = 1  # last tokens before a row that its stored state leaves out: the step before it may be planned again
MOST_PENDING = LAG + 1 + MAX_DRAFT_TOKENS  # tokens in the ring that the state does not have yet
assert MOST_PENDING <= RING


@dataclass(slots=True)
class StateRows:
    """The rows of a step. Tensors are int32 on the device; the ints are the host's and may be upper bounds."""

    slots: torch.Tensor  # [num_rows]
    starts: torch.Tensor  # [num_rows] position of the row's first token
    q_starts: torch.Tensor  # [num_rows + 1] the row's first token in the step, and the last row's end
    # [num_slots + 1, 4], any stride between slots. Columns: state cache row, prompt_end, the snapshot's position
    # in this step or 0, that snapshot's row.
    places: torch.Tensor
    num_rows: int
    num_tokens: int
    max_count: int  # most tokens in a row
    steps_only: bool = False  # compute all tokens one after another, as a decode graph does


@dataclass(slots=True)
class ConvState:
    """One layer's inputs of a causal convolution."""

    inputs: torch.Tensor  # [num_states, RING, channels], any stride between states


class DeltaForm(NamedTuple):
    """One layer's weights of the gated delta rule."""

    decay_log: torch.Tensor  # [value_heads] float32, the checkpoint's A_log
    decay_bias: torch.Tensor  # [value_heads] float32
    norm: torch.Tensor  # [value_dim]
    eps: float
    tiled: bool = False  # value head h has the key head h % key_heads, else h * key_heads // value_heads


@dataclass(slots=True)
class DeltaState:
    """One layer's state of the gated delta rule. Any stride between states, and between slots."""

    inputs: torch.Tensor  # [num_states, RING, channels] the convolution's inputs
    state: torch.Tensor  # [num_states, value_heads, key_dim, value_dim] float32
    positions: torch.Tensor  # [num_states, value_heads] int32, the tokens that the state covers

    # The ring of later updates: S = decay * S + outer(key, value)
    keys: torch.Tensor  # [num_slots + 1, value_heads, RING, key_dim] float32
    values: torch.Tensor  # [num_slots + 1, value_heads, RING, value_dim] float32
    decays: torch.Tensor  # [num_slots + 1, value_heads, RING] float32
