"""KVCache: the memory of keys, values and states. Its size and layout are known only here."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.step.state_rows import ConvState, DeltaState
from runtime.kernels.tier.block_runs import BlockRuns
from runtime.worker.state_cache import StateCache


class KVCache:
    """All layers' blocks. Attention kernels read layer i's blocks in `layers[i]`.

    A block belongs to one layer group at a time, so all groups' i-th layers share the same memory."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        head_scales: torch.Tensor | None = None,  # [num_layers, 2, num_kv_heads] e4m3 scales; None if all are 1
        memory: AbstractContextManager[None] | None = None,  # context in which the blocks are allocated
        states: StateCache | None = None,  # set for a model with states
    ) -> None:
        """Fill the cache with zeros: masked values must be finite. Block 0 is the null block."""
        self.spec, self.num_blocks, self.block_size, self.device = spec, num_blocks, block_size, device
        group, self.states = spec.groups[0], states
        assert len({(g.dtype, g.scale_dtype) for g in spec.groups}) == 1, "groups store alike"
        dtype = getattr(torch, group.dtype)
        scale_dtype = None if group.scale_dtype is None else getattr(torch, group.scale_dtype)
        make = _MixedBlocks if spec.is_mixed else _EqualBlocks
        with memory or nullcontext():
            self._blocks = make(spec, num_blocks, block_size, dtype, scale_dtype, device)
        if scale_dtype is None and dtype == torch.float8_e4m3fn and head_scales is None:
            head_scales = torch.ones(spec.num_layers, 2, max(g.num_kv_heads for g in spec.groups))
        if head_scales is not None:
            head_scales = head_scales.to(device, torch.float32)
        self.layers: list[KVLayer | ConvState | DeltaState] = []
        for layer in range(spec.num_layers):
            if states is not None and layer in states.layers:
                self.layers.append(states.layers[layer])
                continue
            number, place = spec.place_of(layer)
            values, scales = self._blocks.layer(number, place)
            if scales is None and head_scales is not None:
                source = spec.sources[layer] if spec.sources else layer
                scales = head_scales[source, :, : spec.groups[number].num_kv_heads].contiguous()  # a rank has a slice
            self.layers.append(KVLayer(values, scales, number))

    @property
    def table_factors(self) -> list[int]:
        """For each group, the factor of block ids in the tables that kernels read."""
        return self._blocks.factors

    def clear(self, blocks: torch.Tensor | slice | int) -> None:
        """Zero these blocks in all layers."""
        self._blocks.clear(blocks)

    def runs(self, group: int) -> list[BlockRuns]:
        """The memory of a group's blocks: values, then scales. The block size is a multiple of 8."""
        return self._blocks.runs(group)


class _EqualBlocks:
    """Blocks for groups with one shape. A head's blocks lie side by side."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        group, self._num_layers = spec.groups[0], [len(g.layers) for g in spec.groups]
        num_layers = max(self._num_layers)
        shape = (num_layers, group.vectors, group.num_kv_heads, num_blocks, block_size, group.head_dim)
        self.factors = [1] * len(spec.groups)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._scales: torch.Tensor | None = None  # token scales, in blocks like the values
        if scale_dtype is not None:
            self._scales = torch.zeros((num_layers, *shape[2:-1], 2), dtype=scale_dtype, device=device)

    def layer(self, group: int, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values and the scales of a layer, by its index in its group."""
        return self._values[place], None if self._scales is None else self._scales[place]

    def runs(self, group: int) -> list[BlockRuns]:
        """Blocks are the third last dimension. A run is a block of one head."""
        found = []
        for x in (self._values, *(() if self._scales is None else (self._scales,))):
            run = _num_words(x, *x.shape[-2:])
            num_runs = self._num_layers[group] * math.prod(x.shape[1:-3])
            found.append(BlockRuns(_words(x), num_runs, run, x.shape[-3] * run, run))
        return found

    def clear(self, blocks: torch.Tensor | slice | int) -> None:
        self._values[:, :, :, blocks] = 0
        if self._scales is not None:
            self._scales[:, :, blocks] = 0


class _MixedBlocks:
    """Blocks for groups that differ in shape. A block's layers lie side by side.

    A group sees the memory as runs, each `block_size` rows with its width. A head's keys are one run in a block, and so
    are its values. Tables hold run numbers: a block's id times the runs per block. Layers, k and v, and heads are
    other offsets, so kernels read this layout like the other one."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.factors = list(spec.rows_per_token)
        self._groups, self._size = spec.groups, block_size
        elements = block_size * self.factors[0] * spec.groups[0].head_dim
        self._values = torch.zeros((num_blocks, elements), dtype=dtype, device=device)
        self._scales = {} if scale_dtype is None else {
            rows: torch.zeros((num_blocks, rows * block_size * 2), dtype=scale_dtype, device=device)
            for rows in set(self.factors)
        }  # fmt: skip

    def layer(self, group: int, place: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values and the scales of a layer, by its index in its group."""
        own, factor = self._groups[group], self.factors[group]
        num_runs, run = (len(self._values) - 1) * factor + 1, self._size * own.head_dim
        first, heads = place * 2 * own.num_kv_heads, own.num_kv_heads
        shape, strides = (2, heads, num_runs, self._size, own.head_dim), (heads * run, run, run, own.head_dim, 1)
        values = self._values.as_strided(shape, strides, first * run)
        if not self._scales:
            return values, None
        run = 2 * self._size  # a key's scale and a value's lie at the key's place
        return values, self._scales[factor].as_strided((*shape[1:-1], 2), (run, run, 2, 1), first * run)

    def runs(self, group: int) -> list[BlockRuns]:
        own, values = self._groups[group], self._values
        num_layers, rows = len(own.layers), own.num_kv_heads * self._size
        run = _num_words(values, num_layers * 2 * rows, own.head_dim)
        found = [BlockRuns(_words(values), 1, run, 0, _num_words(values, values.shape[1]))]
        if self._scales:
            scales = self._scales[self.factors[group]]
            run = _num_words(scales, rows, 2)  # the places of values' scales are not used
            found.append(BlockRuns(_words(scales), num_layers, run, 2 * run, _num_words(scales, scales.shape[1])))
        return found

    def clear(self, blocks: torch.Tensor | slice | int) -> None:
        for each in (self._values, *self._scales.values()):
            each[blocks] = 0


def _words(x: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, [n] int64."""
    return x.view(-1).view(torch.int64)


def _num_words(x: torch.Tensor, *shape: int) -> int:
    """The words of `shape` elements."""
    return math.prod(shape) * x.itemsize // 8
