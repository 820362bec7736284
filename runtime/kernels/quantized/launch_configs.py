"""Launch configurations for products with quantized weights: rules measured with 8B shapes on an H200."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.linear.sum_order import SumOrder
from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.triton_language import next_power_of_2

_NUM_SMS = 132
_FEW_ROWS = 5120  # weight rows: about one 32-row program per multiprocessor, or fewer


class Wna16SkinnyConfig(NamedTuple):
    """How `wna16_skinny_gemm` cuts a product."""

    block_n: int  # weight rows per program
    block_k: int  # columns per step, unless the layout fixes them (`step_columns`)
    num_warps: int
    stages: int = 1  # software pipeline stages
    ahead: int = 1  # steps, 1 or 2, of weights requested before the wait for the previous kernel
    unroll: int = 1  # steps between two waits for loads


class GemvConfig(NamedTuple):
    """How `wna16_gemv` cuts a product."""

    block_n: int  # weight rows with loads in flight at once
    num_warps: int
    blocks: int  # blocks with block_n rows that a program multiplies one after another


def wna16_sum_order(size_out: int, size_in: int) -> SumOrder:
    """`sum_order` with more chunks: a step reads fewer bytes than a bfloat16 step but waits as long for memory.

    More steps therefore have to run side by side."""
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
    """The configuration for one row: registers hold the values of a block and the next block.

    A program has as many rows as leave programs for all multiprocessors."""
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
    """A weight row's 4-byte words, rounded up to a power of two; at least 128, a warp's words."""
    words: int = next_power_of_2(weight.values[0].nbytes // 4)
    return max(words, 128)


def wna16_tiling(weight: QuantizedWeight, num_rows: int, fixed_order: bool = False) -> Tiling:
    """The tiling for a weight and a number of rows: one tile over all rows, if its sums fit into registers.

    Weights are then upcast once. With a fixed order, tiles have 32 weight rows and run on mma.sync, as for few rows:
    wgmma adds the columns of an instruction in another order."""
    if fixed_order:
        return Tiling(32, 32, 128, 2, 4) if num_rows <= 32 else Tiling(64, 32, 128, 4, 3)
    if num_rows > 64:
        return Tiling(128, 128, 128, 8, 3)
    few_programs = -(-weight.shape[0] // 64) <= _NUM_SMS
    parts = wna16_sum_order(*weight.shape).num_chunks if few_programs else 1
    return Tiling(32 if num_rows <= 32 else 64, 64, 128, 4, 3, split=parts)
