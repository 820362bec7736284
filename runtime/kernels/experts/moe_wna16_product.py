"""Products of all experts with quantized weights: each weight is upcast and scaled once for a tile of choices.

Weight rows are the rows of the matrix instruction. Loads run several steps ahead, so that they follow the memory's
speed. A scale is rounded to bfloat16, and so is a scaled number, as in a dense copy of the weight; mxfp4 stays exact.
The torch twin is `moe_torch.Experts` with weights of `rounded_scales`.
"""

from __future__ import annotations

import torch

from runtime.kernels.experts.moe_routing import Tile, add_results, choices_of_tile, worst_case_tiles
from runtime.kernels.experts.moe_wna16_words import STEP, TILE_ROWS, sum_factor
from runtime.kernels.linear.skinny_blocks import add_chunks
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.quantized.launch_configs import wna16_sum_order
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_bytes, upcast_raw_nibbles
from runtime.kernels.quantized.word_order import raw_instructions
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_TILE_ROWS = constexpr(TILE_ROWS)
_TALL_REGISTERS = 128  # of a thread: two programs share a multiprocessor, and one multiplies while the other upcasts

# Operands are pairs of bfloat16; a scale is a pair of equals. Device functions explain `raw_instructions`.
_SCALE = constexpr("mul.rn.bf16x2 $0, $1, $2;")
_SCALE_AND_ADD = constexpr("fma.rn.bf16x2 $0, $1, $2, $4;")
_SCALE_INPUTS = constexpr("=r,r,r,r")
_ADD_INPUTS = constexpr("=r,r,r,r,r,r")
_PAIRS = constexpr("prmt.b32 $0, $2, 0, 0x1010;\nprmt.b32 $1, $2, 0, 0x3232;")
_PAIRS_OUTPUTS = constexpr("=r,=r,r")
_INT4_OFFSET = constexpr("{\n.reg .b32 c;\nmov.b32 c, 0x80088008;\nmul.rn.bf16x2 $0, $1, c;\n}")  # times -2 ** -130
_OFFSET_INPUTS = constexpr("=r,r")


