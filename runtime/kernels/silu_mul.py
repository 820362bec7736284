"""The gated activation of the feed-forward layer: silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels._triton import jit, tl

_BLOCK = 1024  # columns of a program


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * ffn] -> [num_tokens, ffn]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul_exact(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul_torch` whose bits do not depend on the number of rows: F.silu's vector body and scalar tail differ in
    the last bit, and where the tail falls depends on how threads share the rows; exp's do not, and the rest is exactly
    rounded."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


@jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * ffn] contiguous
    out_ptr,  # [num_tokens, ffn] contiguous
    ffn,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < ffn
    at = gate_up_ptr + row * 2 * ffn + cols
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + ffn, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * ffn + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul_torch` as one kernel; an element's bits depend on nothing but its own two inputs."""
    num_tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, ffn), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_mul_kernel[(num_tokens, -(-ffn // _BLOCK))](gate_up.contiguous(), out, ffn, BLOCK=_BLOCK, num_warps=4)
    return out
