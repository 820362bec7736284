"""Attention over latents on a CPU in the absorbed form (kernels/attention/latent_torch.py), as compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch

from runtime.kernels.cpu.attention.compiled_attention import CompiledAttention, kv_form
from runtime.kernels.cpu.attention.latent_rows import copy_rotary, latent_store
from runtime.kernels.cpu.attention.tiled_rows import TiledRows
from runtime.kernels.cpu.experts.expert_product import expert_dense_product
from runtime.kernels.cpu.linear.dense_product import MOST_BLOCKS
from runtime.kernels.cpu.linear.dense_weight import DenseWeight, dense_weight
from runtime.kernels.cpu.linear.interleaved_weight import ROWS
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.spec.latent_spec import LatentSpec


def has_compiled_latents(latent: LatentSpec) -> bool:
    """True if the kernels take latents of these sizes."""
    return latent.rank % ROWS == 0 and latent.value_dim % ROWS == 0 and latent.rope_dim % 2 == 0


@dataclass(frozen=True, slots=True)
class _HeadMap:
    """A map of each head: [num_heads * size_out, size_in], multiplied like the experts of a mixture."""

    weight: DenseWeight
    addresses: torch.Tensor  # int64 [num_heads, 2]: the head's blocks, and no bias
    size_in: int
    size_out: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> _HeadMap:
        """Of a float32 weight [num_heads, size_out, size_in]."""
        num_heads, size_out, size_in = weight.shape
        stored = dense_weight(weight.reshape(-1, size_in))
        of_head = stored.values.nbytes // num_heads
        first = stored.values.data_ptr()
        addresses = torch.tensor([[first + head * of_head, 0] for head in range(num_heads)])
        return cls(stored, addresses, size_in, size_out)


@dataclass(frozen=True, slots=True)
class CompiledLatentUp:
    """The map kv_b from latents to keys and values, as maps of heads."""

    absorb: _HeadMap  # q without positions -> a query over latents
    values: _HeadMap  # latents -> values


class CompiledLatents:
    """The operations of latent attention, for float32 rows."""

    def __init__(self, launcher: Launcher, attention: CompiledAttention) -> None:
        self.launcher, self._attention = launcher, attention

    def up(self, weight: torch.Tensor, nope_dim: int) -> CompiledLatentUp:
        """The map kv_b with a weight [num_heads, nope_dim + value_dim, rank]."""
        keys, values = weight.split([nope_dim, weight.shape[1] - nope_dim], 1)
        return CompiledLatentUp(_HeadMap.of(keys.transpose(1, 2)), _HeadMap.of(values))

    def store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],  # the table and the positions
        norm: torch.Tensor,
        eps: float,
        kv: torch.Tensor,
        kv_index: torch.Tensor,
        interleaved: bool,
    ) -> None:
        """`latent_store_torch` as one kernel. The rotary keys in `latents` are rotated in place, too."""
        (num_tokens, num_heads, head_dim), (table, positions) = q.shape, rope
        constants = {"form": kv_form(kv), "rope_dim": table.shape[-1], "interleaved": interleaved}
        sizes = num_tokens, num_heads, head_dim, q.stride(0), latents.stride(0), table.stride(0)
        arguments = (q, latents, table, positions, norm, kv, kv_index, *sizes, eps)
        parts = self.launcher.parts(num_tokens * (num_heads + 1), 8 * num_tokens * (num_heads + 8) * table.shape[-1])
        self.launcher.launch(kernel(latent_store, **constants), arguments, parts)

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, plan: TiledRows, up: CompiledLatentUp, *, scale: float
    ) -> torch.Tensor:
        """`latent_attention_torch` in the absorbed form; its result is valid until the next call."""
        num_tokens, num_heads, head_dim = q.shape
        width, rope_dim = kv.shape[-1], head_dim - up.absorb.size_in
        queries = self.launcher.buffer("latent queries", num_tokens, num_heads, width)
        self._multiply(up.absorb, q, queries)
        self.launcher.launch(
            kernel(copy_rotary, rope_dim=rope_dim),
            (q, queries, num_tokens, num_heads, head_dim, q.stride(0), width),
            self.launcher.parts(num_tokens, 8 * num_tokens * num_heads * rope_dim),
        )
        mixed = self._attention.attention(queries, kv, plan, scale=scale, window=0, soft_cap=0.0)
        out = self.launcher.buffer("latent values", num_tokens, num_heads, up.values.size_out)
        self._multiply(up.values, mixed.view(num_tokens, num_heads, width), out)
        return out.view(num_tokens, -1)

    def _multiply(self, weight: _HeadMap, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write each head's product with the first numbers of x [num_tokens, num_heads, >= size_in] to `out`."""
        num_tokens, num_heads, _ = x.shape
        unit = gcd(x.stride(0), x.stride(1))  # numbers of x between two rows that the kernel can name
        x_rows = _rows_of_heads(num_tokens, num_heads, x.stride(0) // unit, x.stride(1) // unit)
        out_rows = _rows_of_heads(num_tokens, num_heads, num_heads, 1)
        starts = _starts_of_heads(num_tokens, num_heads)
        num_blocks = weight.size_out // ROWS
        sizes = num_blocks, weight.size_in, unit, out.stride(1)
        function = kernel(expert_dense_product, num_experts=num_heads, dtype=weight.weight.values.dtype, has_bias=False)
        arguments = (weight.addresses, starts, x_rows, out_rows, x, out, *sizes)
        work = num_tokens * weight.weight.values.numel()
        self.launcher.launch(function, arguments, self.launcher.parts(-(-num_blocks // MOST_BLOCKS), work))


@lru_cache(64)
def _rows_of_heads(num_tokens: int, num_heads: int, of_token: int, of_head: int) -> torch.Tensor:
    """int32 [num_heads * num_tokens]: the row of each head's tokens, head after head."""
    rows = np.arange(num_heads)[:, None] * of_head + np.arange(num_tokens) * of_token
    return torch.from_numpy(np.ascontiguousarray(rows, np.int32))


@lru_cache(64)
def _starts_of_heads(num_tokens: int, num_heads: int) -> torch.Tensor:
    """int32 [num_heads + 1]: where each head's rows begin."""
    return torch.from_numpy(np.arange(num_heads + 1, dtype=np.int32) * np.int32(num_tokens))
