"""Packs a weight into the layout of its products.

A weight with one value a byte gets that of `interleaved_weight.py`, as by `pack_torch`. Float weights get
transposed blocks with 16 rows."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear.product_memory import TYPES
from runtime.kernels.cpu.linear.weight_form import COLUMNS, QUAD, ROWS
from runtime.kernels.linear import weight_memory
from runtime.kernels.llvm.language import F32s, Int, U8s, Value, loop, share, u32
from runtime.kernels.llvm.launcher import Launcher, kernel

_QUADS = COLUMNS // QUAD
_AT_ONCE = 1 << 22  # numbers that are compared at once
_FIRST = 1 << 12  # numbers at the start, which show most weights that need float32


def pack(
    values: U8s,  # [blocks * 16, columns]
    out: U8s,  # [blocks, chunks, 16 * 32 * bits / 8]
    num_blocks: Int,
    columns: Int,
    part: Int,
    parts: Int,
    bits: int,
) -> None:
    """Part i/n: a share of the blocks."""
    begin, end = share(num_blocks, part, parts)
    chunk_words = ROWS * COLUMNS * bits // 32
    for block in loop(begin, end):
        for row in loop(0, ROWS):
            source = values.of(u32) + (block * ROWS + row) * (columns // 4)
            for chunk in loop(0, columns // COLUMNS):
                quads = source.load(chunk * _QUADS, _QUADS)
                target = out.of(u32) + ((block * (columns // COLUMNS) + chunk) * chunk_words + row)
                for index, word in enumerate(_words(quads, bits)):
                    target.store(index * ROWS, word)


def _words(quads: Value, bits: int) -> list[Value]:
    """A row's words in a chunk's vectors. `quads` are eight words with four values: u32 [8]."""
    if bits == 8:
        return [quads[i] for i in range(_QUADS)]
    low = quads & 0x0F0F0F0F
    pairs = low.lanes(range(0, _QUADS, 2)) | (low.lanes(range(1, _QUADS, 2)) << 4)
    words = [pairs[i] for i in range(_QUADS // 2)]
    if bits == 4:
        return words
    each, high = bits - 4, (quads >> 4) & 0x03030303
    for plane in range(each):
        own = [high[plane * (8 // each) + i] << (i * each) for i in range(8 // each)]
        word = own[0]
        for other in own[1:]:
            word = word | other
        words.append(word)
    return words


def pack_values(values: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Pack values, uint8 [blocks * 16, K], into `out`, uint8 [blocks, K / 32, bytes of a chunk]."""
    launcher, num_blocks = Launcher(), len(out)
    parts = launcher.parts(num_blocks, values.numel())
    launcher.launch(kernel(pack, bits=bits), (values, out, num_blocks, values.shape[1]), parts)


def transpose_blocks(
    weight: F32s,  # [blocks * 16, columns]
    out: F32s,  # [blocks, columns, 16] of dtype
    num_blocks: Int,
    columns: Int,
    part: Int,
    parts: Int,
    dtype: torch.dtype,
) -> None:
    """Part i/n: a share of the blocks."""
    begin, end = share(num_blocks, part, parts)
    whole = columns // ROWS * ROWS
    for block in loop(begin, end):
        rows = [weight + (block * ROWS + i) * columns for i in range(ROWS)]
        target = out.of(TYPES[dtype]) + block * ROWS * columns
        for first in loop(0, whole, ROWS):
            for i, values in enumerate(_transposed([row.load(first, ROWS) for row in rows])):
                target.store((first + i) * ROWS, values.to(TYPES[dtype]))
        for column in loop(whole, columns):
            for i, row in enumerate(rows):
                target.store(column * ROWS + i, row.load(column).to(TYPES[dtype]))


def _transposed(rows: list[Value]) -> list[Value]:
    """The columns of 16 rows. Each round interleaves the first half's lanes with the other half's."""
    half, lanes = ROWS // 2, range(ROWS)
    for _ in range(4):
        pairs = [(rows[i], rows[i + half]) for i in range(half)]
        rows = [
            a.lanes_with(b, [first + lane // 2 + lane % 2 * ROWS for lane in lanes])
            for a, b in pairs
            for first in (0, half)
        ]
    return rows


def packed_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A copy [blocks, size_in, 16] of a float32 weight [size_out, size_in], in the smallest dtype that is exact.

    Blocks of 16 outputs lie column after column. Numbers of missing outputs are zeros."""
    (size_out, size_in), weight = weight.shape, weight.contiguous()
    values = weight_memory.empty((-(-size_out // ROWS), size_in, ROWS), exact_dtype(weight))
    whole, rest = divmod(size_out, ROWS)
    _transpose(weight, values[:whole])
    if rest:
        _transpose(F.pad(weight[-rest:], (0, 0, 0, ROWS - rest)), values[whole:])
    return values


def _transpose(weight: torch.Tensor, out: torch.Tensor) -> None:
    """Pack a weight [blocks * 16, columns] into `out` [blocks, columns, 16]."""
    launcher, num_blocks = Launcher(), len(out)
    parts = launcher.parts(num_blocks, weight.numel())
    function = kernel(transpose_blocks, dtype=out.dtype)
    launcher.launch(function, (weight, out, num_blocks, weight.shape[1]), parts)


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """bfloat16 or float16 if it holds all numbers of a float32 weight, else float32."""
    flat = weight.flatten()
    for dtype, holds in ((torch.bfloat16, _are_bfloat16), (torch.float16, _are_float16)):
        if all(map(holds, chain([flat[:_FIRST]], flat[_FIRST:].split(_AT_ONCE)))):
            return dtype
    return torch.float32


def _are_bfloat16(numbers: torch.Tensor) -> bool:
    """True if the lower 16 bits of all float32 numbers are zero. This reads them once, at the speed of memory."""
    return not numbers.view(torch.int16).view(-1, 2)[:, 0].count_nonzero()


def _are_float16(numbers: torch.Tensor) -> bool:
    return torch.equal(numbers.to(torch.float16).float(), numbers)
