"""How products with weights that are codes are cut: rules made from what was measured on an H200 of 8B shapes."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.linear.sum_order import SumOrder
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.triton_language import next_power_of_2

_NUM_SMS = 132
_FEW_ROWS = 5120  # of a weight: fewer programs of 32 rows than there are multiprocessors, or hardly more


class Wna16SkinnyConfig(NamedTuple):
    """How a product of few rows is cut, for matrix units."""

    block_n: int  # rows of the weight of a program
    block_k: int  # columns a step; fixed by the form where codes have 4 bits or groups
    num_warps: int
    stages: int = 1  # of the software pipeline
    ahead: int = 1  # steps, 1 or 2, whose weights are requested before the wait for the previous kernel
    unroll: int = 1  # steps between two waits for loads


class GemvConfig(NamedTuple):
    """How a product of one row is cut, for other units."""

    block_n: int  # rows of the weight whose codes are on their way at once
    num_warps: int
    blocks: int  # of so many rows that a program multiplies one after another


class Wna16Tiling(NamedTuple):
    """How tiles are laid over a product. It does not affect the order of any sum."""

    block_m: int  # rows of x
    block_n: int  # of the weight
    block_k: int  # columns a step, where the form leaves a choice
    num_warps: int
    stages: int
    split: bool = False  # chunks side by side


def step_columns(weight: QuantizedWeight, block_k: int) -> int:
    """Columns of a step of a product: those of two planes, or of a group, or as many as wanted."""
    return 2 * weight.plane or weight.group or block_k


def wna16_sum_order(size_out: int, size_in: int) -> SumOrder:
    """As `sum_order`, in more chunks: a step has fewer bytes than one of bfloat16 and waits as long for memory and for
    matrix instructions, so that more of them have to go side by side."""
    num_chunks = 8 if size_out <= _FEW_ROWS else 4
    while num_chunks > 1 and size_in < num_chunks * 256:
        num_chunks //= 2
    return SumOrder(num_chunks, -(-size_in // (num_chunks * 128)) * 128)


def wna16_skinny_config(weight: QuantizedWeight, num_rows: int) -> Wna16SkinnyConfig:
    """The configuration for a weight and a number of rows."""
    size_out, size_in = weight.shape
    warps = max(wna16_sum_order(size_out, size_in).num_chunks, 2)
    block_n = 32 if weight.plane and num_rows <= 8 else 16
    if size_out <= _FEW_ROWS and size_in > 8192:
        return Wna16SkinnyConfig(block_n, 128, warps, stages=3, ahead=2, unroll=2)
    if size_out <= _FEW_ROWS:
        return Wna16SkinnyConfig(block_n, 128, warps, stages=3)
    if size_out <= 2 * _FEW_ROWS:
        return Wna16SkinnyConfig(block_n, 128, warps, stages=5, ahead=2)
    return Wna16SkinnyConfig(32 if num_rows <= 8 else 16, 128, warps, stages=3)


def gemv_config(weight: QuantizedWeight) -> GemvConfig:
    """The configuration for one row: registers hold the codes of a block and of the next one, and a program's rows are
    as many as leave programs for all multiprocessors."""
    size_out, words = weight.shape[0], row_words(weight)
    more = 1 if words > 8192 else 4
    if weight.plane:
        block_n = 8 if words <= 512 else more
        rows = 32 if size_out >= 8192 else 16 if size_out >= 4096 else 8
        warps = words // 128 if words <= 1024 else 8 if words <= 2048 else 16
        return GemvConfig(block_n, warps, rows // block_n)
    if size_out <= _FEW_ROWS and (words <= 512 or (words == 2048 and size_out <= 2048)):
        return GemvConfig(8, min(words // 128, 4), 1)
    if words <= 512 and size_out <= 65536:
        return GemvConfig(8, max(words // 256, 1), 2)
    return GemvConfig(more, min(words // 128, 4) if words <= 4096 else 16, 2 if words <= 2048 else 4)


def row_words(weight: QuantizedWeight) -> int:
    """Words of 4 bytes of a row's codes, rounded up to a power of two; a warp has 128."""
    words: int = next_power_of_2(weight.codes[0].nbytes // 4)
    return max(words, 128)


def wna16_tiling(weight: QuantizedWeight, num_rows: int, fixed_order: bool = False) -> Wna16Tiling:
    """The tiling for a weight and a number of rows: one tile over all rows while its sums fit the registers, so that
    weights are decoded once. With a fixed order, tiles of 32 rows of the weight are those of mma.sync, which few rows
    have as well: wgmma adds the columns of an instruction in another order."""
    if fixed_order:
        return Wna16Tiling(32, 32, 128, 2, 4) if num_rows <= 32 else Wna16Tiling(64, 32, 128, 4, 3)
    if num_rows > 64:
        return Wna16Tiling(128, 128, 128, 8, 3)
    few_programs = -(-weight.shape[0] // 64) <= _NUM_SMS
    return Wna16Tiling(32 if num_rows <= 32 else 64, 64, 128, 4, 3, split=few_programs)
