"""Products of all experts with quantized weights, in tiles: each weight is upcast and scaled once for a tile of choices.

Weight rows are the rows of the matrix instruction. Loads run several steps ahead, so that they follow the memory's
speed. A scale is rounded to bfloat16, and so is a scaled number, as in a dense copy of the weight; mxfp4 stays exact.
The torch twin is `moe_torch.Experts` with weights of `rounded_scales`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.experts.moe_routing import choices_of_tile
from runtime.kernels.norm.gated_activation import activated
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_bytes, upcast_raw_nibbles
from runtime.kernels.quantized.word_order import has_word_order
from runtime.kernels.triton_language import constexpr, jit, tl

STEP = 128  # columns of a step
_SHIFT = 16  # of the exponent of scaled numbers, so that scales up to 2 ** 17 stay within bfloat16

# Operands are pairs of bfloat16; a scale is a pair of equals. Device functions explain `raw_instructions`.
_SCALE = constexpr("mul.rn.bf16x2 $0, $1, $2;")
_SCALE_AND_ADD = constexpr("fma.rn.bf16x2 $0, $1, $2, $4;")
_SCALE_INPUTS = constexpr("=r,r,r,r")
_ADD_INPUTS = constexpr("=r,r,r,r,r,r")
_PAIRS = constexpr("prmt.b32 $0, $2, 0, 0x1010;\nprmt.b32 $1, $2, 0, 0x3232;")
_PAIRS_OUTPUTS = constexpr("=r,=r,r")
_INT4_OFFSET = constexpr("{\n.reg .b32 c;\nmov.b32 c, 0x80088008;\nmul.rn.bf16x2 $0, $1, c;\n}")  # times -2 ** -130
_OFFSET_INPUTS = constexpr("=r,r")


class WordScales(NamedTuple):
    """Scales of a stack of weights as the kernel reads them: a word holds the scales of two planes, as bfloat16."""

    words: torch.Tensor  # int32 [num_experts, steps * words of a step, at least N]
    zero_points: torch.Tensor | None  # negative, like words


def word_scales(weight: QuantizedWeight) -> WordScales | None:
    """The scales of stacked weights (a leading dimension of experts) in words; None for scales of whole rows.

    A step has 64 bytes of a row. Word i of a step is for bytes from i * 64 / words on."""
    if not weight.group_size:
        return None
    factor = 2.0 ** (126 - _SHIFT) if has_word_order(weight.encoding) else 1.0
    zero_points = None
    if weight.zero_points is not None:
        zero_points = _words(-weight.zero_points / sum_factor(weight.encoding), weight)
    return WordScales(_words(weight.scales * factor, weight), zero_points)


def sum_factor(encoding: str) -> float:
    """The factor of sums: raw numbers are smaller, and their scales are larger by 2 ** 110."""
    match encoding:
        case "e2m1":
            return 2.0**_SHIFT
        case "int4" | "uint4":
            return 2.0 ** (_SHIFT + 7)
        case _:
            return 1.0


def words_of_step(group_size: int) -> int:
    """Words of a row and a step of 128 columns."""
    return {16: 4, 32: 2}.get(group_size, 1)


def _words(scales: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """float32 [num_experts, groups, rows of scales] -> int32 [num_experts, words, rows]."""
    num_steps, size = -(-weight.shape[1] // STEP), weight.group_size
    if weight.scale_rows > 1:
        rows = -(-weight.shape[0] // 4) * 4
        scales = scales.repeat_interleave(weight.scale_rows, 2)[:, :, :rows]
    per_step = STEP // size
    padded = F.pad(scales, (0, 0, 0, num_steps * per_step - scales.shape[1])).bfloat16().view(torch.int16)
    steps = padded.unflatten(1, (num_steps, per_step))
    # The groups of the low and of the high plane for each word.
    low, high = {16: ([0, 1, 4, 5], [2, 3, 6, 7]), 32: ([0, 2], [1, 3]), 64: ([0], [1]), 128: ([0], [0])}[size]
    pairs = torch.stack((steps[:, :, low], steps[:, :, high]), -1)
    return pairs.view(torch.int32).squeeze(-1).flatten(1, 2).contiguous()


def rounded_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with the scales that the kernel applies."""
    if not weight.group_size:
        return weight
    zero_points = None if weight.zero_points is None else weight.zero_points.bfloat16().float()
    return replace(weight, scales=weight.scales.bfloat16().float(), zero_points=zero_points)


