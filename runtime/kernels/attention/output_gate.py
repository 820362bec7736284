"""The gate of attention's output: out *= sigmoid(gate)."""

from __future__ import annotations

import torch

from runtime.kernels.exact_functions import sigmoid
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl

_BLOCK = 1024  # columns per program


def gate_output_torch(
    out: torch.Tensor,  # [num_tokens, heads * head_dim] contiguous
    gate: torch.Tensor,  # [num_tokens, heads * head_dim], any stride between tokens
) -> torch.Tensor:
    """out * sigmoid(gate), in place, computed in float32."""
    return out.copy_(out.float() * sigmoid(gate.float()))


@jit
def _gate_output_kernel(out_ptr, gate_ptr, gate_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(gate_ptr + token * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + token * width + cols
    out = tl.load(at, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


def gate_output_triton(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`gate_output_torch` as one kernel."""
    num_tokens, width = out.shape
    if num_tokens:
        block, pdl = min(_BLOCK, next_power_of_2(width)), use_pdl(out)
        _gate_output_kernel[(num_tokens, -(-width // block))](
            out, gate, gate.stride(0), width, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out
