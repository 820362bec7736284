"""Layer norm (arXiv 1607.06450), with the signature of the RMS norm: its weight and bias are one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl


def layer_norm_torch(
    x: torch.Tensor,  # [num_tokens, hidden]
    weight: torch.Tensor,  # [2, hidden]: weight and bias
    eps: float,
    residual: torch.Tensor | None = None,  # [num_tokens, hidden]: added to in place and returned
) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias, computed in fp32, returned in x's dtype."""
    y = F.layer_norm(x, weight.shape[1:], weight[0], weight[1], eps)
    return y if residual is None else residual.add_(y)


@jit
def _layer_norm_kernel(
    x_ptr,  # [num_tokens, hidden], rows x_stride apart
    weight_ptr,  # [2, hidden]
    out_ptr,  # [num_tokens, hidden] contiguous
    x_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,  # power of two, at least hidden
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(weight_ptr + hidden + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # first: the linear layer that follows may request its weights
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, axis=0) / hidden, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    out = x * scale * weight + bias
    tl.store(out_ptr + row * hidden + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`layer_norm_torch` as one kernel, a program a row; x's rows may be strided."""
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens:
        block, pdl = next_power_of_2(hidden), use_pdl(x)
        _layer_norm_kernel[(num_tokens,)](
            x, weight, out, x.stride(0), hidden, eps,
            BLOCK=block, PDL=pdl, num_warps=min(max(block // 256, 1), 8), launch_pdl=pdl,
        )  # fmt: skip
    return out if residual is None else residual.add_(out)