@jit
def _moe_wna16_tile_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_choices, K] sorted by expert
    values_ptr,  # as in `QuantizedWeight`, stacked by expert
    scales_ptr,  # float32 [num_experts, N] for whole rows, else `WordScales.words`
    zero_points_ptr,  # `WordScales.zero_points`, read with LAYOUT.has_zero_points
    out_ptr,  # [num_choices, N], or with ACTIVATION N // 2 columns, sorted by expert
    starts_ptr,  # [num_experts + 1]
    order_ptr,  # choices by expert
    num_experts,
    N,  # weight rows of an expert
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    SCALES: tl.constexpr,  # elements between the scales of two experts
    SCALE_STRIDE: tl.constexpr,  # elements between two words of scales of a row
    RAW: tl.constexpr,  # `raw_instructions`; None for tables, 8-bit values, and under the interpreter
    FACTOR: tl.constexpr,  # `sum_factor`
    LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,  # no block has rows beyond the last
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N with tile j of the choices sorted by expert.

    With an activation, the first half of the rows is of gate and the second half of up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, tokens, live, choices = choices_of_tile(
        tl.program_id(1), starts_ptr, order_ptr, num_experts, False, EXPERTS, BLOCK_M
    )
    if expert >= num_experts:
        return
    sources = tl.where(live, choices // PER_TOKEN if ACTIVATION is not None else tokens, 0)
    lanes = tl.arange(0, BLOCK_N)
    if ACTIVATION is not None:
        HALF: tl.constexpr = BLOCK_N // 2
        rows = tl.program_id(0) * HALF + lanes % HALF
        if not EVEN:
            rows = tl.minimum(rows, N // 2 - 1)
        rows += lanes // HALF * (N // 2)
    else:
        rows = tl.program_id(0) * BLOCK_N + lanes
        if not EVEN:
            rows = tl.minimum(rows, N - 1)
    STEP: tl.constexpr = 128
    WIDTH: tl.constexpr = 64 if LAYOUT.plane else STEP
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WHOLE: tl.constexpr = K % STEP == 0
    inner = tl.arange(0, WIDTH)
    if LAYOUT.plane:
        cols = inner // LAYOUT.plane * (2 * LAYOUT.plane) + inner % LAYOUT.plane
    else:
        cols = inner
    values = values_ptr + (expert.to(tl.int64) * N + rows)[:, None] * ROW_BYTES + inner[None, :]
    xs = x_ptr + (sources.to(tl.int64) * K)[:, None] + cols[None, :]
    scale_of = expert.to(tl.int64) * SCALES + rows
    scales, zero_points = scales_ptr + scale_of, zero_points_ptr + scale_of
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        if WHOLE:
            w = tl.load(values + (start // 2 if LAYOUT.plane else start), eviction_policy="evict_first")
        else:
            at = start // 2 if LAYOUT.plane else start
            w = tl.load(values + at, mask=(inner < ROW_BYTES - at)[None, :], other=0.0, eviction_policy="evict_first")
        x = _columns(xs, cols, live, start, K, WHOLE)
        if LAYOUT.plane:
            high_x = _columns(xs, cols, live, start + LAYOUT.plane, K, WHOLE)
            low_scale, high_scale = _pairs(scales, start, rows, SCALE_STRIDE, LAYOUT)
            low_zero, high_zero = low_scale, high_scale
            if LAYOUT.has_zero_points:
                low_zero, high_zero = _pairs(zero_points, start, rows, SCALE_STRIDE, LAYOUT)
            low, high = upcast_raw_nibbles(w, LAYOUT, RAW)
            low, high = _scaled(low, low_scale, low_zero, LAYOUT), _scaled(high, high_scale, high_zero, LAYOUT)
            acc = tl.dot(low.to(x.dtype), x.T, acc, input_precision="ieee")
            acc = tl.dot(high.to(x.dtype), high_x.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(upcast_bytes(w, LAYOUT, x.dtype), x.T, acc, input_precision="ieee")
    if not LAYOUT.group_size:
        acc *= tl.load(scales)[:, None]
    if FACTOR != 1.0:
        acc *= FACTOR
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (1, 2, 0)))
        acc = activated(gate, ACTIVATION) * up
        width = N // 2
        outs = tl.program_id(0) * HALF + tl.arange(0, HALF)
        targets = tokens
    else:
        width = N
        outs = tl.program_id(0) * BLOCK_N + lanes
        targets = choices
    at = out_ptr + targets.to(tl.int64)[None, :] * width + outs[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[None, :] & (outs < width)[:, None])


@jit
def _columns(xs, cols, live, start, K: tl.constexpr, WHOLE: tl.constexpr):
    mask = live[:, None] if WHOLE else live[:, None] & (cols < K - start)[None, :]
    return tl.load(xs + start, mask=mask, other=0.0)


@jit
def _pairs(shared, start, rows, STRIDE: tl.constexpr, LAYOUT: tl.constexpr):
    """The scales of a step for the low and for the high plane, [rows, bytes]; on a GPU as pairs of equals."""
    WORDS: tl.constexpr = 4 if LAYOUT.group_size == 16 else 2 if LAYOUT.group_size == 32 else 1
    at = shared + start // 128 * (WORDS * STRIDE)
    if WORDS == 1:
        low, high = _pair(tl.load(at)[:, None], LAYOUT)
    else:
        SHAPE: tl.constexpr = (rows.shape[0], WORDS, 64 // WORDS)
        words = tl.load(at[:, None] + tl.arange(0, WORDS)[None, :] * STRIDE)[:, :, None]
        low, high = _pair(words, LAYOUT)
        low = tl.reshape(tl.broadcast_to(low, SHAPE), (rows.shape[0], 64))
        high = tl.reshape(tl.broadcast_to(high, SHAPE), (rows.shape[0], 64))
    return low, high


@jit
def _pair(words, LAYOUT: tl.constexpr):
    if LAYOUT.asm is not None:
        low, high = tl.inline_asm_elementwise(
            _PAIRS, _PAIRS_OUTPUTS, [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@jit
def _scaled(numbers, scale, zero_point, LAYOUT: tl.constexpr):
    """Raw numbers times their scales, plus their negative zero points; rounded once."""
    if LAYOUT.asm is None:
        numbers = numbers * scale
        if LAYOUT.encoding == "int4":
            numbers += scale * -7.346839692639297e-40
        if LAYOUT.has_zero_points:
            numbers += zero_point
    elif LAYOUT.has_zero_points or LAYOUT.encoding == "int4":
        if LAYOUT.encoding == "int4":
            zero_point = tl.inline_asm_elementwise(
                _INT4_OFFSET, _OFFSET_INPUTS, [scale], dtype=tl.int32, is_pure=True, pack=1
            )
        numbers = tl.inline_asm_elementwise(
            _SCALE_AND_ADD, _ADD_INPUTS,
            [numbers, tl.broadcast_to(scale, numbers.shape), tl.broadcast_to(zero_point, numbers.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            _SCALE, _SCALE_INPUTS, [numbers, tl.broadcast_to(scale, numbers.shape)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


def has_moe_tiles(weight: QuantizedWeight) -> bool:
    """True if this kernel takes the weight."""
    if weight.plane:
        return weight.group_size > 0 and weight.shape[1] % (2 * weight.plane) == 0
    return not weight.group_size