@jit
def _moe_wna16_kernel(
    x_ptr,  # [num_tokens, K], or without ACTIVATION [num_choices, K] sorted by expert
    values_ptr,  # [num_experts, row tiles, STEPS, TILE_ROWS, WIDTH] of `in_tile_order`
    scales_ptr,  # float32 [num_experts, 1, N] for whole rows, else as `with_word_scales` returns them
    zero_points_ptr,  # like scales, read with LAYOUT.has_zero_points
    bias_ptr,  # [num_experts, N], with BIAS
    out_ptr,  # [num_choices, N], or with ACTIVATION N // 2 columns, sorted by expert
    starts_ptr,  # [num_experts + 1], unused with SINGLE
    order_ptr,  # choices by expert; with SINGLE the expert of each choice
    mixture_ptr,  # [num_choices] float32 weights of experts; this and the next two as in `add_results`
    residual_ptr,
    counters_ptr,
    num_experts,
    N,  # weight rows of an expert
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SINGLE: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least num_experts
    SCALES: tl.constexpr,  # elements between the scales of two experts
    RAW: tl.constexpr,  # `raw_instructions`; None for tables, 8-bit values, and under the interpreter
    FACTOR: tl.constexpr,  # `sum_factor`
    LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,  # no block has rows beyond the last
    NUM_CHUNKS: tl.constexpr,  # parts of K that warps multiply side by side
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TALL: tl.constexpr,  # choices are the rows of the matrix instruction, and upcast weights go through shared memory
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N with tile j of the choices sorted by expert.

    With an activation, the first half of the rows is of gate and the second half of up."""
    # The routing is as old as the launch before the first product's, which waited for it.
    if PDL and ACTIVATION is not None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, tokens, live, choices = choices_of_tile(
        tl.program_id(1), starts_ptr, order_ptr, num_experts, SINGLE, EXPERTS, BLOCK_M
    )
    if expert >= num_experts:
        return
    sources = tl.where(live, choices // PER_TOKEN if ACTIVATION is not None else tokens, 0)
    lanes = tl.arange(0, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    if ACTIVATION is not None:
        rows = tl.program_id(0) * HALF + lanes % HALF
        if not EVEN:
            rows = tl.minimum(rows, N // 2 - 1)
        rows += lanes // HALF * (N // 2)
    else:
        rows = tl.program_id(0) * BLOCK_N + lanes
        if not EVEN:
            rows = tl.minimum(rows, N - 1)
    WIDTH: tl.constexpr = 64 if LAYOUT.plane else 128
    WHOLE: tl.constexpr = K == NUM_CHUNKS * CHUNK
    STEPS: tl.constexpr = (K + 127) // 128
    ALL: tl.constexpr = STEPS * 128 == NUM_CHUNKS * CHUNK  # no chunk has steps beyond the last
    TILE: tl.constexpr = _TILE_ROWS * WIDTH  # bytes
    WORDS: tl.constexpr = max(WIDTH // LAYOUT.group_size, 1) if LAYOUT.group_size else 1
    inner = tl.arange(0, WIDTH)
    cols = inner
    if LAYOUT.plane:
        cols = inner // LAYOUT.plane * (2 * LAYOUT.plane) + inner % LAYOUT.plane
    tile_of = expert.to(tl.int64) * tl.cdiv(N, _TILE_ROWS) + rows // _TILE_ROWS
    byte_of = values_ptr + tile_of * (STEPS * TILE) + rows % _TILE_ROWS * WIDTH
    scale_of = expert.to(tl.int64) * SCALES + rows
    word_of = scale_of[:, None] + tl.arange(0, WORDS)[None, :] * LAYOUT.scale_stride
    x_of = x_ptr + sources.to(tl.int64) * K
    if NUM_CHUNKS == 1:
        cols = cols[None, :]
        first_step = tl.zeros((1, 1), tl.int32)
        values, xs, x_live = byte_of[:, None] + inner[None, :], x_of[:, None] + cols, live[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N) if TALL else (BLOCK_N, BLOCK_M), tl.float32)
    else:
        chunks = tl.arange(0, NUM_CHUNKS)[:, None, None]
        first_step, word_of = chunks * (CHUNK // 128), word_of[None, :, :]
        place, cols = first_step * TILE + inner[None, None, :], chunks * CHUNK + cols[None, None, :]
        values, xs, x_live = byte_of[None, :, None] + place, x_of[None, :, None] + cols, live[None, :, None]
        acc = tl.zeros((NUM_CHUNKS, BLOCK_N, BLOCK_M), tl.float32)
    at_word = first_step * (WORDS * LAYOUT.scale_stride) + word_of
    if PDL and ACTIVATION is None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(0, CHUNK, 128, num_stages=STAGES):
        step = start // 128
        w = _values(values + step * TILE, first_step + step < STEPS, ALL)
        x = _columns(xs, cols, x_live, start, K, WHOLE)
        low_scale, high_scale, low_zero, high_zero = 1.0, 1.0, 0.0, 0.0
        if LAYOUT.group_size:
            at = at_word + step * (WORDS * LAYOUT.scale_stride)
            low_scale, high_scale = _pairs(scales_ptr + at, first_step + step < STEPS, WIDTH, LAYOUT, ALL)
            if LAYOUT.has_zero_points:
                low_zero, high_zero = _pairs(zero_points_ptr + at, first_step + step < STEPS, WIDTH, LAYOUT, ALL)
        if LAYOUT.plane:
            high_x = _columns(xs, cols, x_live, start + LAYOUT.plane, K, WHOLE)
            low, high = upcast_raw_nibbles(w, LAYOUT, RAW)
            low, high = _scaled(low, low_scale, low_zero, LAYOUT), _scaled(high, high_scale, high_zero, LAYOUT)
            acc = _add_product(low, x, acc, NUM_CHUNKS, TALL)
            acc = _add_product(high, high_x, acc, NUM_CHUNKS, TALL)
        else:
            numbers = upcast_bytes(w, LAYOUT, tl.float32)
            if LAYOUT.group_size:
                numbers = _scaled(numbers, low_scale, low_zero, LAYOUT)
            acc = _add_product(numbers, x, acc, NUM_CHUNKS, TALL)
    y = add_chunks(acc, NUM_CHUNKS)
    if not LAYOUT.group_size:
        row_scale = tl.load(scales_ptr + expert.to(tl.int64) * SCALES + rows // LAYOUT.scale_rows)
        y *= row_scale[None, :] if TALL else row_scale[:, None]
    if FACTOR != 1.0:
        y *= FACTOR
    if BIAS:
        bias = tl.load(bias_ptr + expert * N + rows).to(tl.float32)
        y += bias[None, :] if TALL else bias[:, None]
    if ACTIVATION is not None:
        if TALL:
            gate, up = tl.split(tl.permute(tl.reshape(y, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_M)), (1, 2, 0)))
        y = gated_by(gate, up, ACTIVATION)
        width = N // 2
        outs = tl.program_id(0) * HALF + tl.arange(0, HALF)
        targets = tokens
    else:
        width = N
        outs = tl.program_id(0) * BLOCK_N + lanes
        targets = choices
    out = out_ptr + targets.to(tl.int64) * width
    if TALL:
        at, inside = out[:, None] + outs[None, :], live[:, None] & (outs < width)[None, :]
    else:
        at, inside = out[None, :] + outs[:, None], live[None, :] & (outs < width)[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=inside)
    if SINGLE and ACTIVATION is None:
        token = tl.program_id(1) // PER_TOKEN
        counter = counters_ptr + token * tl.num_programs(0) + tl.program_id(0)
        add_results(out_ptr, mixture_ptr, residual_ptr, counter, token, outs, N, PER_TOKEN)


@jit
def _values(at, inside, ALL: tl.constexpr):
    if ALL:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return w


@jit
def _columns(xs, cols, live, start, K: tl.constexpr, WHOLE: tl.constexpr):
    return tl.load(xs + start, mask=live if WHOLE else live & (cols < K - start), other=0.0)


@jit
def _add_product(w, x, acc, NUM_CHUNKS: tl.constexpr, TALL: tl.constexpr):
    if TALL:
        acc = tl.dot(x, w.to(x.dtype).T, acc, input_precision="ieee")
    else:
        columns = x.T if NUM_CHUNKS == 1 else tl.trans(x, 0, 2, 1)
        acc = tl.dot(w.to(x.dtype), columns, acc, input_precision="ieee")
    return acc


@jit
def _pairs(at, inside, WIDTH: tl.constexpr, LAYOUT: tl.constexpr, ALL: tl.constexpr):
    """The scales of a step for the low and for the high plane; on a GPU as pairs of equals.

    `at` is [rows, words of a step], or with chunks [chunks, rows, words]. A scale covers WIDTH / words bytes."""
    words = tl.load(at) if ALL else tl.load(at, mask=inside, other=0)
    low, high = _pair(words, LAYOUT)
    return _over_bytes(low, WIDTH), _over_bytes(high, WIDTH)


@jit
def _over_bytes(scales, WIDTH: tl.constexpr):
    """[..., words] to [..., WIDTH], or to [..., 1] for one word."""
    REPEATS: tl.constexpr = WIDTH // scales.shape[len(scales.shape) - 1]
    if REPEATS == WIDTH:
        wide = scales
    elif len(scales.shape) == 2:
        wide = tl.broadcast_to(scales[:, :, None], (scales.shape[0], scales.shape[1], REPEATS))
        wide = tl.reshape(wide, (scales.shape[0], WIDTH))
    else:
        wide = tl.broadcast_to(scales[:, :, :, None], (scales.shape[0], scales.shape[1], scales.shape[2], REPEATS))
        wide = tl.reshape(wide, (scales.shape[0], scales.shape[1], WIDTH))
    return wide


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


def moe_wna16_product(
    x: torch.Tensor,  # [num_tokens, K], or [num_choices, K] sorted by expert
    weight: QuantizedWeight,  # of all experts, from `with_word_scales`
    bias: torch.Tensor | None,  # [num_experts, N]
    out: torch.Tensor,  # [num_choices, N], or N // 2 columns with an activation; sorted by expert then, else not
    starts: torch.Tensor,
    order: torch.Tensor,
    mixture: torch.Tensor,
    residual: torch.Tensor,
    choices: int,  # of a token
    is_single: bool,
    tile: Tile,
    activation: Activation | None,
) -> None:
    """The product of each choice's row with the weight of its expert."""
    (size_out, size_in), num_experts, pdl = weight.shape, len(weight.values), use_pdl(x)
    num_tiles = len(out) if is_single else worst_case_tiles(len(out), num_experts, tile)
    num_chunks, chunk = wna16_sum_order(size_out, size_in) if is_single else (1, -(-size_in // STEP) * STEP)
    raw = raw_instructions(weight.encoding) if weight.word_order else None
    columns, width = (2, tile.block_n // 2) if activation is not None else (1, tile.block_n)
    _moe_wna16_kernel[(-(-size_out // tile.block_n), num_tiles)](
        x, weight.values, weight.scales, weight.zero_points_or_scales, weight.scales if bias is None else bias, out,
        starts, order, mixture, residual, split_counters(x.device), num_experts, size_out, K=size_in,
        PER_TOKEN=choices, BIAS=bias is not None, ACTIVATION=activation, SINGLE=is_single,
        EXPERTS=next_power_of_2(num_experts), SCALES=weight.scales.stride(0), RAW=raw,
        FACTOR=sum_factor(weight.encoding), LAYOUT=weight.layout, EVEN=size_out // columns % width == 0,
        NUM_CHUNKS=num_chunks, CHUNK=chunk, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, TALL=tile.block_m >= 64,
        STAGES=tile.num_stages, PDL=pdl, num_warps=max(num_chunks, tile.num_warps), launch_pdl=pdl,
        maxnreg=_TALL_REGISTERS if tile.block_m >= 64 else None,
    )  # fmt: skip
