"""Linear layers: the forms in which a decoder uses a weight, and the products behind them on a CPU.

Weights are packed once into oneDNN's blocked layout, which is faster at few rows (fp32: 1.8x at one row). The two calls
are private to torch; a build without them uses F.linear.

A library's order of sums depends on the CPU, its version, the number of threads, the number of rows and a row's place.
Deterministic mode therefore uses only calls that were measured to return the same bits for a row everywhere
(`batch_invariant_product`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from runtime.kernels.linear.lora import RowAdapters

Product = Callable[[torch.Tensor], torch.Tensor]  # [num_tokens, in] -> [num_tokens, out]
Activate = Callable[[torch.Tensor], torch.Tensor]  # [num_tokens, 2 * ffn], or [num_tokens, ffn] -> [num_tokens, ffn]

_EXPECTED_ROWS = 64  # rows for which oneDNN chooses its layout; 8 to 256 were measured to give the same speed
# Candidate numbers of rows of a call in deterministic mode; `agreeing_sizes` selects the ones with equal bits.
_CALL_SIZES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 128, 256)
_MAX_MEASURED_ROWS = 8192  # rows of the weight that is measured: a longer one repeats the same work
_REFERENCE_SIZE = 16  # the call size that the others are compared with


class Norm(Protocol):
    """norm(x) * weight for rows x [num_tokens, hidden]. A residual is added to in place and returned."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Operands(NamedTuple):
    """What a linear layer multiplies with. The types of the weights belong to the backend."""

    weights: Sequence[Any]  # of consecutive outputs; one, unless a backend's weights differ in format
    bias: torch.Tensor | None  # [out]


def soft_cap_torch(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


class Linear:
    """One weight with its neighbours in a decoder: the norm before it, the activation or the residual after it.

    This class runs them as separate operations; runtime.kernels.linear.fused_linear has the fused form for GPUs."""

    product: Product

    def __init__(self, product: Product | None, norm: Norm, activate: Activate) -> None:
        """Without `product`, the class has it as a method."""
        if product is not None:
            self.product = product
        self.norm, self.activate = norm, activate

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        """residual += linear(x), in place; with `post_norm`, an RMS norm's weight, norm(linear(x))."""
        if post_norm is None:
            residual.add_(self.product(x))
        else:
            self.norm(self.product(x), post_norm, eps, residual)

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """linear(norm(x)), or linear(x) without the norm's weight."""
        return self.product(x if norm_weight is None else self.norm(x, norm_weight, eps))

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """activation(gate) * up of the normed input; the weight's rows are the gate's, then the up projection's.

        Without a gate, activation(up)."""
        return self.activate(self.normed(x, norm_weight, eps))

    def gated_into(
        self,
        down: Linear,
        residual: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        post_norm: torch.Tensor | None = None,
    ) -> None:
        """A feed-forward layer with this gate and up: `down.add_to` of the `gated` residual."""
        down.add_to(residual, self.gated(residual, norm_weight, eps), post_norm, eps)

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`normed` for the output head. The fused form returns float32, and writes to `out` if it is given."""
        return self.normed(x, norm_weight, eps)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """linear(x) in float32. The fused form does not round sums to x's dtype before."""
        return self.product(x).float()

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        """This layer for a step in which rows have adapters."""
        return AdaptedLinear(self, adapters)


class AdaptedLinear(Linear):
    """A linear layer plus adapters. Adapters read the normed input, too, so only the residual addition is fused."""

    def __init__(self, own: Linear, adapters: RowAdapters) -> None:
        super().__init__(self._sum, own.norm, own.activate)
        self.own, self.adapters = own, adapters

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        y = self.own.product(x)
        self.adapters(y, x)
        return y

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if post_norm is not None:
            super().add_to(residual, x, post_norm, eps)
        else:
            self.own.add_to(residual, x)
            self.adapters(residual, x)


def lookup_torch(table: torch.Tensor, ids: torch.Tensor, factor: float) -> torch.Tensor:
    """Rows of a table, times a factor."""
    rows = F.embedding(ids, table)
    return rows if factor == 1.0 else rows.mul_(factor)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this torch build has packed linear layers for the dtype and the device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.float16 and bool(ops._is_mkldnn_fp16_supported()))


