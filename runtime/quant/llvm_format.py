"""The format of quantized weights on a CPU with compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from runtime.kernels.cpu.linear.interleaved_weight import (
    dequantize_interleaved,
    interleave,
    interleaved_bytes,
    row_major,
)
from runtime.kernels.cpu.linear.weight_form import COLUMNS, E2M1_OFFSET, ROWS, WeightForm
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized.upcast import E2M1
from runtime.quant.encodings import Encoding, Integer8, Table
from runtime.quant.quantized_formats import QuantizedFormat
from runtime.quant.weight_format import Shape, Tensors, WeightFormat


class LlvmFormat(QuantizedFormat):
    """Weights for integer products: 4 to 8 bits, and a scale for each group of columns, or for each row.

    The numbers of e2m1 are integers, times a half.
    A packed weight has the tensors of `row_major`, and its operand is an `InterleavedWeight`."""

    table_rows = ROWS
    mixes = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        encoding = self.encoding
        self._form = _form(encoding)
        if encoding.value_bits:
            self.name = self.name.replace(f"int{encoding.bits}", f"int{encoding.value_bits}")

    @staticmethod
    def takes(encoding: Encoding) -> bool:
        has_groups = encoding.group_size in (0, 16) or encoding.group_size % COLUMNS == 0
        is_known = isinstance(encoding, Integer8) or _is_e2m1(encoding)
        return is_known and encoding.scale_rows == 1 and has_groups

    @staticmethod
    def fits(encoding: Encoding, shape: Shape) -> bool:
        return all(shape[1] % (size or 1) == 0 for size in (COLUMNS, encoding.group_size, encoding.super_size))

    def packed(self, weight: Tensors) -> Tensors:
        values, *shared = weight
        if self._form.is_e2m1:
            shared = [shared[0] * 0.5]
        elif not self.encoding.has_zero_points:
            values = values.view(torch.uint8) + self._form.offset
        if shared[0].dtype == torch.float32:
            known = self._form.scale_dtype
            narrow = known if known != torch.float32 else _narrowest(shared)
            shared = [tensor.to(narrow) for tensor in shared]
        return values, *shared

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        """An upper bound: the scales of a checkpoint may have a narrower dtype than its config promises."""
        return interleaved_bytes(self._form, (shape[0], shape[1]))

    def operand(self, pieces: Iterable[Tensors], num_rows: int) -> Any:
        return interleave(self._form, pieces, num_rows)

    def tensors(self, operand: Any) -> Tensors:
        return row_major(operand)

    def dense(self, operand: Any) -> torch.Tensor:
        return dequantize_interleaved(operand)

    def joins(self, other: WeightFormat) -> bool:
        return isinstance(other, LlvmFormat) and other.encoding == self.encoding


def _form(encoding: Encoding) -> WeightForm:
    """The form of weights, with the widest scales that they may have. Symmetric values are stored unsigned."""
    bits = encoding.value_bits or encoding.bits
    if _is_e2m1(encoding):  # half a power of two is exact in bfloat16
        dtype = torch.bfloat16 if encoding.scale_dtype == torch.float8_e8m0fnu else encoding.scale_dtype
        return WeightForm(bits, encoding.group_size, dtype, E2M1_OFFSET, is_e2m1=True)
    factor_dtype = torch.uint8 if encoding.has_zero_points else torch.int8
    return WeightForm(
        bits,
        encoding.group_size,
        factor_dtype if encoding.super_size else encoding.scale_dtype,
        0 if encoding.has_zero_points else 1 << bits - 1,
        encoding.has_zero_points,
        encoding.super_size,
    )


def _is_e2m1(encoding: Encoding) -> bool:
    return isinstance(encoding, Table) and encoding.table == E2M1


def _narrowest(numbers: Sequence[torch.Tensor]) -> torch.dtype:
    """The first dtype that holds all numbers without loss."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in numbers):
            return dtype
    return torch.float32
