"""KVCache: the memory of keys, values and states. Its size and layout are known only here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.states.state_rows import ConvState, DeltaState
from runtime.spec.kv_cache_spec import KVCacheSpec
from runtime.worker.state_cache import StateCache


class KVCache:
    """The blocks of all layers. Attention kernels read the blocks of layer i in `layers[i]`.

    A block belongs to one group of layers at a time, so the i-th layers of all groups share the same memory."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        head_scales: torch.Tensor | None = None,  # [num_layers, 2, num_kv_heads] of e4m3 values; None if all are 1
        memory: AbstractContextManager[None] | None = None,  # context in which the blocks are allocated
        states: StateCache | None = None,  # of a model with states
    ) -> None:
        """Fill the cache with zeros: masked values must be finite. Block 0 is the null block."""
        self.spec, self.num_blocks, self.block_size, self.device = spec, num_blocks, block_size, device
        group = spec.groups[0]
        shapes = {(g.vectors, g.num_kv_heads, g.head_dim, g.dtype, g.scale_dtype) for g in spec.groups}
        assert len(shapes) == 1, f"no layout for {shapes}"
        self.num_kv_heads, dtype = group.num_kv_heads, getattr(torch, group.dtype)
        self.states = states
        num_layers = max(len(g.layers) for g in spec.groups)
        shape = (num_layers, group.vectors, group.num_kv_heads, num_blocks, block_size, group.head_dim)
        self._scales: torch.Tensor | None = None  # scales of tokens, in blocks like the values
        with memory or nullcontext():
            self._blocks = torch.zeros(shape, dtype=dtype, device=device)
            if group.scale_dtype is not None:
                of_tokens = (num_layers, *shape[2:-1], 2)
                self._scales = torch.zeros(of_tokens, dtype=getattr(torch, group.scale_dtype), device=device)
        if self._scales is None and dtype == torch.float8_e4m3fn and head_scales is None:
            head_scales = torch.ones(spec.num_layers, 2, group.num_kv_heads)
        if head_scales is not None:
            head_scales = head_scales.to(device, torch.float32).contiguous()  # a rank has a slice
        self.layers: list[KVLayer | ConvState | DeltaState] = []
        for layer in range(spec.num_layers):
            if states is not None and layer in states.layers:
                self.layers.append(states.layers[layer])
                continue
            number, place = spec.place_of(layer)
            scales = None if head_scales is None else head_scales[layer]
            scales = scales if self._scales is None else self._scales[place]
            self.layers.append(KVLayer(self._blocks[place], scales, number))

    def clear(self, blocks: torch.Tensor | slice | int) -> None:
        """Zero these blocks in all layers."""
        self._blocks[:, :, :, blocks] = 0
        if self._scales is not None:
            self._scales[:, :, blocks] = 0
