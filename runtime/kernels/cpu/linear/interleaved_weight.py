"""Quantized weights on a CPU: blocks of 16 rows by 32 columns, in the order in which a product reads them.

A vector holds four neighbouring columns (a quad) for each of the 16 rows: byte `4 * row + column`. One instruction
multiplies a quad with the same four activations in all rows. A 32-column block (a chunk) has eight quads. They
lie in 64-byte vectors:

- 4 bits: four vectors. Low nibbles hold quad 2 i, high nibbles quad 2 i + 1.
- 5 bits: as 4 bits, then one vector. A byte's bit j is quad j's bit 4.
- 6 bits: as 4 bits, then two vectors. Vector i's bits 2 j and 2 j + 1 are bits 4 and 5 of quad 4 i + j.
- 8 bits: eight vectors, one for each quad.

Scales lie next to the values: 16 for each column group, one for each row. Nothing depends on the instruction set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear.weight_form import COLUMNS, E2M1_VALUES, QUAD, ROWS, WeightForm
from runtime.kernels.linear import weight_memory


@dataclass(frozen=True, slots=True)
class InterleavedWeight:
    """A weight [N, K]. N is padded with zero rows to a multiple of 16."""

    form: WeightForm
    shape: tuple[int, int]
    values: torch.Tensor  # uint8 [ceil(N / 16), K / 32, form.chunk_bytes]
    scales: torch.Tensor  # form.scale_dtype [ceil(N / 16), groups, 16]
    minimums: torch.Tensor | None  # shaped like scales
    super_scales: torch.Tensor | None  # float16 [ceil(N / 16), super groups, 16]
    super_minimums: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors in the order of kernels."""
        return self.values, self.scales, self.minimums, self.super_scales, self.super_minimums

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


