"""All experts' products with quantized weights: each weight is upcast and scaled once for a choice tile.

Weight rows are the rows of the matrix instruction. Loads run several steps ahead, so that they follow the memory's
speed. A scale is rounded to bfloat16, and so is a scaled value, as in a dense copy of the weight; mxfp4 stays exact.
The torch twin is `moe_torch.Experts` with weights from `rounded_scales`.

Both products are one launch for most choice counts. A program with thousands of columns takes about 20 us, even on
an empty GPU. Between two launches, most multiprocessors would wait that long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.kernels.experts.choice_tiles import ExpertTiles, Tile, choices_of_tile
from runtime.kernels.experts.moe_routing import add_results
from runtime.kernels.experts.moe_torch import ExpertBiases
from runtime.kernels.experts.moe_wna16_words import STEP, TILE_ROWS, sum_factor
from runtime.kernels.linear.skinny_blocks import add_chunks
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.norm.gated_activation import Activation, gated_by
from runtime.kernels.quantized.launch_configs import wna16_sum_order
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_bytes, upcast_raw_nibbles
from runtime.kernels.quantized.word_order import raw_instructions
from runtime.kernels.triton_language import constexpr, jit, tl, use_pdl

_TILE_ROWS = constexpr(TILE_ROWS)
_TALL_REGISTERS = (
    128  # registers per thread: of two programs on a multiprocessor, one multiplies while the other upcasts
)

# Operands are bfloat16 pairs; a scale is a pair of equals. Device functions explain `raw_instructions`.
_SCALE = constexpr("mul.rn.bf16x2 $0, $1, $2;")
_SCALE_AND_ADD = constexpr("fma.rn.bf16x2 $0, $1, $2, $4;")
_SCALE_INPUTS = constexpr("=r,r,r,r")
_ADD_INPUTS = constexpr("=r,r,r,r,r,r")
_PAIRS = constexpr("prmt.b32 $0, $2, 0, 0x1010;\nprmt.b32 $1, $2, 0, 0x3232;")
_PAIRS_OUTPUTS = constexpr("=r,=r,r")
_INT4_OFFSET = constexpr("{\n.reg .b32 c;\nmov.b32 c, 0x80088008;\nmul.rn.bf16x2 $0, $1, c;\n}")  # times -2 ** -130
_OFFSET_INPUTS = constexpr("=r,r")


class ProductForm(NamedTuple):
    """How the kernel multiplies with one of the weights: one constant argument."""

    size_out: int  # weight rows per expert
    size_in: int
    has_bias: bool
    scales: int  # elements between two experts' scales
    factor: float  # `sum_factor`
    num_chunks: int  # parts of K that warps multiply side by side
    chunk: int
    block_n: int
    blocks: int  # programs per tile
    is_even: bool  # no block has rows beyond the last


class LaunchForm(NamedTuple):
    """Constants of a launch besides the weights."""

    per_token: int
    single: bool  # tile i has only choice i
    block_m: int
    tall: bool  # choices are the rows of the matrix instruction, and upcast weights go through shared memory
    stages: int


@jit(do_not_specialize=["num_tiles"])
def _moe_wna16_kernel(
    x_ptr,  # [num_tokens, hidden]
    inner_ptr,  # [num_choices, ffn]: the first product's results
    results_ptr,  # [num_choices, hidden]: the second product's results
    up_ptr,  # [num_experts, row tiles, STEPS, TILE_ROWS, WIDTH] from `in_tile_order`: gate rows, then up rows
    up_scales_ptr,  # float32 [num_experts, 1, N] for whole rows, else as `with_word_scales` returns them
    up_zero_points_ptr,  # shaped like scales, read with has_zero_points
    up_bias_ptr,  # [num_experts, N], with has_bias
    down_ptr,
    down_scales_ptr,
    down_zero_points_ptr,
    down_bias_ptr,
    experts_ptr,  # this and the next two as in `ExpertTiles`; with SINGLE the others are not used
    choices_ptr,
    done_ptr,
    mixture_ptr,  # [num_choices] float32 expert weights; this and the next two as in `add_results`
    residual_ptr,
    counters_ptr,
    num_tiles,
    UP: tl.constexpr,  # `ProductForm`
    UP_LAYOUT: tl.constexpr,
    UP_RAW: tl.constexpr,  # `raw_instructions`; None for tables, 8-bit values, and under the interpreter
    DOWN: tl.constexpr,
    DOWN_LAYOUT: tl.constexpr,
    DOWN_RAW: tl.constexpr,
    LAUNCH: tl.constexpr,  # `LaunchForm`
    ACTIVATION: tl.constexpr,
    FIRST: tl.constexpr,  # the launch has the first product's programs
    SECOND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs with lower indices compute the first product; each has a block of a tile.

    Programs are scheduled in the order of their index. So the second product begins when a multiprocessor has room,
    and waits for running programs alone."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BOTH: tl.constexpr = FIRST and SECOND
    program = tl.program_id(0)
    if BOTH:
        num_first = num_tiles * UP.blocks
        if program < num_first:
            _first_program(
                program, x_ptr, (up_ptr, up_scales_ptr, up_zero_points_ptr, up_bias_ptr), inner_ptr, experts_ptr,
                choices_ptr, done_ptr, UP, UP_LAYOUT, UP_RAW, LAUNCH, ACTIVATION, BOTH,
            )  # fmt: skip
        else:
            _second_program(
                program - num_first, inner_ptr, (down_ptr, down_scales_ptr, down_zero_points_ptr, down_bias_ptr),
                results_ptr, experts_ptr, choices_ptr, done_ptr, mixture_ptr, residual_ptr, counters_ptr, UP, DOWN,
                DOWN_LAYOUT, DOWN_RAW, LAUNCH, BOTH,
            )  # fmt: skip
    elif FIRST:
        _first_program(
            program, x_ptr, (up_ptr, up_scales_ptr, up_zero_points_ptr, up_bias_ptr), inner_ptr, experts_ptr,
            choices_ptr, done_ptr, UP, UP_LAYOUT, UP_RAW, LAUNCH, ACTIVATION, BOTH,
        )  # fmt: skip
    else:
        _second_program(
            program, inner_ptr, (down_ptr, down_scales_ptr, down_zero_points_ptr, down_bias_ptr), results_ptr,
            experts_ptr, choices_ptr, done_ptr, mixture_ptr, residual_ptr, counters_ptr, UP, DOWN, DOWN_LAYOUT,
            DOWN_RAW, LAUNCH, BOTH,
        )  # fmt: skip


@jit
def _first_program(
    program, x_ptr, weight, inner_ptr, experts_ptr, choices_ptr, done_ptr, FORM: tl.constexpr, LAYOUT: tl.constexpr,
    RAW: tl.constexpr, LAUNCH: tl.constexpr, ACTIVATION: tl.constexpr, NOTIFIES: tl.constexpr,
):  # fmt: skip
    """A block of a tile's first product; with NOTIFIES, the second one waits for it."""
    tile, block = program // FORM.blocks, program % FORM.blocks
    expert, choices, live = choices_of_tile(tile, experts_ptr, choices_ptr, LAUNCH.single, LAUNCH.block_m)
    if expert >= 0:
        y = _block_product(
            x_ptr, weight, block, expert, choices // LAUNCH.per_token, live,
            FORM, LAYOUT, RAW, ACTIVATION, LAUNCH,
        )  # fmt: skip
        HALF: tl.constexpr = FORM.block_n // 2
        FFN: tl.constexpr = FORM.size_out // 2
        _store(y, inner_ptr, choices, live, block * HALF + tl.arange(0, HALF), FFN, LAUNCH.tall)
        if NOTIFIES:
            tl.debug_barrier()  # this program's stores come before its arrival
            tl.atomic_add(done_ptr + tile, 1, sem="release", scope="gpu")


