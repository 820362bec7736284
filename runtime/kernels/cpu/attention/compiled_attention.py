"""Attention, rotary positions and the writes to the paged cache, as calls of compiled kernels."""

from __future__ import annotations

import torch

from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.rope import PLAIN_HEADS, HeadForm
from runtime.kernels.attention.tiled_rows import TiledRows
from runtime.kernels.cpu.attention.attention import attention, heads_of_task
from runtime.kernels.cpu.attention.gate_output import gate_output
from runtime.kernels.cpu.attention.latent_rows import copy_heads
from runtime.kernels.cpu.attention.rope_store import rope_store
from runtime.kernels.cpu.attention.stored_numbers import KVForm
from runtime.kernels.llvm.launcher import Launcher, kernel


class CompiledAttention:
    """The operations around the paged cache, for float32 rows."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def rope_store_kv(
        self,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],  # the table and the positions
        kv: torch.Tensor,
        kv_index: torch.Tensor,
        form: HeadForm = PLAIN_HEADS,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`rope_store_kv_torch` as one kernel."""
        heads, q_norm, k_norm, eps, v_norm = form
        if qkv.stride(2) != 1 or qkv.stride(1) != qkv.shape[2]:
            qkv = qkv.contiguous()
        if heads == "qk":
            qkv = self._with_keys_as_values(qkv, kv.shape[1])
        num_tokens, all_heads, _ = qkv.shape
        num_kv_heads, cache_positions = kv.shape[1], _head_stride(kv)
        num_heads, (table, positions) = all_heads - (0 if heads == "q" else 2) * num_kv_heads, rope
        constants = {"has_norms": q_norm is not None, "has_v_norm": v_norm, "stores": heads != "q"}
        function = kernel(rope_store, form=kv_form(kv), **constants)
        sizes = num_tokens, num_heads, num_kv_heads, qkv.stride(0), table.stride(0), cache_positions
        arguments = (qkv, table, positions, kv, scales, kv_index, q_norm, k_norm, *sizes, eps)
        parts = self.launcher.parts(num_tokens * all_heads, 8 * qkv.numel())
        self.launcher.launch(function, arguments, parts)
        return qkv[:, :num_heads]

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        plan: TiledRows,
        form: AttentionForm,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attention_torch` as one kernel; its result is valid until the next call."""
        (num_tokens, num_heads, head_dim), (scale, window, soft_cap, sinks, whole_images, first_key) = q.shape, form
        num_kv_heads = kv.shape[1]
        group, num_tiles = num_heads // num_kv_heads, len(plan.tiles)
        out = self.launcher.buffer("attention", num_tokens, num_heads * head_dim)
        # Heads that share keys are one task, unless that gives the threads unequal shares.
        task_heads, num_threads = heads_of_task(group), self.launcher.pool.num_threads
        is_even = num_heads // task_heads % num_threads == 0 or num_tiles * num_kv_heads >= 4 * num_threads
        per_task = task_heads if is_even else 1
        last_visible = plan.last_visible if whole_images else None
        function = kernel(
            attention, form=kv_form(kv), group=group, window=window, first_key=first_key, soft_cap=soft_cap,
            has_sinks=sinks is not None, has_images=last_visible is not None, max_heads=task_heads,
        )  # fmt: skip
        sizes = q.stride(0), _head_stride(kv), plan.tables.stride(0), num_tiles, num_heads, per_task
        arguments = (q, kv, scales, sinks, plan.tables, plan.tiles, last_visible, out, *sizes, scale)
        parts = self.launcher.parts(num_tiles * num_heads // per_task, 1 << 20)  # positions are not known here
        self.launcher.launch(function, arguments, parts)
        return out

    def _with_keys_as_values(self, qk: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """q and k, and k once more."""
        num_tokens, num_heads, head_dim = qk.shape
        out = self.launcher.buffer("keys as values", num_tokens, num_heads + num_kv_heads, head_dim)
        kv_width = num_kv_heads * head_dim
        width, parts = num_heads * head_dim, self.launcher.parts(num_tokens, 8 * qk.numel())
        for first, count, at in ((0, width, 0), (width - kv_width, kv_width, width)):
            arguments = (qk, out, num_tokens, 1, width, qk.stride(0), width + kv_width)
            self.launcher.launch(kernel(copy_heads, first=first, count=count, at=at), arguments, parts)
        return out

    def gate_output(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`gate_output_torch` as one kernel."""
        num_tokens, columns = out.shape
        parts = self.launcher.parts(num_tokens, 16 * out.numel())
        self.launcher.launch(kernel(gate_output), (out, gate, num_tokens, columns, gate.stride(0)), parts)
        return out


def _head_stride(kv: torch.Tensor) -> int:
    """Positions from one head's cache to the next one's."""
    return kv.stride(1) // kv.shape[4]


def kv_form(kv: torch.Tensor) -> KVForm:
    """The form of a layer's cache [2, num_kv_heads, num_blocks, block_size, head_dim]; latents: [1, 1, ...]."""
    return KVForm(kv.dtype, kv.shape[4], kv.shape[3], kv.shape[0] == 1)