def interleaved_bytes(form: WeightForm, shape: tuple[int, int]) -> int:
    """The bytes of an interleaved weight [N, K]."""
    blocks, columns = -(-shape[0] // ROWS), shape[1]
    numbers = 2 if form.has_minimum else 1
    group_bytes = ROWS * (columns // (form.group_size or columns)) * form.scale_dtype.itemsize
    super_bytes = ROWS * (columns // form.super_size) * 2 if form.super_size else 0
    return blocks * (columns // COLUMNS * form.chunk_bytes + numbers * (group_bytes + super_bytes))


def interleave(form: WeightForm, pieces: Iterable[Sequence[torch.Tensor]], num_rows: int) -> InterleavedWeight:
    """A weight with `num_rows` from consecutive pieces, as `row_major` returns them.

    All but the last have a multiple of 16 rows. A large weight needs little more memory than its own. Pieces may
    differ in their scale dtype, and may lack the factors."""
    from runtime.kernels.cpu.linear.pack import pack_values  # imports llvmlite, which only CPUs need

    packed, block, parts = torch.empty(0), 0, list[list[torch.Tensor]]()
    for values, *shared in pieces:
        num_columns = values.shape[1]
        if not parts:
            shape = -(-num_rows // ROWS), num_columns // COLUMNS, form.chunk_bytes
            packed = weight_memory.empty(shape, torch.uint8)
        whole, missing = values.contiguous(), -len(values) % ROWS
        if missing:
            whole = F.pad(whole, (0, 0, 0, missing), value=form.stored_zero)
        num_blocks = len(whole) // ROWS
        pack_values(whole, packed[block : block + num_blocks], form.bits)
        block += num_blocks
        parts.append([_by_block(tensor) for tensor in shared])
    joined, count = [_joined(same) for same in zip(*parts, strict=True)], 1 + form.has_minimum
    (scales, *minimums), factors = joined[:count], joined[count:]
    form = form._replace(scale_dtype=scales.dtype, super_size=form.super_size if factors else 0)
    more = [(*tensors, None)[0] for tensors in (minimums, factors[:1], factors[1:])]
    return InterleavedWeight(form, (num_rows, num_columns), packed, scales, *more)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one after the other, in the memory of weights."""
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    rows = sum(len(part) for part in parts)
    return torch.cat(list(parts), out=weight_memory.empty((rows, *parts[0].shape[1:]), dtype))


def _by_block(tensor: torch.Tensor) -> torch.Tensor:
    """[N, n] -> [ceil(N / 16), n, 16]."""
    padded = F.pad(tensor, (0, 0, 0, -len(tensor) % ROWS))
    return padded.view(-1, ROWS, tensor.shape[1]).transpose(1, 2)


def pack_torch(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Values, uint8 [blocks * 16, K] -> uint8 [blocks, K / 32, bytes of a chunk]."""
    words = values.contiguous().view(torch.int32).view(-1, ROWS, values.shape[1] // COLUMNS, COLUMNS // QUAD)
    quads = words.permute(0, 2, 3, 1)  # a word has a quad's four columns
    if bits == 8:
        return quads.flatten(2).view(torch.uint8)
    low = quads & 0x0F0F0F0F if bits > 4 else quads
    words = (low[:, :, ::2] | low[:, :, 1::2] << 4).flatten(2)
    if bits > 4:
        each = bits - 4
        shared = (quads >> 4 & 0x03030303).unflatten(2, (-1, 8 // each))
        shifts = torch.arange(0, 8, each, dtype=torch.int32)[:, None]
        plane = (shared << shifts).sum(3, dtype=torch.int32)  # no two have a bit in common
        words = torch.cat((words, plane.flatten(2)), 2)
    packed: torch.Tensor = words.view(torch.uint8)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_torch`, by quads."""
    quads: torch.Tensor
    if bits == 8:
        quads = packed.unflatten(2, (8, -1))
        return quads
    nibbles, plane = packed.split([ROWS * COLUMNS // 2, packed.shape[2] - ROWS * COLUMNS // 2], 2)
    vectors = nibbles.unflatten(2, (4, -1))
    quads = torch.stack((vectors & 15, vectors >> 4), 3).flatten(2, 3)
    if bits == 4:
        return quads
    each = bits - 4
    shifts = torch.arange(0, 8, each, dtype=torch.uint8)[:, None]
    high: torch.Tensor = (plane.unflatten(2, (each, 1, -1)) >> shifts & (1 << each) - 1).flatten(2, 3)
    return quads | high << 4


def row_major(weight: InterleavedWeight) -> tuple[torch.Tensor, ...]:
    """The weight before it was interleaved: values, scales, and if it has them minimums and the factors of both.

    Values are uint8 [N, K], one a byte, or indices with form.is_e2m1; scales [N, groups]; factors [N, super groups]."""
    shared = (t.transpose(1, 2).flatten(0, 1)[: weight.shape[0]] for t in weight.tensors[1:] if t is not None)
    return _stored_values(weight)[: weight.shape[0]], *shared


def values_of(weight: InterleavedWeight) -> torch.Tensor:
    """The values, uint8 [padded N, K]."""
    stored = _stored_values(weight)
    return torch.tensor(E2M1_VALUES, dtype=torch.uint8)[stored.int()] if weight.form.is_e2m1 else stored


def _stored_values(weight: InterleavedWeight) -> torch.Tensor:
    """The values or their indices, uint8 [padded N, K]."""
    quads = _unpack(weight.values, weight.form.bits).unflatten(3, (ROWS, QUAD))
    values: torch.Tensor = quads.permute(0, 3, 1, 2, 4).reshape(-1, weight.shape[1])
    return values


def scales_of(weight: InterleavedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and minimums, float32 [padded N, groups]."""

    def whole(stored: torch.Tensor | None, factor: torch.Tensor | None) -> torch.Tensor | None:
        if stored is None:
            return None
        numbers = stored.float()
        if factor is not None:
            numbers = numbers * factor.float().repeat_interleave(numbers.shape[1] // factor.shape[1], 1)
        return numbers.transpose(1, 2).flatten(0, 1)

    scales = whole(weight.scales, weight.super_scales)
    assert scales is not None
    return scales, whole(weight.minimums, weight.super_minimums)


def dequantize_interleaved(weight: InterleavedWeight) -> torch.Tensor:
    """The numbers, float32 [N, K]."""
    numbers = values_of(weight).float() - weight.form.offset
    scales, minimums = scales_of(weight)
    columns = weight.form.group_size or weight.shape[1]
    numbers *= scales.repeat_interleave(columns, 1)
    if minimums is not None:
        numbers -= minimums.repeat_interleave(columns, 1)
    return numbers[: weight.shape[0]]
