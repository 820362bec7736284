"""Quantized weights on a GPU: their tensors, and the layout that every kernel receives as one constant.

8-bit values lie as the weight does, [N, K]. A byte with 4-bit values holds two columns of a row, `plane` columns apart.
In every 2 * plane columns, the low nibbles hold the first half and the high nibbles hold the second half. A kernel
multiplies these two planes one after the other, so that no instruction has to interleave neighbouring columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.quantized.upcast import upcast_instructions
from runtime.kernels.quantized.word_order import word_instructions
from runtime.kernels.triton_language import INTERPRETED

MAX_GROUP = 128  # the kernels' largest group size; larger groups' scales are repeated
_ROW_BYTES = 512  # scale rows avoid multiples of this: a step's groups would share memory channels


class WeightLayout(NamedTuple):
    """How a kernel reads a quantized weight: one constant argument, `LAYOUT: tl.constexpr`.

    Device functions take the whole LAYOUT: Triton 3.6 does not accept one of its fields as an argument."""

    encoding: str  # fp8 | int8 | uint4 | int4 | e2m1 | table; int4 is stored from 0 on, with zero point 8
    table: tuple[float, ...]  # a table's 16 values, only under the interpreter
    asm: str | None  # instructions that upcast four bytes; None under the interpreter
    plane: int  # columns between a byte's two nibbles; 0 for 8-bit values
    group_size: int  # columns that share a scale: 16, 32, 64 or 128; 0 for all
    scale_rows: int  # rows that share a scale
    scale_stride: int  # elements between two groups' scales
    has_zero_points: bool


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K]: number = value * scale - zero point."""

    shape: tuple[int, int]
    encoding: str  # see `WeightLayout`
    values: torch.Tensor  # [N, K] float8_e4m3fn or int8; uint8 [N, K / 2] from `pack_planes`
    scales: torch.Tensor  # float32 [groups, at least N / scale_rows], or [1, N] for whole rows
    zero_points: torch.Tensor | None = None  # shaped like scales, and multiplied by them
    group_size: int = 0  # columns that share a scale: 16, 32, 64 or 128; 0 for all
    scale_rows: int = 1  # rows that share a scale
    table: tuple[float, ...] = ()
    word_order: bool = False  # value bits are in the order of `in_word_order`

    @property
    def plane(self) -> int:
        return plane_of(self.group_size) if self.values.dtype == torch.uint8 else 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.scales, self.zero_points) if t is not None)

    @property
    def zero_points_or_scales(self) -> torch.Tensor:
        """A pointer for kernels, which read it only if the layout has zero points."""
        return self.scales if self.zero_points is None else self.zero_points

    @property
    def layout(self) -> WeightLayout:
        table = _bfloat16_table(self.table) if INTERPRETED else ()
        asm = None if INTERPRETED else upcast_instructions(self.encoding, self.table)
        if self.word_order:
            asm = word_instructions(self.encoding)
        return WeightLayout(
            self.encoding, table, asm, self.plane, self.group_size, self.scale_rows, self.scales.shape[-1],
            self.zero_points is not None,
        )  # fmt: skip


@cache
def _bfloat16_table(table: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(torch.tensor(table).bfloat16().tolist())


def plane_of(group_size: int) -> int:
    """Columns between the two nibbles of a byte.

    A step has two planes: both in one group, one group each, or two groups each if groups are smaller than what the
    matrix units read of bytes."""
    return 32 if group_size in (16, 32) else 64


def quantized_weight(
    encoding: str,
    values: torch.Tensor,  # see `QuantizedWeight`
    scales: torch.Tensor,  # float32 [ceil(N / scale_rows), ceil(K / group_size) or 1]
    zero_points: torch.Tensor | None = None,
    *,
    group_size: int = 0,  # 16, 32, 64 or a multiple of 128; 0 for all columns
    scale_rows: int = 1,
    table: tuple[float, ...] = (),
) -> QuantizedWeight:
    """The weight with scales and zero points transposed and padded, as kernels read them."""
    num_rows, size_in = len(values), values.shape[1] * (2 if values.dtype == torch.uint8 else 1)
    shared = [scales] if zero_points is None else [scales, zero_points]
    # Zero points multiply x's sums over a group, so a weight with zero points always has groups.
    if group_size > MAX_GROUP or (zero_points is not None and not group_size):
        num_groups = -(-size_in // MAX_GROUP)
        repeats = group_size // MAX_GROUP or num_groups
        shared = [tensor.repeat_interleave(repeats, 1)[:, :num_groups] for tensor in shared]
        group_size = MAX_GROUP
    scales, *more = map(_by_group, shared)
    return QuantizedWeight(
        (num_rows, size_in), encoding, values, scales, more[0] if more else None, group_size, scale_rows, table
    )  # fmt: skip


def _by_group(scales: torch.Tensor) -> torch.Tensor:
    """[rows, groups] -> float32 [groups, rows], padded so that no two rows are a multiple of 512 bytes apart."""
    count = scales.shape[0]
    padded = -(-count // 4) * 4
    if padded * 4 % _ROW_BYTES == 0 and scales.shape[1] > 1:
        padded += 32
    return F.pad(scales.float().t(), (0, padded - count)).contiguous()


def pack_planes(nibbles: torch.Tensor, plane: int) -> torch.Tensor:
    """uint8 [N, K] from 0 to 15 -> uint8 [N, K / 2]; K is a multiple of 2 * plane."""
    low, high = nibbles.reshape(len(nibbles), -1, 2, plane).unbind(2)
    packed: torch.Tensor = (low | high << 4).reshape(len(nibbles), -1)
    return packed


def unpack_planes(packed: torch.Tensor, plane: int) -> torch.Tensor:
    """The inverse of `pack_planes`."""
    blocks = packed.view(len(packed), -1, 1, plane)
    return torch.cat((blocks & 15, blocks >> 4), 2).reshape(len(packed), -1)


def dequantize_torch(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers [N, K]: upcast as kernels do, scaled in float32, and rounded once to `dtype`."""
    num_rows, size_in = weight.shape
    values = unpack_planes(weight.values, weight.plane) if weight.plane else weight.values
    if weight.encoding in ("table", "e2m1"):
        numbers = torch.tensor(weight.table, device=values.device).bfloat16().float()[values.int()]
    else:
        numbers = values.float() - (8 if weight.encoding == "int4" else 0)

    def spread(shared: torch.Tensor) -> torch.Tensor:
        per_row = shared.t().repeat_interleave(weight.scale_rows, 0)[:num_rows]
        return per_row.repeat_interleave(weight.group_size, 1)[:, :size_in] if weight.group_size else per_row

    numbers = numbers * spread(weight.scales)
    if weight.zero_points is not None:
        numbers = numbers - spread(weight.zero_points)
    return numbers.to(dtype)
