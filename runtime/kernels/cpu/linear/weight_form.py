"""The form of a quantized weight on a CPU: what a kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import torch

# e2m1 values times 2, plus 12, by index (WeightForm.is_e2m1)
E2M1_VALUES = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
E2M1_OFFSET = 12
ROWS = 16  # rows per block
COLUMNS = 32  # columns per chunk
QUAD = 4  # columns that one lane multiplies at once


class WeightForm(NamedTuple):
    """What a kernel is compiled for: number = (value - offset) * scale - minimum, for unsigned values.

    With super groups, scale = super scale * scale as stored, and the same for the minimum. With `is_e2m1`, 4 bits are
    stored of each value, its index in E2M1_VALUES."""

    bits: int  # bits per value: 4, 5, 6 or 8
    group_size: int  # columns that share a scale: 16, or a multiple of 32; 0 for all columns
    scale_dtype: torch.dtype  # float16, bfloat16 or float32; uint8 or int8 with super groups
    offset: int = 0
    has_minimum: bool = False
    super_size: int = 0  # columns per super group: a multiple of the group size; 0 without super scales
    is_e2m1: bool = False

    @property
    def value_bits(self) -> int:
        """The bits of a value as it is multiplied."""
        return 5 if self.is_e2m1 else self.bits

    @property
    def stored_zero(self) -> int:
        """The stored number of the value `offset`."""
        return 0 if self.is_e2m1 else self.offset

    @property
    def chunk_bytes(self) -> int:
        return ROWS * COLUMNS * self.bits // 8


def row_span(bits: int, *forms: WeightForm) -> int:
    """The columns that share a scale in rows of this precision, for weights with these forms."""
    return max(form.super_size or COLUMNS for form in forms) if bits == 16 else COLUMNS
