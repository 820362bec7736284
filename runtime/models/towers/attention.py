"""Attention in a tower: each patch attends to all patches of its picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from runtime.base.model.tower_spec import TowerSpec
from runtime.kernels.attention.rope import rope_rows_triton, rope_store_kv_triton
from runtime.models.towers.positions import rotary_positions, rotated
from runtime.models.towers.projectors import Operation

Turn = tuple[torch.Tensor, ...]


class PictureAttention:
    """Turns queries and keys by their patches' positions, and attends."""

    def __init__(self, spec: TowerSpec, backend: str) -> None:
        self._spec = spec
        # One kernel turns q and k, and places k and v. It turns a head in two halves.
        self._is_fused = backend == "triton" and spec.rope in ("halves", "interleaved") and not spec.qk_norm

    def turn(self, pictures: int, rows: int, columns: int, device: torch.device) -> Turn | None:
        """Return the rotary positions of pictures with one size; None for a tower without any."""
        if self._spec.rope == "none":
            return None
        cos, sin = rotary_positions(self._spec, rows, columns, device)
        if not self._is_fused:
            return cos, sin
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).view(2, rows * columns, -1)
        places = torch.arange(pictures * rows * columns, device=device)
        return *rope_rows_triton(table, places % (rows * columns)), places

    def __call__(self, maps: Sequence[torch.Tensor], norms: Sequence[Operation], turn: Turn | None) -> torch.Tensor:
        """[pictures, patches, heads * head_dim] of q, k and v, which are one tensor or three.

        `norms` has one each for a head's q, k and v, or is empty."""
        spec = self._spec
        if self._is_fused and turn is not None:
            q, k, v = self._turned(maps[0] if len(maps) == 1 else torch.cat(list(maps), -1), turn)
        else:
            parts = maps[0].chunk(3, -1) if len(maps) == 1 else maps
            q, k, v = (part.unflatten(-1, (spec.num_heads, spec.head_dim)) for part in parts)
            if norms:
                q, k, v = (norm(part) for norm, part in zip(norms, (q, k, v), strict=True))
            if turn is not None:
                q, k = rotated(q, turn), rotated(k, turn)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=spec.scale or spec.head_dim**-0.5)
        return mixed.transpose(1, 2).flatten(2)

    def _turned(self, qkv: torch.Tensor, turn: Turn) -> Sequence[torch.Tensor]:
        """Return q, k and v, each [pictures, heads, patches, head_dim]."""
        (heads, dim), (pictures, patches, _) = (self._spec.num_heads, self._spec.head_dim), qkv.shape
        table, positions, places = turn
        kv = qkv.new_empty((2, heads, pictures, patches, dim))
        q = rope_store_kv_triton(qkv.view(-1, 3 * heads, dim), (table, positions), kv, places)
        return q.view(pictures, patches, heads, dim).transpose(1, 2), *kv.transpose(1, 2).unbind()
