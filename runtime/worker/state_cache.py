"""StateCache: the memory for layers with a state.

A cache row is one request's state, or a snapshot, in all layers. It lies in one piece, so that one copy
restores it:

    states of all layers, float32 | positions of all layers, int32 | inputs of the convolutions of all layers

The updates from a request's last tokens belong to its slot. Snapshots do not need them.
"""

from __future__ import annotations

import math

import torch

from runtime.base.kv_cache_spec import RING, StateGroupSpec
from runtime.kernels.step.state_rows import ConvState, DeltaState
from runtime.kernels.tier.block_runs import BlockRuns


class StateCache:
    """Rows of states. Row 0, the null row, belongs to the null slot."""

    def __init__(self, spec: StateGroupSpec, num_states: int, num_slots: int, device: torch.device) -> None:
        dtype = getattr(torch, spec.dtype)
        num_layers, heads = len(spec.layers), spec.heads
        size = -(-spec.bytes_per_state // 16) * 16
        self.rows = torch.zeros((num_states, size), dtype=torch.uint8, device=device)
        at = 0

        def take(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            nonlocal at
            size = math.prod(shape) * dtype.itemsize
            taken, at = self.rows[:, at : at + size], at + size
            return taken.view(dtype).view(num_states, *shape)

        states = take(torch.float32, num_layers, heads, spec.key_dim, spec.value_dim) if heads else None
        positions = take(torch.int32, num_layers, heads) if heads else None
        inputs = take(dtype, num_layers, RING, spec.channels)
        self.layers: dict[int, ConvState | DeltaState] = {}
        self._pending = torch.zeros(
            (num_layers, num_slots + 1, heads, RING * (spec.key_dim + spec.value_dim + 1)), device=device
        )
        for i, layer in enumerate(spec.layers):
            if states is None or positions is None:
                self.layers[layer] = ConvState(inputs[:, i])
                continue
            sizes = [RING * spec.key_dim, RING * spec.value_dim, RING]
            keys, values, decays = self._pending[i].split(sizes, -1)
            ring = keys.unflatten(-1, (RING, -1)), values.unflatten(-1, (RING, -1)), decays
            self.layers[layer] = DeltaState(inputs[:, i], states[:, i], positions[:, i], *ring)

    def copy(self, source: int, target: int) -> None:
        """Copy a row, in all layers."""
        self.rows[target].copy_(self.rows[source])

    def runs(self, part: int, slot_words: int) -> BlockRuns:
        """All rows' memory for one part. A part fills a slot, and the last one may be shorter."""
        words, size = self.rows.view(torch.int64).view(-1), self.rows.shape[1] // 8
        return BlockRuns(words, 1, min(slot_words, size - part * slot_words), 0, size)
