"""The torch twin of a CPU's integer products (int_product.py): equal bits, by the same operations in one order.

Rows of x are quantized in spans: 32 columns, or 256 in int16 for weights with super scales. An element is an int16,
as a high and a low int8 limb, or an int8. Integer sums are exact. All other operations are float32, each rounded once.
So a row's bits do not depend on the other rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.interleaved_weight import (
    InterleavedWeight,
    dequantize_interleaved,
    scales_of,
    values_of,
)
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS, row_span

LARGEST = {16: 32512.0, 8: 127.0}  # key: bits; 32512 = 256 * 127 leaves room for the low limb's carry
SMALLEST_MAGNITUDE = 2.0**-100  # bounds a chunk's largest element, which divides


class QuantizedRows(NamedTuple):
    """Rows of x [rows, K]: element = chunk scale * (256 * high + low), or scale * limb with one limb.

    Chunks lie one after the other, so that a panel of rows is contiguous in each."""

    limbs: torch.Tensor  # int8 [K / 32, rows, limbs, 32], the high limb first
    scales: torch.Tensor  # float32 [K / 32, rows]
    sums: torch.Tensor  # int16 [K / 32, rows, limbs, 2]: each limb's sums over half chunks

    @property
    def numbers(self) -> torch.Tensor:
        """The integers, int32 [rows, K / 32, 32]."""
        high, *low = self.limbs.transpose(0, 1).int().unbind(2)
        return 256 * high + low[0] if low else high


def quantize_rows_torch(x: torch.Tensor, bits: int = 16, span: int = COLUMNS) -> QuantizedRows:
    """Quantize float32 rows [rows, K]. `span` columns share a scale; it is not finite if one of them is not."""
    chunks = x.unflatten(1, (-1, COLUMNS)).transpose(0, 1)
    largest = x.unflatten(1, (-1, span)).abs().amax(2).clamp_min(SMALLEST_MAGNITUDE)
    largest = largest.t().repeat_interleave(span // COLUMNS, 0)
    factor = torch.full_like(largest, LARGEST[bits]) / largest
    numbers = (chunks * factor[..., None]).nan_to_num_(0.0).round_().int()
    limbs = [numbers]
    if bits == 16:
        high = (numbers + 128) >> 8
        limbs = [high, numbers - 256 * high]
    stacked = torch.stack(limbs, 2).to(torch.int8)
    sums = stacked.unflatten(3, (2, -1)).sum(4, dtype=torch.int16)
    return QuantizedRows(stacked, largest / LARGEST[bits], sums)


def int_product_torch(x: torch.Tensor, weight: InterleavedWeight, activation_bits: int = 16) -> torch.Tensor:
    """x [rows, K] times a weight [N, K], transposed: float32 [rows, N].

    Each group's chunk products are added first, then multiplied with the group's scale."""
    form, rows = weight.form, quantize_rows_torch(x.float(), activation_bits, row_span(activation_bits, weight.form))
    if form.super_size:
        return _super_product(rows, weight, row_span(activation_bits, form))
    scales, minimums = scales_of(weight)
    group = form.group_size or weight.shape[1]
    width = min(group, COLUMNS)  # columns per integer sum
    numbers = rows.numbers.flatten(1).double().split(width, 1)  # sums stay below 2**53, so they are exact
    sums = rows.numbers.flatten(1).unflatten(1, (-1, width)).sum(2, dtype=torch.int32)
    values = values_of(weight).split(width, 1)
    total = torch.zeros(len(x), len(scales))
    for g in range(weight.shape[1] // group):
        part, below = torch.zeros_like(total), torch.zeros(len(x), 1)
        for i in range(g * (group // width), (g + 1) * (group // width)):
            integers = numbers[i] @ values[i].double().T - form.offset * sums[:, i, None].double()
            scale = rows.scales[i * width // COLUMNS, :, None]
            part = part + scale * integers.float()
            below = below + scale * sums[:, i, None].float()
        total = total + scales[:, g] * part
        if minimums is not None:
            total = total - minimums[:, g] * below
    return total[:, : weight.shape[0]]


def _super_product(rows: QuantizedRows, weight: InterleavedWeight, span: int) -> torch.Tensor:
    """The product with a weight that has super scales: its integer scales multiply the integer sums of a span."""
    form, totals = weight.form, torch.zeros(rows.scales.shape[1], len(weight.values) * ROWS)
    limbs = rows.limbs.permute(2, 1, 0, 3).flatten(2).double()  # [limbs, rows, K]
    by_row = [t.double().transpose(1, 2).flatten(0, 1) for t in weight.tensors[1:] if t is not None]
    scales, *minimums = (t.repeat_interleave(form.group_size, 1) for t in by_row[: 1 + form.has_minimum])
    values, factors = (values_of(weight).double() - form.offset) * scales, by_row[1 + form.has_minimum :]
    for s in range(weight.shape[1] // form.super_size):
        kinds = [torch.zeros_like(totals) for _ in factors]
        for begin in range(s * form.super_size, (s + 1) * form.super_size, span):
            own, scale = slice(begin, begin + span), rows.scales[begin // COLUMNS, :, None]
            first, *more = (limbs[:, :, own] @ values[:, own].T).float()  # exact integers
            kinds[0] += scale * (first * 256.0 + more[0] if more else first)
            for each in minimums:
                kinds[1] += scale * (rows.numbers.flatten(1)[:, own].double() @ each[:, own].T).float()
        totals = totals + factors[0][:, s].float() * kinds[0]
        for factor, below in zip(factors[1:], kinds[1:], strict=True):
            totals = totals - factor[:, s].float() * below
    return totals[:, : weight.shape[0]]


def lookup_torch(weight: InterleavedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Dequantized rows of a weight: ids [n] -> float32 [n, K]. The twin of the native lookup."""
    blocks, places = ids // ROWS, ids % ROWS
    scales, *more = (None if tensor is None else tensor[blocks] for tensor in weight.tensors[1:])
    assert scales is not None
    shape = len(ids) * ROWS, weight.shape[1]
    own = InterleavedWeight(weight.form, shape, weight.values[blocks], scales, *more)
    return dequantize_interleaved(own).view(len(ids), ROWS, -1)[torch.arange(len(ids)), places]
