"""Products for one row with quantized weights (8 bits, or 4-bit integers), without matrix units.

A program has several blocks with a few whole weight rows each. It requests its first block before it waits for the
previous kernel, and each next block before it multiplies the current one. x is converted once, to numbers that multiply
quantized values without an upcast. A thread has 16 neighbouring bytes in each row, or a multiple:

- **Integers** are multiplied as integers, four in an instruction (dp4a). x becomes int16 with a scale for each 16
  columns, split into two int8 limbs. The products of 16 values with a limb are summed exactly. x keeps 15 bits for the
  largest among 16 neighbours, where bfloat16 has 8. High nibbles stay in their place in the byte, as values times 16.
- **e4m3** is multiplied as float16, two in an instruction. x is scaled so that the largest among 16 neighbours is 1.
Two
  eight-product sums are added in float16, and then in float32. The error is 0.04 % of a result; rounding a result
  to bfloat16 costs 0.11 %.

All other sums are in float32. Inline instructions take four words per thread, which must be neighbours in a row. So x
is loaded and joined so that each thread has such words, and values get x's register layout.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.linear.skinny_blocks import store_block, weight_rows_of_block
from runtime.kernels.magnitudes import larger
from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

GEMV_ENCODINGS = ("fp8", "int8", "int4", "uint4")
_MAGIC = constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a number to the sum's low bits
_LIMBS = constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $2, $3, 0x5140;
prmt.b32 b, $4, $5, 0x5140;
prmt.b32 $0, a, b, 0x7632;
prmt.b32 $1, a, b, 0x5410;
}""")
# Inputs: four words each for values, high limbs and low limbs; and a start. Outputs: the sum, three zeros. High limbs
# are signed, low limbs are unsigned, values are either.
_DOTS = constexpr(
    tuple(
        "{\n.reg .s32 h, l;\n"
        + "".join(
            f"dp4a.{kind}.s32 h, ${4 + i}, ${8 + i}, {'h' if i else 0};\n"
            f"dp4a.{kind}.u32 l, ${4 + i}, ${12 + i}, {'l' if i else '$16'};\n"
            for i in range(4)
        )
        + "mad.lo.s32 $0, h, 256, l;\n"
        + "".join(f"mov.b32 ${i}, 0;\n" for i in range(1, 4))
        + "}"
        for kind in ("u32", "s32")
    )
)
_HALVES = constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_FP8_DOT = constexpr(
    "{\n.reg .b16 c, d;\n.reg .b32 x, y, s;\n.reg .f32 p, q;\n"
    + "".join(
        f"mov.b32 {{c, d}}, ${4 + i};\ncvt.rn.f16x2.e4m3x2 x, c;\ncvt.rn.f16x2.e4m3x2 y, d;\n"
        + (f"mul.rn.f16x2 s, x, ${8 + i};\n" if i == 0 else f"fma.rn.f16x2 s, x, ${8 + i}, s;\n")
        + f"fma.rn.f16x2 s, y, ${12 + i}, s;\n"
        for i in range(4)
    )
    + "mov.b32 {c, d}, s;\ncvt.f32.f16 p, c;\ncvt.f32.f16 q, d;\nadd.f32 p, p, q;\nmov.b32 $0, p;\n"
    + "".join(f"mov.b32 ${i}, 0;\n" for i in range(1, 4))
    + "}"
)
_FOUR_OF_3 = constexpr("=r,=r,=r,=r," + ",".join("r" * 12))
_FOUR_OF_4 = constexpr("=r,=r,=r,=r," + ",".join("r" * 16))
PLAIN = constexpr(INTERPRETED)


@jit
def _first_column(piece, LAYOUT: tl.constexpr):
    """The first column in 16 bytes of a row; with planes, the low nibbles' first column."""
    PIECES: tl.constexpr = LAYOUT.plane // 16
    return piece // PIECES * (2 * LAYOUT.plane) + piece % PIECES * 16 if LAYOUT.plane else piece * 16


