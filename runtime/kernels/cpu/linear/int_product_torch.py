"""The torch twin of the integer products on a CPU (int_product.py): equal bits, by the same operations in one order.

Rows of x are quantized by chunks of 32 columns: to int16, as a high and a low int8 limb, or to int8. Integer sums are
exact. All other operations are float32, each rounded once. So a row's bits do not depend on the other rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.interleaved_weight import (
    InterleavedWeight,
    dequantize_interleaved,
    scales_of,
    values_of,
)
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS

LARGEST = {16: 32512.0, 8: 127.0}  # by bits; 32512 = 256 * 127 leaves room for the carry of the low limb
SMALLEST_MAGNITUDE = 2.0**-100  # of a chunk's largest number, which divides


class QuantizedRows(NamedTuple):
    """Rows of x [rows, K]: number = scale of the chunk * (256 * high + low), or scale * limb with one limb."""

    limbs: torch.Tensor  # int8 [rows, K / 32, limbs, 32], the high limb first
    scales: torch.Tensor  # float32 [rows, K / 32]
    sums: torch.Tensor  # int32 [rows, K / 32, 2]: sums of the integers of half chunks

    @property
    def numbers(self) -> torch.Tensor:
        """The integers, int32 [rows, K / 32, 32]."""
        high, *low = self.limbs.int().unbind(2)
        return 256 * high + low[0] if low else high


def quantize_rows_torch(x: torch.Tensor, bits: int = 16) -> QuantizedRows:
    """Quantize float32 rows [rows, K]. A chunk that is not finite keeps that in its scale."""
    chunks = x.unflatten(1, (-1, COLUMNS))
    largest = chunks.abs().amax(2).clamp_min(SMALLEST_MAGNITUDE)
    factor = torch.full_like(largest, LARGEST[bits]) / largest
    numbers = (chunks * factor[..., None]).nan_to_num_(0.0).round_().int()
    limbs = [numbers]
    if bits == 16:
        high = (numbers + 128) >> 8
        limbs = [high, numbers - 256 * high]
    sums = numbers.unflatten(2, (2, -1)).sum(3, dtype=torch.int32)
    return QuantizedRows(torch.stack(limbs, 2).to(torch.int8), largest / LARGEST[bits], sums)


def int_product_torch(x: torch.Tensor, weight: InterleavedWeight, activation_bits: int = 16) -> torch.Tensor:
    """x [rows, K] times a weight [N, K], transposed: float32 [rows, N].

    For each group, the products of its chunks are added first, then multiplied with the scale of the group."""
    form, rows = weight.form, quantize_rows_torch(x.float(), activation_bits)
    scales, minimums = scales_of(weight)
    group = form.group_size or weight.shape[1]
    width = min(group, COLUMNS)  # columns of one integer sum
    numbers = rows.numbers.flatten(1).double().split(width, 1)  # sums stay below 2**53, so they are exact
    sums = rows.numbers.flatten(1).unflatten(1, (-1, width)).sum(2, dtype=torch.int32)
    values = values_of(weight).split(width, 1)
    total = torch.zeros(len(x), len(scales))
    for g in range(weight.shape[1] // group):
        part, below = torch.zeros_like(total), torch.zeros(len(x), 1)
        for i in range(g * (group // width), (g + 1) * (group // width)):
            integers = numbers[i] @ values[i].double().T - form.offset * sums[:, i, None].double()
            scale = rows.scales[:, i * width // COLUMNS, None]
            part = part + scale * integers.float()
            below = below + scale * sums[:, i, None].float()
        total = total + scales[:, g] * part
        if minimums is not None:
            total = total - minimums[:, g] * below
    return total[:, : weight.shape[0]]


def lookup_torch(weight: InterleavedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Dequantized rows of a weight: ids [n] -> float32 [n, K]. The twin of the native lookup."""
    blocks, places = ids // ROWS, ids % ROWS
    scales, *more = (None if tensor is None else tensor[blocks] for tensor in weight.tensors[1:])
    assert scales is not None
    shape = len(ids) * ROWS, weight.shape[1]
    own = InterleavedWeight(weight.form, shape, weight.values[blocks], scales, *more)
    return dequantize_interleaved(own).view(len(ids), ROWS, -1)[torch.arange(len(ids)), places]