@jit
def _second_program(
    program, inner_ptr, weight, results_ptr, experts_ptr, choices_ptr, done_ptr, mixture_ptr, residual_ptr,
    counters_ptr, FIRST_FORM: tl.constexpr, FORM: tl.constexpr, LAYOUT: tl.constexpr, RAW: tl.constexpr,
    LAUNCH: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A block of a tile's second product; with WAITS, after all blocks of the first."""
    tile, block = program // FORM.blocks, program % FORM.blocks
    expert, choices, live = choices_of_tile(tile, experts_ptr, choices_ptr, LAUNCH.single, LAUNCH.block_m)
    if expert >= 0:
        if WAITS:
            while tl.atomic_add(done_ptr + tile, 0, sem="acquire", scope="gpu") < FIRST_FORM.blocks:
                pass
        y = _block_product(
            inner_ptr, weight, block, expert, choices, live, FORM, LAYOUT,
            RAW, None, LAUNCH,
        )  # fmt: skip
        HIDDEN: tl.constexpr = FORM.size_out
        outs = block * FORM.block_n + tl.arange(0, FORM.block_n)
        _store(y, results_ptr, choices, live, outs, HIDDEN, LAUNCH.tall)
        if LAUNCH.single:
            counter = counters_ptr + tile // LAUNCH.per_token * FORM.blocks + block
            add_results(
                results_ptr, mixture_ptr, residual_ptr, counter, tile // LAUNCH.per_token, outs, HIDDEN,
                LAUNCH.per_token,
            )  # fmt: skip


@jit
def _block_product(
    x_ptr, weight, block, expert, sources, live, FORM: tl.constexpr, LAYOUT: tl.constexpr, RAW: tl.constexpr,
    ACTIVATION: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """A block's weight rows times rows of x, with bias and activation: fp32 [weight rows, choices].

    With TALL, the result is [choices, weight rows].

    With an activation, the first half of the weight rows is gate's and the second half is up's."""
    values_ptr, scales_ptr, zero_points_ptr, bias_ptr = weight
    N: tl.constexpr = FORM.size_out
    K: tl.constexpr = FORM.size_in
    NUM_CHUNKS: tl.constexpr = FORM.num_chunks
    CHUNK: tl.constexpr = FORM.chunk
    BLOCK_N: tl.constexpr = FORM.block_n
    lanes = tl.arange(0, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    if ACTIVATION is not None:
        rows = block * HALF + lanes % HALF
        if not FORM.is_even:
            rows = tl.minimum(rows, N // 2 - 1)
        rows += lanes // HALF * (N // 2)
    else:
        rows = block * BLOCK_N + lanes
        if not FORM.is_even:
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
    scale_of = expert.to(tl.int64) * FORM.scales + rows
    word_of = scale_of[:, None] + tl.arange(0, WORDS)[None, :] * LAYOUT.scale_stride
    x_of = x_ptr + sources.to(tl.int64) * K
    if NUM_CHUNKS == 1:
        cols = cols[None, :]
        first_step = tl.zeros((1, 1), tl.int32)
        values, xs, x_live = byte_of[:, None] + inner[None, :], x_of[:, None] + cols, live[:, None]
        acc = tl.full((LAUNCH.block_m, BLOCK_N) if LAUNCH.tall else (BLOCK_N, LAUNCH.block_m), 0, tl.float32)
    else:
        chunks = tl.arange(0, NUM_CHUNKS)[:, None, None]
        first_step, word_of = chunks * (CHUNK // 128), word_of[None, :, :]
        place, cols = first_step * TILE + inner[None, None, :], chunks * CHUNK + cols[None, None, :]
        values, xs, x_live = byte_of[None, :, None] + place, x_of[None, :, None] + cols, live[None, :, None]
        acc = tl.full((NUM_CHUNKS, BLOCK_N, LAUNCH.block_m), 0, tl.float32)
    at_word = first_step * (WORDS * LAYOUT.scale_stride) + word_of
    for start in tl.range(0, CHUNK, 128, num_stages=LAUNCH.stages):
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
            acc = _add_product(low, x, acc, NUM_CHUNKS, LAUNCH.tall)
            acc = _add_product(high, high_x, acc, NUM_CHUNKS, LAUNCH.tall)
        else:
            numbers = upcast_bytes(w, LAYOUT, tl.float32)
            if LAYOUT.group_size:
                numbers = _scaled(numbers, low_scale, low_zero, LAYOUT)
            acc = _add_product(numbers, x, acc, NUM_CHUNKS, LAUNCH.tall)
    y = add_chunks(acc, NUM_CHUNKS)
    if not LAYOUT.group_size:
        row_scale = tl.load(scales_ptr + expert.to(tl.int64) * FORM.scales + rows // LAYOUT.scale_rows)
        y *= row_scale[None, :] if LAUNCH.tall else row_scale[:, None]
    if FORM.factor != 1.0:
        y *= FORM.factor
    if FORM.has_bias:
        bias = tl.load(bias_ptr + expert * N + rows).to(tl.float32)
        y += bias[None, :] if LAUNCH.tall else bias[:, None]
    if ACTIVATION is not None:
        if LAUNCH.tall:
            gate, up = tl.split(tl.permute(tl.reshape(y, (LAUNCH.block_m, 2, HALF)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, LAUNCH.block_m)), (1, 2, 0)))
        y = gated_by(gate, up, ACTIVATION)
    return y


@jit
def _store(y, out_ptr, choices, live, outs, WIDTH: tl.constexpr, TALL: tl.constexpr):
    """Store the columns `outs` of the choices' rows, which have WIDTH columns."""
    out = out_ptr + choices.to(tl.int64) * WIDTH
    if TALL:
        at, inside = out[:, None] + outs[None, :], live[:, None] & (outs < WIDTH)[None, :]
    else:
        at, inside = out[None, :] + outs[:, None], live[None, :] & (outs < WIDTH)[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=inside)


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
    """A step's scales for the low and the high plane; pairs of equals on a GPU.

    `at` is [rows, words per step], or with chunks [chunks, rows, words]. A scale covers WIDTH / words bytes."""
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


def moe_wna16_products(
    x: torch.Tensor,  # [num_tokens, hidden]
    weights: Sequence[QuantizedWeight],  # all experts' gate and up, then down; from `with_word_scales`
    biases: ExpertBiases,
    results: torch.Tensor,  # [num_choices, hidden]: each choice's result; float32 with a tile for each choice
    tiles: ExpertTiles,
    mixture: torch.Tensor,  # float32 [num_choices]: expert weights
    residual: torch.Tensor,  # [num_tokens, hidden]
    choices: int,  # choices per token
    tile: Tile,
    activation: Activation,
) -> None:
    """The results of all choices. With a tile for each choice, they are added to `residual`, too."""
    pdl, is_single, is_tall, num_tiles = use_pdl(x), tiles.choices is None, tile.block_m >= 64, len(tiles.experts)
    inner = x.new_empty(len(results), weights[1].shape[1])
    forms = [_form(weight, bias, tile, is_single) for weight, bias in zip(weights, biases, strict=True)]
    blocks = [form.blocks for form in forms]
    raw = [raw_instructions(weight.encoding) if weight.word_order else None for weight in weights]
    tensors = [
        (w.values, w.scales, w.zero_points_or_scales, w.scales if bias is None else bias)
        for w, bias in zip(weights, biases, strict=True)
    ]
    for first, second in ((True, False), (False, True)) if is_single or is_tall else ((True, True),):
        num_warps = max(form.num_chunks for form, used in zip(forms, (first, second), strict=True) if used)
        _moe_wna16_kernel[(num_tiles * (blocks[0] * first + blocks[1] * second),)](
            x, inner, results, *tensors[0], *tensors[1], *tiles, mixture, residual, split_counters(x.device), num_tiles,
            UP=forms[0], UP_LAYOUT=weights[0].layout, UP_RAW=raw[0],
            DOWN=forms[1], DOWN_LAYOUT=weights[1].layout, DOWN_RAW=raw[1],
            LAUNCH=LaunchForm(choices, is_single, tile.block_m, is_tall, tile.num_stages), ACTIVATION=activation,
            FIRST=first, SECOND=second, PDL=pdl,
            num_warps=max(num_warps, tile.num_warps), launch_pdl=pdl, maxnreg=_TALL_REGISTERS if is_tall else None,
        )  # fmt: skip


def _form(weight: QuantizedWeight, bias: torch.Tensor | None, tile: Tile, is_single: bool) -> ProductForm:
    size_out, size_in = weight.shape
    num_chunks, chunk = wna16_sum_order(size_out, size_in) if is_single else (1, -(-size_in // STEP) * STEP)
    return ProductForm(
        size_out, size_in, bias is not None, weight.scales.stride(0), sum_factor(weight.encoding), num_chunks, chunk,
        tile.block_n, -(-size_out // tile.block_n), size_out % tile.block_n == 0,
    )  # fmt: skip
