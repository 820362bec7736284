"""Linear layers: the forms in which a decoder uses a weight, and the products behind them on a CPU.

There, weights are packed once into oneDNN's own blocked layout, with F.linear as the fallback. Packed is
far faster than F.linear at few rows (fp32 1.8x at one row), and bit-invariant: from two rows on, a row's
result depends neither on the number of rows nor on its place among them. The two calls are private to torch, so a
build without them falls back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]  # [num_tokens, in] -> [num_tokens, out]

_ROWS_HINT = 64  # for what batch oneDNN picks the layout; measured flat from 8 to 256
_TILE = 16  # rows of one fixed-shape call of `tiled_linear`


class Linear:
    """One weight with what surrounds it in a decoder: the norm before it, the activation or the residual after it.

    This is the plain form, from the separate operations; runtime.kernels.fused_linear has the one for GPUs."""

    def __init__(self, product: Product, norm: Callable, activate: Callable) -> None:
        self.product, self.norm, self.activate = product, norm, activate

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        """residual += linear(x), in place; with `post_norm`, an RMS norm's weight, norm(linear(x))."""
        if post_norm is None:
            residual.add_(self.product(x))
        else:
            self.norm(self.product(x), post_norm, eps, residual)

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """linear(norm(x))."""
        return self.product(self.norm(x, norm_weight, eps))

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """activation(gate) * up of the normed input; the weight's rows are the gate's, then the up projection's.

        Where there is no gate, activation(up)."""
        return self.activate(self.normed(x, norm_weight, eps))

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`normed` for the output head; in fp32, and in `out` if given, where the form can."""
        return self.normed(x, norm_weight, eps)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch build, dtype and device have packed linear layers."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    supported = {torch.float32: lambda: True, torch.bfloat16: ops._is_mkldnn_bf16_supported,
                 torch.float16: ops._is_mkldnn_fp16_supported}  # fmt: skip
    return dtype in supported and supported[dtype]()


def cpu_product(weight: torch.Tensor, bias: torch.Tensor | None, packed: bool, deterministic: bool) -> Product:
    """x @ weight.T + bias for weight [out, in]. Deterministic: a row's bits do not depend on the other rows."""
    if not packed:
        return tiled_linear(weight, bias) if deterministic else lambda x: F.linear(x, weight, bias)
    return packed_linear(weight, bias, min_rows=2 if deterministic else 1)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, min_rows: int) -> Product:
    """`min_rows=2` pads a single row, which oneDNN may send to another kernel with another order of sums."""
    call = torch.ops.mkldnn._linear_pointwise.default
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < min_rows:
            return call(x.expand(min_rows, -1).contiguous(), blocked, bias, "none", [], "")[: x.shape[0]]
        return call(x, blocked, bias, "none", [], "")

    return linear


def tiled_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """F.linear over tiles of a fixed number of rows, so that every row meets the same kernel whatever the batch."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        tiles = F.pad(x, (0, 0, 0, -num_rows % _TILE)).split(_TILE)
        return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:num_rows]

    return linear
