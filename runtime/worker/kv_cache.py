"""KVCache: the memory of keys and values. Nothing else knows how large it is or how it is laid out."""

from __future__ import annotations

import torch

from runtime.core.kv_cache_spec import KVCacheSpec


class KVCache:
    """The blocks of all layers, `layers[i]` those of layer i, as the attention kernels read them:

    [2 (k, v), num_kv_heads, num_blocks, block_size, head_dim]

    A block belongs to one group of layers at a time. The i-th layers of all groups lie in the same memory, since a
    block is nobody's but one group's."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Zeros: what is masked must be finite. Block 0 is the null block."""
        self.spec, self.num_blocks, self.block_size, self.device = spec, num_blocks, block_size, device
        group = spec.groups[0]
        shapes = {(g.num_kv_heads, g.head_dim, g.dtype, g.scale_dtype) for g in spec.groups}
        assert shapes == {(group.num_kv_heads, group.head_dim, group.dtype, None)}, f"no layout for {shapes}"
        self.num_kv_heads, self.dtype = group.num_kv_heads, getattr(torch, group.dtype)
        num_layers = max(len(g.layers) for g in spec.groups)
        shape = (num_layers, 2, group.num_kv_heads, num_blocks, block_size, group.head_dim)
        self._blocks = torch.zeros(shape, dtype=self.dtype, device=device)
        views = self._blocks.unbind(0)
        self.layers = [views[spec.place_of(layer)[1]] for layer in range(spec.num_layers)]

    def clear(self, blocks: torch.Tensor | int) -> None:
        """Zero these blocks in all layers."""
        self._blocks[:, :, :, blocks] = 0
