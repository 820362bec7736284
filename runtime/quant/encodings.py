"""Encodings: the few forms into which all checkpoint layouts are read. Values [out, in], and block scales.

The device decides which ones it multiplies without dequantizing: `runtime.quant.products`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from runtime.base.model.sharding import Part
from runtime.kernels.quantized import weight_conversions as fp8_encode
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import Shape, Tensors

# Elements that are dequantized or encoded at once: their float32 copy is small compared with the weight.
_AT_ONCE = 1 << 20
_AT_ONCE_ON_GPU = 1 << 23  # fewer launches
SMALLEST_SCALE = 2.0**-100  # limit in `encode`, which divides by scales, for blocks of zeros


@dataclass(frozen=True, slots=True)
class Encoding(ABC):
    """number = value * scale - zero point, computed in float32. Zero points are stored times their scales.

    A weight is a tuple of tensors:
    - quantized values [out, in], one a byte;
    - scales, float32 [ceil(out / scale_rows), ceil(in / group_size)];
    - with has_zero_points, zero points like scales;
    - with super_size, scales and zero points are integers, and their factors follow: float16 [out, in / super_size];
    - with `reordered`, int64 [in]: the weight's column for each value column."""

    label: str  # "int4", for example
    scale_rows: int = 1  # weight rows that share a scale
    group_size: int = 0  # columns that share a scale; 0 for all
    has_zero_points: bool = False
    reordered: bool = False
    scale_dtype: torch.dtype = torch.float32  # holds all scales and zero points without loss
    value_bits: int = 0  # bits of a value, if fewer than `bits`
    super_size: int = 0  # columns that share factors for scales and zero points; 0 without factors

    bits: ClassVar[int] = 8

    @property
    def name(self) -> str:
        block = (
            f" {self.scale_rows}x{self.group_size}"
            if self.scale_rows > 1
            else f" g{self.group_size}"
            if self.group_size
            else " rows"
        )
        return self.label + block + (" with zero points" if self.has_zero_points else "")

    @property
    def flat(self) -> Encoding:
        """The same numbers with 8-bit or 4-bit values and float32 scales."""
        return replace(self, scale_dtype=torch.float32, value_bits=0, super_size=0)

    @property
    def by_row(self) -> Encoding:
        """The same numbers with scales of their own for each row."""
        return replace(self, scale_rows=1)

    @abstractmethod
    def upcast(self, quantized: torch.Tensor) -> torch.Tensor:
        """Quantized values as float32 numbers, without their scales."""

    @abstractmethod
    def _shared(self, dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The scales, and perhaps zero points, with which to encode `dense`."""

    @abstractmethod
    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The nearest quantized values of float32 numbers, which are divided by their scales."""

    def encode(self, dense: torch.Tensor) -> Tensors:
        """Quantize `dense` by rounding to nearest. Scales are rounded to `scale_dtype`, without factors."""
        scale, *zero_points = self._shared(dense)
        if self.scale_dtype != torch.float32:
            smallest = max(SMALLEST_SCALE, torch.finfo(self.scale_dtype).smallest_normal)
            scale = scale.to(self.scale_dtype).float().clamp_min(smallest)
            zero_points = [tensor.to(self.scale_dtype).float() for tensor in zero_points]
        quantized = torch.empty(dense.shape, dtype=self._nearest(scale[:0]).dtype, device=dense.device)
        for rows, shared in self._pieces(dense):
            numbers = dense[rows]
            if zero_points:
                numbers = numbers + self._spread(zero_points[0][shared], numbers.shape)
            quantized[rows] = self._nearest(numbers / self._spread(scale[shared], numbers.shape))
        return quantized, scale, *zero_points

    def random(self, shape: Shape, generator: torch.Generator) -> Tensors | None:
        """Random numbers of about unit length in each row, drawn without a dense copy; None if not implemented."""
        return None

    def _extremes(self, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and the largest number of each block, in float32."""
        blocks = self._blocks(dense)
        return blocks.amin((1, 3)).float(), blocks.amax((1, 3)).float()

    def join(self, weights: Sequence[Tensors], dim: int = 0) -> Tensors:
        """Stack several weights' rows with equal columns, or put whole column groups side by side."""
        order = weights[0][-1:] if self.reordered else ()
        tensors = zip(*(weight[: len(weight) - len(order)] for weight in weights), strict=True)
        return *(torch.cat(same, dim) for same in tensors), *order

    def part(self, weight: Tensors, part: Part) -> Tensors:
        """Rows or columns of a weight that is not reordered; the part begins and ends with a block."""
        quantized, *shared = weight
        num_scales = 1 + self.has_zero_points

        def own(tensor: torch.Tensor, columns: int) -> torch.Tensor:
            if not (per := (self.scale_rows, columns)[part.dim]):
                return tensor
            start = part.start // per
            return tensor.narrow(part.dim, start, -(-part.stop // per) - start)

        return (
            quantized.narrow(part.dim, part.start, part.stop - part.start),
            *(own(tensor, self.group_size) for tensor in shared[:num_scales]),
            *(own(tensor, self.super_size) for tensor in shared[num_scales:]),
        )

    def scales_of(self, weight: Tensors) -> tuple[torch.Tensor, ...]:
        """Scales, and perhaps zero points, times their factors: float32."""
        end = 2 + self.has_zero_points
        if not self.super_size:
            return weight[1:end]
        pairs = zip(weight[1:end], weight[end : 2 * end - 1], strict=True)
        repeats = self.super_size // self.group_size
        return tuple(factors.float().repeat_interleave(repeats, 1) * integers for integers, factors in pairs)

    def scale_shape(self, shape: Shape) -> Shape:
        return -(-shape[0] // self.scale_rows), -(-shape[1] // self.group_size) if self.group_size else 1

    def dequantize(self, weight: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """The numbers [out, in], each rounded once to `dtype`."""
        quantized, (scale, *zero_points) = weight[0], self.scales_of(weight)
        dense = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
        for rows, shared in self._pieces(quantized):
            part = quantized[rows]
            numbers = self.upcast(part).mul_(self._spread(scale[shared], part.shape))
            if zero_points:
                numbers.sub_(self._spread(zero_points[0][shared], part.shape))
            if self.reordered:
                dense[rows].index_copy_(1, weight[-1], numbers.to(dtype))
            else:
                dense[rows] = numbers
        return dense

    def _pieces(self, weight: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """Cut a weight [out, in] into pieces with whole blocks: slices of its rows and its scales' rows."""
        at_once = _AT_ONCE_ON_GPU if weight.device.type == "cuda" else _AT_ONCE
        step = max(1, at_once // (weight.shape[1] * self.scale_rows)) * self.scale_rows
        for start in range(0, len(weight), step):
            yield slice(start, start + step), slice(start // self.scale_rows, (start + step) // self.scale_rows)

    def _spread(self, shared: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Repeat one number a block to one number a value, or to one column if whole rows share a scale."""
        if self.scale_rows > 1:
            shared = shared.repeat_interleave(self.scale_rows, 0)[: shape[0]]
        return shared.repeat_interleave(self.group_size, 1)[:, : shape[1]] if self.group_size else shared

    def _blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Return [row blocks, rows, column blocks, columns], padded with zeros."""
        columns = self.group_size or dense.shape[1]
        missing = 0, -dense.shape[1] % columns, 0, -dense.shape[0] % self.scale_rows
        padded = F.pad(dense, missing) if any(missing) else dense
        return padded.reshape(-1, self.scale_rows, padded.shape[1] // columns, columns)

    def fits(self, shape: Shape) -> bool:
        """True if weights with this shape can remain quantized, also as a part of a fused layer."""
        return not self.reordered and shape[0] % self.scale_rows == 0 and shape[1] * self.bits % 8 == 0

    def device_bytes(self, shape: Shape) -> int:
        """The bytes of a quantized weight, packed as densely as possible."""
        scale_bytes = math.prod(self.scale_shape(shape)) * (1 if self.super_size else 4)
        factor_bytes = 2 * math.prod(shape) // self.super_size if self.super_size else 0
        return math.prod(shape) * self.bits // 8 + (scale_bytes + factor_bytes) * (1 + self.has_zero_points)


LARGEST_E4M3 = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)  # one e4m3 octave, the largest first


@dataclass(frozen=True, slots=True)
class Float8(Encoding):
    """e4m3, up to 448; without zero points."""

    def upcast(self, quantized: torch.Tensor) -> torch.Tensor:
        return quantized.float()

    def encode(self, dense: torch.Tensor) -> Tensors:
        if self.scale_rows == 1 and not self.group_size and dense.is_cuda and dense.shape[1] <= fp8_encode.MAX_COLUMNS:
            return fp8_encode.quantize_fp8_weight_triton(dense, LARGEST_E4M3, SMALLEST_SCALE)
        return Encoding.encode(self, dense)  # super() fails in a dataclass with slots

    def _shared(self, dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each block's scale with the least squared error.

        Candidates map the block's largest magnitude to a value in `LARGEST_E4M3`. The e4m3 format has one relative
        precision, so the error depends on where its steps fall among the elements. Errors are summed in float64, so
        that every device chooses the same scale."""
        low, high = self._extremes(dense)
        greatest = torch.maximum(high, -low)
        best = torch.full_like(greatest, torch.nan)  # stays NaN if a number is not finite
        for rows, shared in self._pieces(dense):
            numbers = dense[rows].float()
            least = torch.full_like(greatest[shared], torch.inf, dtype=torch.float64)
            for value in LARGEST_E4M3:
                scale = _divided(greatest[shared], value).clamp_min(SMALLEST_SCALE)
                spread = self._spread(scale, numbers.shape)
                rounding = self.upcast(self._nearest(numbers / spread)).mul_(spread).sub_(numbers).square_()
                errors = self._blocks(rounding).sum((1, 3), dtype=torch.float64)
                best[shared] = torch.where(errors < least, scale, best[shared])
                torch.minimum(errors, least, out=least)
        return (best,)

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Integer8(Encoding):
    """Integers: int8, or with zero points uint8."""

    def upcast(self, quantized: torch.Tensor) -> torch.Tensor:
        return quantized.float()

    def _shared(self, dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = self._extremes(dense)
        bits = self.value_bits or self.bits
        if not self.has_zero_points:
            return (_scale(low, high, (1 << bits - 1) - 1),)
        low, high = low.clamp_max(0), high.clamp_min(0)
        return _divided(high - low, (1 << bits) - 1).clamp_min(SMALLEST_SCALE), -low

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        lowest, bits = 0 if self.has_zero_points else -1, self.value_bits or self.bits
        if self.scale_dtype != torch.float32:  # a rounded scale may move the largest number beyond the last value
            numbers = numbers.clamp((lowest << bits) // 2, (1 << bits) + (lowest << bits) // 2 - 1)
        return numbers.round_().to(torch.uint8 if self.has_zero_points else torch.int8)


@dataclass(frozen=True, slots=True)
class Integer4(Integer8):
    """Integers from -8 to 7, or with zero points from 0 to 15."""

    bits: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class Table(Encoding):
    """Indices into a table with 16 values; without zero points."""

    table: tuple[float, ...] = ()

    bits: ClassVar[int] = 4

    def upcast(self, quantized: torch.Tensor) -> torch.Tensor:
        return _on_device(self.table, quantized.device)[quantized.int()]

    def _shared(self, dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_scale(*self._extremes(dense), max(map(abs, self.table))),)

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        between, order = _nearest_in(self.table, numbers.device)
        places = torch.bucketize(numbers, between, out_int32=True)
        return order.index_select(0, places.flatten()).view(places.shape)

    def random(self, shape: Shape, generator: torch.Generator) -> Tensors:
        on_device: dict[str, Any] = {"generator": generator, "device": generator.device}
        values = torch.randint(16, shape, dtype=torch.uint8, **on_device)
        spread = math.sqrt(sum(number * number for number in self.table) / len(self.table) * shape[1])
        exponents = torch.randint(-1, 1, self.scale_shape(shape), dtype=torch.float32, **on_device)
        return values, (exponents - round(math.log2(spread))).exp2()


@cache  # a copy to a GPU would wait for its running work
def _on_device(table: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The table as a tensor on the device."""
    return torch.tensor(table, device=device)


@cache
def _nearest_in(table: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The midpoints between neighbouring table values, in rising order, and the values' indices."""
    numbers, order = _on_device(table, device).sort()
    return (numbers[1:] + numbers[:-1]) / 2, order.to(torch.uint8)


def _scale(low: torch.Tensor, high: torch.Tensor, largest: float) -> torch.Tensor:
    """The scale that maps the largest magnitude to the value `largest`."""
    return _divided(torch.maximum(high, -low), largest).clamp_min(SMALLEST_SCALE)


def _divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """A quotient with equal rounding everywhere: GPUs divide by a number as a product with its reciprocal."""
    return numbers / numbers.new_full((), by)


_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ENCODINGS: dict[str, Encoding] = {
    "fp8": Float8("fp8"),
    "int8": Integer8("int8"),
    "int4": Integer4("int4"),
    "fp4": Table("fp4", table=(*_POSITIVE, *(-number for number in _POSITIVE))),  # e2m1
    # bitsandbytes/functional.py, get_4bit_type
    "nf4": Table(
        "nf4",
        table=(
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ),
    ),
    "bitsandbytes fp4": Table(
        "bitsandbytes fp4",
        table=tuple(sign * n / 192 + 0.0 for sign in (1, -1) for n in (0.0, 1.0, 128.0, 192.0, 64.0, 96.0, 32.0, 48.0)),
    ),
}  # fmt: skip


def encoding_of(scheme: QuantizationScheme) -> Encoding:
    """A scheme's encoding; one scale for a whole tensor becomes one scale for each row."""
    return replace(
        ENCODINGS[scheme.encoding],
        scale_rows=scheme.scale_rows or 1,
        group_size=scheme.group_size,
        has_zero_points=not scheme.symmetric,
        reordered=scheme.reordered,
        scale_dtype=getattr(torch, scheme.scale_dtype),
        value_bits=scheme.value_bits,
        super_size=scheme.super_size,
    )
