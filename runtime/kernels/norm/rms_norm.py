"""Root-mean-square norm (arXiv 1910.07467). What it normalises is complete: products add to the residual themselves,
unless a family norms them first."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl


def rms_norm_torch(
    x: torch.Tensor,  # [num_tokens, hidden]
    weight: torch.Tensor,  # [hidden], x's dtype or fp32
    eps: float,
    residual: torch.Tensor | None = None,  # [num_tokens, hidden] contiguous: added to in place and returned
) -> torch.Tensor:
    """norm(x) * weight, computed in fp32, returned in x's dtype."""
    y = F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return y if residual is None else residual.add_(y)


def rms_norm_in_place_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x = norm(x) * weight; the rows of x [num_tokens, hidden] may be strided."""
    x.copy_(rms_norm_torch(x, weight, eps))


@jit
def _rms_norm_kernel(
    x_ptr,  # [num_tokens, hidden], rows x_stride apart
    weight_ptr,  # [hidden]
    out_ptr,  # [num_tokens, hidden], rows out_stride apart; perhaps x
    x_stride,
    out_stride,
    hidden,
    eps,
    RESIDUAL: tl.constexpr,  # adds to out
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
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
    out = x * scale * weight
    if RESIDUAL:
        out += tl.load(out_ptr + row * out_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rms_norm_torch` as one kernel, a program a row; x's rows may be strided."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual
    _launch(x, weight, eps, out, residual is not None)
    return out


def rms_norm_in_place_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`rms_norm_in_place_torch`, likewise."""
    _launch(x, weight, eps, x, False)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, adds: bool) -> None:
    num_tokens, hidden = x.shape
    if num_tokens:
        block, pdl = next_power_of_2(hidden), use_pdl(x)
        _rms_norm_kernel[(num_tokens,)](
            x, weight, out, x.stride(0), out.stride(0), hidden, eps,
            RESIDUAL=adds, BLOCK=block, PDL=pdl, num_warps=min(max(block // 256, 1), 8), launch_pdl=pdl,
        )  # fmt: skip
