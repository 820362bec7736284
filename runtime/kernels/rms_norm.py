"""Root-mean-square norm (arXiv 1910.07467), with the residual addition that always comes before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels._triton import jit, next_power_of_2, tl, use_pdl


def rms_norm_torch(
    x: torch.Tensor,  # [num_tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    residual: torch.Tensor | None = None,  # [num_tokens, hidden], x is added to it in place
) -> torch.Tensor:
    """norm(x) * weight, or residual += x and norm(residual) * weight; computed in fp32, returned in x's dtype."""
    if residual is not None:
        x = residual.add_(x)
    return F.rms_norm(x, weight.shape, weight, eps)


@jit
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden], rows x_stride apart
    residual_ptr,  # [num_tokens, hidden] contiguous; not read without HAS_RESIDUAL
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden] contiguous
    x_stride,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least hidden
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # first: the linear layer that follows may request its weights
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + row * hidden + cols
        total = x + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)  # the norm sees what the residual stream keeps
        tl.store(at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + cols, out, mask=inside)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rms_norm_torch` as one kernel, a program a row; x's rows may be strided, the residual's may not."""
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens:
        block, pdl = next_power_of_2(hidden), use_pdl(x)
        _rms_norm_kernel[(num_tokens,)](
            x, x if residual is None else residual, weight, out, x.stride(0), hidden, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 256, 1), 8), launch_pdl=pdl,
        )  # fmt: skip
    return out
