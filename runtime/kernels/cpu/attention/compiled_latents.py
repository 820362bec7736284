"""Attention over latents on a CPU in the absorbed form (kernels/attention/latent_torch.py), as compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch

from runtime.kernels.attention.latent_torch import LatentForm
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.tiled_rows import TiledRows
from runtime.kernels.cpu.attention.compiled_attention import CompiledAttention, kv_form
from runtime.kernels.cpu.attention.latent_rows import copy_heads, latent_store
from runtime.kernels.cpu.experts.expert_product import expert_dense_product, expert_int_product
from runtime.kernels.cpu.linear.dense_product import MOST_BLOCKS
from runtime.kernels.cpu.linear.interleaved_linear import quantized_rows
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.cpu.linear.pack import packed_blocks
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS, row_span
from runtime.kernels.llvm.launcher import Launcher, kernel


@dataclass(frozen=True, slots=True)
class _HeadMap:
    """Each head's projection: [num_heads * size_out, size_in], multiplied like a mixture's experts."""

    weight: torch.Tensor | InterleavedWeight  # blocks of a dense weight
    addresses: torch.Tensor  # int64 [num_heads, n]: each head's tensors, as the kernel reads them
    size_in: int
    size_out: int


def _head_map(weight: torch.Tensor | InterleavedWeight, num_heads: int) -> _HeadMap:
    """The map of a weight [num_heads * size_out, size_in]."""
    size_out, size_in = weight.shape[0] // num_heads, weight.shape[1]
    stored = packed_blocks(weight) if isinstance(weight, torch.Tensor) else weight
    tensors = [*((stored,) if isinstance(stored, torch.Tensor) else stored.tensors), None]  # no bias
    words = [
        [0 if each is None else each.data_ptr() + head * (each.nbytes // num_heads) for each in tensors]
        for head in range(num_heads)
    ]
    return _HeadMap(stored, torch.tensor(words), size_in, size_out)


@dataclass(frozen=True, slots=True)
class CompiledLatentUp:
    """The map kv_b from latents to keys and values, as maps of heads."""

    absorb: _HeadMap  # q without positions -> a query over latents
    values: _HeadMap  # latents -> values


class CompiledLatents:
    """The operations of latent attention, for float32 rows."""

    def __init__(self, launcher: Launcher, attention: CompiledAttention, num_limbs: int = 2) -> None:
        self.launcher, self._attention, self._num_limbs = launcher, attention, num_limbs

    def up(self, weight: torch.Tensor, nope_dim: int) -> CompiledLatentUp:
        """The map kv_b with a weight [num_heads, nope_dim + value_dim, rank]."""
        (num_heads, _, rank), keys, values = weight.shape, weight[:, :nope_dim], weight[:, nope_dim:]
        absorb = keys.transpose(1, 2).reshape(-1, nope_dim)
        return self.up_of_maps(absorb, values.reshape(-1, rank), num_heads)

    def up_of_maps(
        self, absorb: torch.Tensor | InterleavedWeight, values: torch.Tensor | InterleavedWeight, num_heads: int
    ) -> CompiledLatentUp:
        """kv_b as two maps: [num_heads * rank, nope_dim] and [num_heads * value_dim, rank]."""
        return CompiledLatentUp(_head_map(absorb, num_heads), _head_map(values, num_heads))

    def store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],  # the table and the positions
        kv: torch.Tensor,
        kv_index: torch.Tensor,
        form: LatentForm,
    ) -> None:
        """`latent_store_torch` as one kernel. The rotary keys in `latents` are rotated in place, too."""
        (num_tokens, num_heads, head_dim), (table, positions), (norm, eps, interleaved) = q.shape, rope, form
        constants = {"form": kv_form(kv), "rope_dim": table.shape[-1], "interleaved": interleaved}
        sizes = num_tokens, num_heads, head_dim, q.stride(0), latents.stride(0), table.stride(0)
        arguments = (q, latents, table, positions, norm, kv, kv_index, *sizes, eps)
        parts = self.launcher.parts(num_tokens * (num_heads + 1), 8 * num_tokens * (num_heads + 8) * table.shape[-1])
        self.launcher.launch(kernel(latent_store, **constants), arguments, parts)

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        plan: TiledRows,
        up: CompiledLatentUp,
        scale: float,
        first_key: int = 0,
    ) -> torch.Tensor:
        """`latent_attention_torch` in the absorbed form; its result is valid until the next call."""
        num_tokens, num_heads, head_dim = q.shape
        width, nope_dim = kv.shape[-1], up.absorb.size_in
        queries = self.launcher.buffer("latent queries", num_tokens, num_heads, width)
        self._multiply(up.absorb, q, queries)
        self._copy(q, nope_dim, head_dim - nope_dim, queries, up.absorb.size_out)
        mixed = self._attention.attention(queries, kv, plan, AttentionForm(scale, first_key=first_key))
        out = self.launcher.buffer("latent values", num_tokens, num_heads, up.values.size_out)
        self._multiply(up.values, mixed.view(num_tokens, num_heads, width), out)
        return out.view(num_tokens, -1)

    def _copy(self, x: torch.Tensor, first: int, count: int, out: torch.Tensor, at: int) -> None:
        """Copy `count` elements of each head in x, from `first` on, to `at` in each head of `out`."""
        num_tokens, num_heads, head_dim = x.shape
        arguments = (x, out, num_tokens, num_heads, head_dim, x.stride(0), out.shape[2])
        parts = self.launcher.parts(num_tokens, 8 * num_tokens * num_heads * count)
        self.launcher.launch(kernel(copy_heads, first=first, count=count, at=at), arguments, parts)

    def _multiply(self, head_map: _HeadMap, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write each head's product with the first numbers of x [num_tokens, num_heads, >= size_in] to `out`."""
        (num_tokens, num_heads, _), weight, launcher = x.shape, head_map.weight, self.launcher
        num_blocks, size_in = head_map.size_out // ROWS, head_map.size_in
        constants = {"num_experts": num_heads, "has_bias": False}
        starts, out_rows = _starts_of_heads(num_tokens, num_heads), _rows_of_heads(num_tokens, num_heads, num_heads, 1)
        parts = launcher.parts(-(-num_blocks // MOST_BLOCKS), num_tokens * num_heads * head_map.size_out * size_in)
        if isinstance(weight, InterleavedWeight):
            if x.stride(0) != num_heads * x.stride(1):
                whole = launcher.buffer("latent heads", num_tokens, num_heads, size_in)
                self._copy(x, 0, size_in, whole, 0)
                x = whole
            precision = self._num_limbs, row_span(8 * self._num_limbs, weight.form)
            rows = quantized_rows(launcher, x.view(num_tokens * num_heads, -1), size_in, precision)
            function = kernel(expert_int_product, form=weight.form, limbs=self._num_limbs, **constants)
            arguments = (head_map.addresses, starts, out_rows, out_rows, *rows, out)
            launcher.launch(
                function, (*arguments, num_tokens * num_heads, num_blocks, size_in // COLUMNS, out.stride(1)), parts
            )
            return
        unit = gcd(x.stride(0), x.stride(1))  # elements between two rows in x that the kernel can name
        x_rows = _rows_of_heads(num_tokens, num_heads, x.stride(0) // unit, x.stride(1) // unit)
        function = kernel(expert_dense_product, dtype=weight.dtype, **constants)
        sizes = num_blocks, size_in, unit, out.stride(1)
        launcher.launch(function, (head_map.addresses, starts, x_rows, out_rows, x, out, *sizes), parts)


@lru_cache(64)
def _rows_of_heads(num_tokens: int, num_heads: int, token_stride: int, head_stride: int) -> torch.Tensor:
    """int32 [num_heads * num_tokens]: the row of each head's tokens, head after head."""
    rows = np.arange(num_heads)[:, None] * head_stride + np.arange(num_tokens) * token_stride
    return torch.from_numpy(np.ascontiguousarray(rows, np.int32))


@lru_cache(64)
def _starts_of_heads(num_tokens: int, num_heads: int) -> torch.Tensor:
    """int32 [num_heads + 1]: where each head's rows begin."""
    return torch.from_numpy(np.arange(num_heads + 1, dtype=np.int32) * np.int32(num_tokens))