def cpu_product(weight: torch.Tensor, bias: torch.Tensor | None, packed: bool, deterministic: bool) -> Product:
    """x @ weight.T + bias for weight [out, in]. Deterministic: a row's bits do not depend on the other rows."""
    if deterministic:
        return batch_invariant_product(weight, bias)
    return packed_linear(weight, bias) if packed else lambda x: F.linear(x, weight, bias)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """oneDNN's product with a copy of the weight in its layout, for a dtype that `can_pack`."""
    call = torch.ops.mkldnn._linear_pointwise.default
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
    return lambda x: call(x, blocked, bias, "none", [], "")


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """torch's own product."""
    return partial(F.linear, weight=weight, bias=bias)


def batch_invariant_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product that gives a row the same bits whatever the other rows are, on this machine with this many threads.

    Rows go through calls of a few fixed sizes, which were measured to return the same bits for a row at every place.
    If no packed form of the weight's dtype passes, the product is computed in float32. That happens with AMX, and with
    bfloat16 on many threads of a CPU without bfloat16 instructions."""
    packed = [dtype for dtype in dict.fromkeys((weight.dtype, torch.float32)) if can_pack(dtype, weight.device)]
    for form, dtype in [*((packed_linear, dtype) for dtype in packed), (plain_linear, weight.dtype)]:
        if sizes := agreeing_sizes(form, *weight.shape, dtype, weight.device, torch.get_num_threads()):
            product = form(weight.to(dtype), None if bias is None else bias.to(dtype))
            return partial(_in_calls_of, sizes, product, dtype)
    return lambda x: torch.cat([F.linear(row.clone(), weight, bias) for row in x.split(1)])  # clones are aligned


@cache
def agreeing_sizes(
    form: Callable[[torch.Tensor, None], Product],
    size_out: int,
    size_in: int,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,  # the current number: it decides how work is divided, so results are cached by it
) -> tuple[int, ...]:
    """The call sizes in which a row has the same bits at every place, and the same bits in all of them; or none.

    A product's order of sums depends on shapes, not on values. The operands have the negative of each column in another
    column, so the exact sums are zero and a result consists of rounding errors. Another order of sums therefore shows
    in the bits, even after rounding to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    size_out = min(size_out, _MAX_MEASURED_ROWS + size_out % 64)
    order, half = torch.randperm(size_in, generator=generator), size_in // 2

    def draw(num_rows: int, mirror: int) -> torch.Tensor:
        shape = num_rows, half
        scales = torch.randint(-6, 7, shape, generator=generator).exp2()  # else short sums of bfloat16 are exact
        drawn = torch.randn(shape, generator=generator) * scales
        rows = torch.cat((drawn, mirror * drawn, torch.zeros(num_rows, size_in % 2)), 1)[:, order]
        return rows.to(device, dtype)

    product, rows = form(draw(size_out, -1), None), draw(2, 1).split(1)
    standard = [product(row.expand(_REFERENCE_SIZE, -1).contiguous())[:1] for row in rows]

    def agrees(size: int) -> bool:
        pairs = zip(rows, standard, strict=True)
        return all(bool((product(row.expand(size, -1).contiguous()) == want).all()) for row, want in pairs)

    return tuple(size for size in _CALL_SIZES if agrees(size)) if agrees(_REFERENCE_SIZE) else ()


def _in_calls_of(sizes: tuple[int, ...], product: Product, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """The product in pieces of the largest size, the last one padded to the next size that there is."""
    if len(x) in sizes and x.dtype == dtype:
        return product(x)
    results = []
    for piece in x.to(dtype).split(sizes[-1]):
        missing = next(size for size in sizes if size >= len(piece)) - len(piece)
        results.append(product(F.pad(piece, (0, 0, 0, missing)))[: len(piece)] if missing else product(piece))
    return (results[0] if len(results) == 1 else torch.cat(results)).to(x.dtype)
