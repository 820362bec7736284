"""Products with int8 and int4 weights and bfloat16 activations on a CPU: torch's operations with AVX-512 or AVX2 code.

- **Large int8 weights** are multiplied as integers (VNNI) where the CPU can. Activations become int16, split into two
  int8 limbs. The error is far below that of bfloat16, and up to about 16 rows the time goes into reading the weight.
- **Few rows, otherwise:** the operations dequantize each weight and multiply in float32.
- **Many rows:** pieces of the weight are dequantized one after another, and multiplied as dense ones. That runs in
  bfloat16 where the CPU has instructions for it, else in float32, which is up to ten times as fast there.

A row's bits do not depend on the other rows of these operations: integer sums are exact, and the others were measured.
Deterministic mode uses the operations for any number of rows. The calls are private to torch; a build without them
dequantizes all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from runtime.kernels.linear.linear_torch import Product, can_pack

INT4_GROUPS = (256, 128, 64, 32)  # supported group sizes
_INT4_ROWS = {"AVX512": 64, "AVX2": 32}  # rows of a packed block, by torch's instruction set
INT8_COLUMNS = 16  # columns that the vector code reads at once
_FEW_INT8_ROWS = 16  # rows of x; with more, dequantized pieces are faster
_FEW_INT4_ROWS = 96
_PIECE = 1 << 20  # weights; 2 MB in bfloat16 stay in a core's cache
_MANY_VALUES = 1 << 21  # of a weight: reading them takes as long as splitting x into limbs
_PIECE_ROWS = 128  # rows of x multiplied at once, which bounds the memory of their limbs' products
_LARGEST = 32639  # the largest number with limbs from -128 to 127, 256 * 127 + 127
_OFFSET = 32896.5  # makes both limbs unsigned, 256 * 128 + 128, and rounds
_SHIFTS = torch.tensor((8, 0), dtype=torch.int32).view(2, 1, 1)  # of the high and the low limb


def has_vector_code() -> bool:
    """True if this build of torch has the operations, with vector code for this CPU."""
    names = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    has_code = torch.backends.cpu.get_cpu_capability() in _INT4_ROWS
    return has_code and all(hasattr(torch.ops.aten, name) for name in names)


def int4_rows() -> int:
    """The rows of a block of the packed int4 layout."""
    return _INT4_ROWS.get(torch.backends.cpu.get_cpu_capability(), 32)


@cache
def _dense_dtype() -> torch.dtype:
    """The faster dtype on this CPU for pieces of a weight."""
    return torch.bfloat16 if can_pack(torch.bfloat16, torch.device("cpu")) else torch.float32


def int8_product(
    values: torch.Tensor,  # int8 [out, in]
    scale: torch.Tensor,  # bfloat16 [out]
    bias: torch.Tensor | None,
    deterministic: bool,
) -> Product:
    """x @ (values * scale).T + bias, for bfloat16 x."""
    if values.numel() >= _MANY_VALUES and _has_integer_products():
        return _integer_product(values, scale, bias)

    def few_rows(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, values, scale)
        return y

    def piece(x: torch.Tensor, rows: slice) -> torch.Tensor:
        return F.linear(x, values[rows].to(x.dtype)).mul_(scale[rows])

    return _by_rows(few_rows, piece, values.shape, bias, None if deterministic else _FEW_INT8_ROWS)


def _integer_product(values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """`int8_product` with integer sums; copies `values` to the layout of the operation."""
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    scales, zeros = scale.float(), torch.zeros(len(values), dtype=torch.int64)

    def piece(x: torch.Tensor) -> torch.Tensor:
        # A step has about four of these products a layer. For one row, each operation takes 1 to 2 microseconds.
        numbers = x.float()
        unit = numbers.abs().amax(1, keepdim=True).mul_(1 / _LARGEST)  # keeps a row that is not finite
        numbers = numbers.div_(unit).add_(_OFFSET).to(torch.int32)
        limbs = (numbers >> _SHIFTS).to(torch.uint8).flatten(0, 1)  # the high limbs of all rows come first
        sums = torch.ops.onednn.qlinear_pointwise(
            limbs, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y: torch.Tensor = sums[len(x) :].add_(sums[: len(x)], alpha=256).mul_(unit)
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        return piece(x) if len(x) <= _PIECE_ROWS else torch.cat([piece(rows) for rows in x.split(_PIECE_ROWS)])

    return product


@cache
def _has_integer_products() -> bool:
    """True if the operations exist, are fast (VNNI), and sum 8-bit products in 32 bits.

    Without VNNI they saturate at 16 bits, also if a setting of oneDNN disables it."""
    names = ("qlinear_prepack", "qlinear_pointwise")
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    if not has_vnni() or not all(hasattr(torch.ops.onednn, name) for name in names):
        return False
    size = 64
    packed = torch.ops.onednn.qlinear_prepack(torch.full((size, size), 127, dtype=torch.int8), None)
    largest, scales, zeros = (
        torch.full((size, size), 255, dtype=torch.uint8),
        torch.ones(size),
        torch.zeros(size).long(),
    )
    sums = torch.ops.onednn.qlinear_pointwise(
        largest, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((sums == size * 127 * 127).all())


def int4_product(
    packed: torch.Tensor,  # of `pack_int4`
    scales_and_zeros: torch.Tensor,  # bfloat16 [in / group, out, 2]
    bias: torch.Tensor | None,
    deterministic: bool,
) -> Product:
    """x @ ((values - 8) * scale + zero).T + bias, for bfloat16 x."""
    shape = torch.Size((len(packed), 2 * packed.shape[1]))
    group = shape[1] // len(scales_and_zeros)

    def few_rows(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)
        return y

    def piece(x: torch.Tensor, rows: slice) -> torch.Tensor:
        return x @ _dequantized(packed[rows], scales_and_zeros[:, rows], x.dtype)

    most = _FEW_INT4_ROWS if _is_known_layout() and not deterministic else None
    return _by_rows(few_rows, piece, shape, bias, most)


def _by_rows(
    few_rows: Product,
    piece: Callable[[torch.Tensor, slice], torch.Tensor],
    shape: torch.Size,
    bias: torch.Tensor | None,
    most: int | None,
) -> Product:
    """`few_rows` up to `most` rows of x; above, `piece` for slices of the weight rows."""
    step = max(1, _PIECE // (shape[1] * int4_rows())) * int4_rows()

    def product(x: torch.Tensor) -> torch.Tensor:
        if most is None or len(x) <= most:
            y = few_rows(x.contiguous())
        else:
            y, inputs = x.new_empty(len(x), shape[0]), x.to(_dense_dtype())
            for start in range(0, shape[0], step):
                rows = slice(start, start + step)
                y[:, rows] = piece(inputs, rows)
        return y if bias is None else y.add_(bias)

    return product


def pack_int4(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] with two values a byte, the low nibble first -> the operation's layout, in place."""
    step = max(1, _PIECE // (2 * nibbles.shape[1] * int4_rows())) * int4_rows()
    for start in range(0, len(nibbles), step):
        piece = nibbles[start : start + step]
        values = torch.stack((piece & 15, piece >> 4), -1).flatten(1).int()
        nibbles[start : start + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 2)
    return nibbles


def _dequantized(packed: torch.Tensor, scales_and_zeros: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A dequantized piece of a weight, transposed: [in, rows]."""
    num_groups, num_rows, _ = scales_and_zeros.shape
    size = int4_rows()
    # A block has size / 2 bytes for each column; their low nibbles are the first half of its rows.
    blocks = packed.view(num_rows // size, -1, size // 2)
    values = torch.stack((blocks & 15, blocks >> 4), 2).to(dtype)
    scale, zero = scales_and_zeros.float().view(num_groups, len(blocks), 1, size, 2).transpose(0, 1).unbind(-1)
    groups = values.view(len(blocks), num_groups, -1, size)
    torch.addcmul(_contiguous(zero - 8 * scale, dtype), groups, _contiguous(scale, dtype), out=groups)
    return values.flatten(2).transpose(0, 1).reshape(-1, num_rows)


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, memory_format=torch.contiguous_format)


@cache
def _is_known_layout() -> bool:
    """True if `pack_int4` gives the layout that `_dequantized` reads, which is private to torch."""
    num_rows = 2 * int4_rows()
    values = torch.arange(num_rows * 32).mul_(7).view(num_rows, 32) % 61 % 16
    pairs = values[:, ::2] | values[:, 1::2] << 4
    ones = torch.ones(1, num_rows, dtype=torch.bfloat16)
    numbers = _dequantized(pack_int4(pairs.to(torch.uint8)), torch.stack((ones, 8 * ones), -1), torch.float32)
    return torch.equal(numbers.t(), values.float())