@jit
def _load_x(x_ptr, shift, K: tl.constexpr, LAYOUT: tl.constexpr, WORDS: tl.constexpr):
    """x's columns for the four bytes of each word in a row: four tensors [1, WORDS] in fp32.

    `shift` is 0 for low nibbles and the plane for high ones."""
    if x_ptr.dtype.element_ty == tl.bfloat16:  # 8 bytes a word: loading half the words gives a thread 16 bytes
        half = tl.arange(0, WORDS // 2)[None, :]
        at = (_first_column(half // 2, LAYOUT) + shift) // 4 + half % 2
        xs = x_ptr.to(tl.pointer_type(tl.int64)) + at
        first = tl.load(xs, mask=at < K // 4, other=0)
        second = tl.load(xs + 2, mask=at < K // 4 - 2, other=0)
        four = tl.join(tl.reshape(first, (1, WORDS // 4, 2)), tl.reshape(second, (1, WORDS // 4, 2)))
        four = tl.reshape(tl.permute(four, (0, 1, 3, 2)), (1, WORDS))
        low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
        x0 = (low << 16).to(tl.float32, bitcast=True)
        x1 = (low & -65536).to(tl.float32, bitcast=True)
        x2 = (high << 16).to(tl.float32, bitcast=True)
        x3 = (high & -65536).to(tl.float32, bitcast=True)
    else:
        word = tl.arange(0, WORDS)[None, :]
        at = _first_column(word // 4, LAYOUT) + shift + word % 4 * 4
        x0 = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + at + 1, mask=at < K, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + at + 2, mask=at < K, other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + at + 3, mask=at < K, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@jit
def _columns(
    x_ptr, norm_ptr, shift, MOST: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr, NORM: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """x times the norm's weights, scaled so that the largest of 16 is MOST; its scales; and x's square sum.

    x is four tensors [1, WORDS] as in `_load_x`, scales are [1, WORDS / 4]."""
    x0, x1, x2, x3 = _load_x(x_ptr, shift, K, LAYOUT, WORDS)
    squares = 0.0
    if NORM:
        squares = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3)
        n0, n1, n2, n3 = _load_x(norm_ptr, shift, K, LAYOUT, WORDS)
        x0, x1, x2, x3 = x0 * n0, x1 * n1, x2 * n2, x3 * n3
    largest = larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))
    largest = larger(tl.reduce(tl.reshape(largest, (1, WORDS // 4, 4)), 2, larger), 1e-30)
    factor = _four_times(MOST / largest)
    return x0 * factor, x1 * factor, x2 * factor, x3 * factor, largest * (1 / MOST), squares


@jit
def _limbs(x0, x1, x2, x3):
    """Four numbers rounded to int16, as two words: their signed high bytes and their unsigned low bytes."""
    b0 = (x0 + _MAGIC).to(tl.int32, bitcast=True)
    b1 = (x1 + _MAGIC).to(tl.int32, bitcast=True)
    b2 = (x2 + _MAGIC).to(tl.int32, bitcast=True)
    b3 = (x3 + _MAGIC).to(tl.int32, bitcast=True)
    if PLAIN:
        high = (b0 >> 8 & 255) | (b1 >> 8 & 255) << 8 | (b2 >> 8 & 255) << 16 | (b3 >> 8 & 255) << 24
        low = (b0 & 255) | (b1 & 255) << 8 | (b2 & 255) << 16 | (b3 & 255) << 24
    else:
        high, low = tl.inline_asm_elementwise(
            _LIMBS, "=r,=r,r,r,r,r", [b0, b1, b2, b3], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return high, low


@jit
def _byte(word, i: tl.constexpr, SIGNED: tl.constexpr):
    return (word << (24 - 8 * i)) >> 24 if SIGNED else word >> 8 * i & 255


@jit
def _four_words(words):
    """[rows, WORDS] -> [rows, WORDS / 4], the sums of four neighbours."""
    return tl.sum(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 4)), 2)


@jit
def _four_times(pieces):
    """[1, WORDS / 4] -> [1, WORDS], each number four times."""
    PIECES: tl.constexpr = pieces.shape[1]
    return tl.reshape(tl.broadcast_to(pieces[:, :, None], (1, PIECES, 4)), (1, 4 * PIECES))


@jit
def _integer_products(w, high, low, start, SIGNED: tl.constexpr):
    """start [1, WORDS / 4] plus the int32 sums [rows, WORDS / 4] of 16 values times (256 * high + low)."""
    if PLAIN:
        total = tl.zeros(w.shape, tl.int32)
        for i in tl.static_range(4):
            total += _byte(w, i, SIGNED) * (256 * _byte(high, i, True) + _byte(low, i, False))
        sums = _four_words(total) + start
    else:
        ASM: tl.constexpr = _DOTS[1] if SIGNED else _DOTS[0]
        sums = _four_words(
            tl.inline_asm_elementwise(
                ASM, _FOUR_OF_4, [w, high, low, _four_times(start)], dtype=tl.int32, is_pure=True, pack=4
            )
        )
    return sums


@jit
def _e4m3(words, i: tl.constexpr):
    return _byte(words, i, False).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@jit
def _factors(
    x_ptr, norm_ptr, shift,
    FACTOR: tl.constexpr, K: tl.constexpr, LAYOUT: tl.constexpr, NORM: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """x as factors for quantized values that are FACTOR times themselves.

    Returns two words for four columns [1, WORDS]; start and scale for product sums; with zero points x's
    sums; and its square sum."""
    x0, x1, x2, x3, unit, squares = _columns(
        x_ptr, norm_ptr, shift, 1.0 if LAYOUT.encoding == "fp8" else 32767.0, K, LAYOUT, NORM, WORDS
    )
    start = tl.zeros(unit.shape, tl.int32)
    sums = unit
    if LAYOUT.encoding != "fp8":
        first, second = _limbs(x0, x1, x2, x3)
        if LAYOUT.encoding == "int4" or LAYOUT.has_zero_points:
            sums_of_x = _integer_products(tl.zeros_like(first) + 0x01010101, first, second, start, True)
            sums = sums_of_x.to(tl.float32) * unit
            if LAYOUT.encoding == "int4":
                start = -8 * FACTOR * sums_of_x
        unit *= 1 / FACTOR
    elif PLAIN:
        first = (x0, x1)
        second = (x2, x3)
    else:
        first = tl.inline_asm_elementwise(_HALVES, "=r,r,r", [x0, x1], dtype=tl.int32, is_pure=True, pack=1)
        second = tl.inline_asm_elementwise(_HALVES, "=r,r,r", [x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    return first, second, start, unit, sums, squares


@jit
def _products(w, x, LAYOUT: tl.constexpr):
    """Values [BLOCK_N, WORDS] times x from `_factors`: sums of 16 products [BLOCK_N, WORDS / 4]."""
    if LAYOUT.encoding != "fp8":
        SIGNED: tl.constexpr = LAYOUT.encoding == "int8"
        sums = _integer_products(w, x[0], x[1], x[2], SIGNED).to(tl.float32)
    elif PLAIN:
        even, odd = x[0], x[1]
        sums = _e4m3(w, 0) * even[0] + _e4m3(w, 1) * even[1] + _e4m3(w, 2) * odd[0] + _e4m3(w, 3) * odd[1]
        sums = _four_words(sums)
    else:
        bits = tl.inline_asm_elementwise(_FP8_DOT, _FOUR_OF_3, [w, x[0], x[1]], dtype=tl.int32, is_pure=True, pack=4)
        sums = _four_words(bits).to(tl.float32, bitcast=True)
    return sums * x[3]


@jit
def _load_block(
    values_ptr, scales_ptr, zero_points_ptr, block, N, wanted, FORM: tl.constexpr, LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A block's values [BLOCK_N, WORDS], and the scales and zero points [BLOCK_N, WORDS / 4] for each 16 bytes.

    With planes, the low nibbles have the first scales and zero points, the high nibbles the second."""
    row_of = tl.minimum(weight_rows_of_block(block, N, ACTIVATION, FORM.block_n), N - 1).to(tl.int64)[:, None]
    ROW_WORDS: tl.constexpr = FORM.k // 8 if LAYOUT.plane else FORM.k // 4
    words = tl.arange(0, FORM.words)[None, :]
    values = values_ptr.to(tl.pointer_type(tl.int32)) + row_of * ROW_WORDS + words
    w = tl.load(values, mask=wanted & (words < ROW_WORDS), other=0, eviction_policy="evict_first")
    scale, zero_point = 0.0, 0.0
    if LAYOUT.group_size:
        first = _first_column(tl.arange(0, FORM.words // 4)[None, :], LAYOUT)
        at = first // LAYOUT.group_size * LAYOUT.scale_stride + row_of // LAYOUT.scale_rows
        scale = tl.load(scales_ptr + at, mask=wanted & (first < FORM.k), other=0.0)
        if LAYOUT.has_zero_points:
            zero_point = tl.load(zero_points_ptr + at, mask=wanted & (first < FORM.k), other=0.0)
    high_scale, high_zero_point = scale, zero_point
    if LAYOUT.group_size and LAYOUT.plane and LAYOUT.group_size != 2 * LAYOUT.plane:
        at = (first + LAYOUT.plane) // LAYOUT.group_size * LAYOUT.scale_stride + row_of // LAYOUT.scale_rows
        high_scale = tl.load(scales_ptr + at, mask=wanted & (first < FORM.k), other=0.0)
        if LAYOUT.has_zero_points:
            high_zero_point = tl.load(zero_points_ptr + at, mask=wanted & (first < FORM.k), other=0.0)
    return w, scale, zero_point, high_scale, high_zero_point


class GemvForm(NamedTuple):
    """Constants of `wna16_gemv_kernel`."""

    pdl: bool
    k: int
    bias: bool
    residual: bool
    block_n: int
    norm: bool
    blocks: int
    words: int  # 4-byte words: a power of two, at least a row


@jit
def wna16_gemv_kernel(
    x_ptr,  # [1, K]
    values_ptr,  # this and the next two as in `QuantizedWeight`
    scales_ptr,
    zero_points_ptr,
    bias_ptr,  # [N]; read with BIAS, as are the next two with NORM and RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [1, N]
    out_ptr,  # [1, N], or N // 2 columns with ACTIVATION
    N,
    eps,
    FORM: tl.constexpr,  # `GemvForm`
    LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Program i: BLOCKS blocks from i * BLOCKS, each with BLOCK_N weight rows, times x's one row."""
    block = tl.program_id(0) * FORM.blocks
    w, scale, zero_point, high_scale, high_zero_point = _load_block(
        values_ptr, scales_ptr, zero_points_ptr, block, N, True, FORM, LAYOUT, ACTIVATION
    )
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = _factors(x_ptr, norm_ptr, 0, 1, FORM.k, LAYOUT, FORM.norm, FORM.words)
    high_x = x
    if LAYOUT.plane:  # high nibbles stay in their place, as values times 16
        PLANE: tl.constexpr = LAYOUT.plane
        high_x = _factors(x_ptr, norm_ptr, PLANE, 16, FORM.k, LAYOUT, FORM.norm, FORM.words)
    if FORM.norm:
        squares = x[5] + high_x[5] if LAYOUT.plane else x[5]
        norm = tl.rsqrt(squares / FORM.k + eps)
    for i in tl.range(FORM.blocks, num_stages=1):
        now, scales, zero_points, high_scales, high_zero_points = w, scale, zero_point, high_scale, high_zero_point
        w, scale, zero_point, high_scale, high_zero_point = _load_block(
            values_ptr, scales_ptr, zero_points_ptr, block + 1, N, i + 1 < FORM.blocks, FORM, LAYOUT, ACTIVATION
        )
        acc = _products(now & 0x0F0F0F0F if LAYOUT.plane else now, x, LAYOUT)
        high = acc
        if LAYOUT.plane:
            high = _products(now & -0x0F0F0F10, high_x, LAYOUT)
        if LAYOUT.plane and LAYOUT.group_size and LAYOUT.group_size != 2 * LAYOUT.plane:
            acc = acc * scales + high * high_scales
        else:
            if LAYOUT.plane:
                acc += high
            if LAYOUT.group_size:
                acc *= scales
        if LAYOUT.has_zero_points:
            acc -= zero_points * x[4]
            if LAYOUT.plane:
                acc -= high_zero_points * high_x[4]
        y = tl.sum(acc, 1)
        rows = weight_rows_of_block(block, N, ACTIVATION, FORM.block_n)
        if not LAYOUT.group_size:
            y *= tl.load(scales_ptr + tl.minimum(rows, N - 1))
        if FORM.norm:
            y *= norm
        store_block(
            y[:, None], block, tl.arange(0, 1), rows, bias_ptr, residual_ptr, out_ptr, 1, N, FORM.bias, FORM.residual,
            ACTIVATION, 1, FORM.block_n,
        )  # fmt: skip
        block += 1
