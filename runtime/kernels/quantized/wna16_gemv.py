"""`wna16_skinny_gemm` for one row, on units that are no matrix units: codes of 8 bits, and whole numbers of 4.

A program has blocks of a few whole rows of the weight. It requests those of its first block before it waits for the
kernel before it, and those of a next block before it multiplies one; x is put once into a form that multiplies codes as
they are. A thread has 16 neighbouring bytes of each row, or several times as many:

- Whole numbers are multiplied as such, four in an instruction (dp4a). x becomes whole numbers of 16 bits with a scale
  for each 16 columns, cut into two digits of 8 bits, and the products of 16 codes with a digit are summed exactly. So x
  keeps 15 bits of the largest of 16 neighbours, where a number of bfloat16 has 8. High nibbles stay where they are in
  their bytes, as codes times 16.
- e4m3 is multiplied as float16, two in an instruction. x is scaled so that the largest of 16 neighbours is 1, and 16
  products are added in float16, in two sums of eight, then on in float32. That errs 0.04 % of a result, where rounding
  one to bfloat16 errs 0.11 %.

All other sums are in float32. What is inline takes four words of a thread, which have to be neighbours in a row: x is
loaded and joined so that a thread has those, and codes get the layout of x.
"""

from __future__ import annotations

from runtime.kernels.linear.skinny_gemm import _finish, _weight_rows
from runtime.kernels.magnitudes import larger
from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

GEMV_ENCODINGS = ("fp8", "int8", "int4", "uint4")
_MAGIC = constexpr(12582912.0)  # 1.5 * 2 ** 23: what is added to it is rounded, to the low bits of the sum
_DIGITS = constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $2, $3, 0x5140;
prmt.b32 b, $4, $5, 0x5140;
prmt.b32 $0, a, b, 0x7632;
prmt.b32 $1, a, b, 0x5410;
}""")
# Of four words each of codes, high digits, low digits and a number to begin with: the sum, and three zeros. High digits
# are signed, low ones not; codes are either.
_DOTS = constexpr(
    tuple(
        "{\n.reg .s32 h, l;\n"
        + "".join(
            f"dp4a.{codes}.s32 h, ${4 + i}, ${8 + i}, {'h' if i else 0};\n"
            f"dp4a.{codes}.u32 l, ${4 + i}, ${12 + i}, {'l' if i else '$16'};\n"
            for i in range(4)
        )
        + "mad.lo.s32 $0, h, 256, l;\n"
        + "".join(f"mov.b32 ${i}, 0;\n" for i in range(1, 4))
        + "}"
        for codes in ("u32", "s32")
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
def _first_column(piece, PLANE: tl.constexpr):
    """The first of the columns of 16 bytes of a row: of their low nibbles, if there are planes."""
    return piece // (PLANE // 16) * (2 * PLANE) + piece % (PLANE // 16) * 16 if PLANE else piece * 16


@jit
def _load_x(x_ptr, shift, K: tl.constexpr, PLANE: tl.constexpr, WORDS: tl.constexpr):
    """The columns of x that the four bytes of a row's words stand for, of low nibbles with shift 0, of high ones with
    PLANE: four times [1, WORDS] in fp32."""
    if x_ptr.dtype.element_ty == tl.bfloat16:  # 8 bytes a word: half of the words in a load, which gives a thread 16
        half = tl.arange(0, WORDS // 2)[None, :]
        at = (_first_column(half // 2, PLANE) + shift) // 4 + half % 2
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
        at = _first_column(word // 4, PLANE) + shift + word % 4 * 4
        x0 = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptr + at + 1, mask=at < K, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + at + 2, mask=at < K, other=0.0).to(tl.float32)
        x3 = tl.load(x_ptr + at + 3, mask=at < K, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@jit
def _columns(
    x_ptr, norm_ptr, shift, MOST: tl.constexpr, K: tl.constexpr, PLANE: tl.constexpr, NORM: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """What `_load_x` gives, times the norm's weights, scaled so that the largest of 16 is MOST; by what that is to be
    multiplied [1, WORDS / 4]; and the sum of x's squares."""
    x0, x1, x2, x3 = _load_x(x_ptr, shift, K, PLANE, WORDS)
    squares = 0.0
    if NORM:
        squares = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3)
        n0, n1, n2, n3 = _load_x(norm_ptr, shift, K, PLANE, WORDS)
        x0, x1, x2, x3 = x0 * n0, x1 * n1, x2 * n2, x3 * n3
    largest = larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))
    largest = larger(tl.reduce(tl.reshape(largest, (1, WORDS // 4, 4)), 2, larger), 1e-30)
    factor = _four_times(MOST / largest)
    return x0 * factor, x1 * factor, x2 * factor, x3 * factor, largest * (1 / MOST), squares


@jit
def _digits(x0, x1, x2, x3):
    """Four whole numbers of 16 bits as the signed high and the unsigned low bytes of two words."""
    b0 = (x0 + _MAGIC).to(tl.int32, bitcast=True)
    b1 = (x1 + _MAGIC).to(tl.int32, bitcast=True)
    b2 = (x2 + _MAGIC).to(tl.int32, bitcast=True)
    b3 = (x3 + _MAGIC).to(tl.int32, bitcast=True)
    if PLAIN:
        high = (b0 >> 8 & 255) | (b1 >> 8 & 255) << 8 | (b2 >> 8 & 255) << 16 | (b3 >> 8 & 255) << 24
        low = (b0 & 255) | (b1 & 255) << 8 | (b2 & 255) << 16 | (b3 & 255) << 24
    else:
        high, low = tl.inline_asm_elementwise(
            _DIGITS, "=r,=r,r,r,r,r", [b0, b1, b2, b3], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return high, low


@jit
def _byte(word, i: tl.constexpr, SIGNED: tl.constexpr):
    return (word << (24 - 8 * i)) >> 24 if SIGNED else word >> 8 * i & 255


@jit
def _four_words(words):
    """The sums of four neighbours [rows, WORDS] -> [rows, WORDS / 4]."""
    return tl.sum(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 4)), 2)


@jit
def _four_times(pieces):
    """[1, WORDS / 4] -> [1, WORDS], each number four times."""
    PIECES: tl.constexpr = pieces.shape[1]
    return tl.reshape(tl.broadcast_to(pieces[:, :, None], (1, PIECES, 4)), (1, 4 * PIECES))


@jit
def _whole_products(w, high, low, start, SIGNED: tl.constexpr):
    """start [1, WORDS / 4] plus the sums [rows, WORDS / 4] of 16 codes times 256 * high + low, in whole numbers."""
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
    x_ptr, norm_ptr, shift, FORM: tl.constexpr, FACTOR: tl.constexpr, K: tl.constexpr, PLANE: tl.constexpr,
    NORM: tl.constexpr, MINIMUMS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """x in the form that multiplies codes, which are FACTOR times themselves: two words for four columns [1, WORDS];
    with what sums of products begin, by what they are multiplied; x's own sums, if MINIMUMS; that of its squares."""
    x0, x1, x2, x3, unit, squares = _columns(
        x_ptr, norm_ptr, shift, 1.0 if FORM == "fp8" else 32767.0, K, PLANE, NORM, WORDS
    )
    start = tl.zeros(unit.shape, tl.int32)
    sums = unit
    if FORM != "fp8":
        first, second = _digits(x0, x1, x2, x3)
        if FORM == "int4" or MINIMUMS:
            whole = _whole_products(tl.zeros_like(first) + 0x01010101, first, second, start, True)
            sums = whole.to(tl.float32) * unit
            if FORM == "int4":
                start = -8 * FACTOR * whole
        unit *= 1 / FACTOR
    elif PLAIN:
        first = (x0, x1)
        second = (x2, x3)
    else:
        first = tl.inline_asm_elementwise(_HALVES, "=r,r,r", [x0, x1], dtype=tl.int32, is_pure=True, pack=1)
        second = tl.inline_asm_elementwise(_HALVES, "=r,r,r", [x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    return first, second, start, unit, sums, squares


@jit
def _products(w, x, FORM: tl.constexpr):
    """Codes of bytes [BLOCK_N, WORDS] times x, of `_factors`: sums of 16 [BLOCK_N, WORDS / 4]."""
    if FORM != "fp8":
        sums = _whole_products(w, x[0], x[1], x[2], FORM == "int8").to(tl.float32)
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
    codes_ptr, scales_ptr, minimums_ptr, block, N, wanted, K: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_STRIDE: tl.constexpr, MINIMUMS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The codes of a block of rows [BLOCK_N, WORDS]; the scales and minimums of each 16 bytes [BLOCK_N, WORDS / 4], of
    their low nibbles if there are planes, then of the high ones."""
    row_of = tl.minimum(_weight_rows(block, N, ACTIVATION, BLOCK_N), N - 1).to(tl.int64)[:, None]
    ROW_WORDS: tl.constexpr = K // 8 if PLANE else K // 4
    words = tl.arange(0, WORDS)[None, :]
    codes = codes_ptr.to(tl.pointer_type(tl.int32)) + row_of * ROW_WORDS + words
    w = tl.load(codes, mask=wanted & (words < ROW_WORDS), other=0, eviction_policy="evict_first")
    scale, minimum = 0.0, 0.0
    if GROUP:
        first = _first_column(tl.arange(0, WORDS // 4)[None, :], PLANE)
        at = first // GROUP * SCALE_STRIDE + row_of // SCALE_ROWS
        scale = tl.load(scales_ptr + at, mask=wanted & (first < K), other=0.0)
        if MINIMUMS:
            minimum = tl.load(minimums_ptr + at, mask=wanted & (first < K), other=0.0)
    high_scale, high_minimum = scale, minimum
    if GROUP and PLANE and GROUP != 2 * PLANE:
        at = (first + PLANE) // GROUP * SCALE_STRIDE + row_of // SCALE_ROWS
        high_scale = tl.load(scales_ptr + at, mask=wanted & (first < K), other=0.0)
        if MINIMUMS:
            high_minimum = tl.load(minimums_ptr + at, mask=wanted & (first < K), other=0.0)
    return w, scale, minimum, high_scale, high_minimum


@jit
def wna16_gemv_kernel(
    x_ptr,  # [1, K]
    codes_ptr,  # of `QuantizedWeight`, as are the next two; minimums are read if MINIMUMS
    scales_ptr,
    minimums_ptr,
    bias_ptr,  # [N]; this and the next two are read if BIAS, NORM, RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [1, N]
    out_ptr,  # [1, N], or N // 2 columns with ACTIVATION
    N,
    eps,
    K: tl.constexpr,
    FORM: tl.constexpr,
    PLANE: tl.constexpr,  # columns between a byte's nibbles; 0: codes of 8 bits
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,  # of 4 bytes: at least a row's, a power of two
    PDL: tl.constexpr,
):
    """Program i: blocks i * BLOCKS and on, each of BLOCK_N rows of the weight, with the one row of x."""
    block = tl.program_id(0) * BLOCKS
    w, scale, minimum, high_scale, high_minimum = _load_block(
        codes_ptr, scales_ptr, minimums_ptr, block, N, True, K, PLANE, GROUP, SCALE_ROWS, SCALE_STRIDE, MINIMUMS,
        ACTIVATION, BLOCK_N, WORDS,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = _factors(x_ptr, norm_ptr, 0, FORM, 1, K, PLANE, NORM, MINIMUMS, WORDS)
    high_x = x
    if PLANE:  # high nibbles stay where they are in their bytes, and are codes times 16
        high_x = _factors(x_ptr, norm_ptr, PLANE, FORM, 16, K, PLANE, NORM, MINIMUMS, WORDS)
    if NORM:
        squares = x[5] + high_x[5] if PLANE else x[5]
        norm = tl.rsqrt(squares / K + eps)
    for i in tl.range(BLOCKS, num_stages=1):
        now, scales, minimums, high_scales, high_minimums = w, scale, minimum, high_scale, high_minimum
        w, scale, minimum, high_scale, high_minimum = _load_block(
            codes_ptr, scales_ptr, minimums_ptr, block + 1, N, i + 1 < BLOCKS, K, PLANE, GROUP, SCALE_ROWS,
            SCALE_STRIDE, MINIMUMS, ACTIVATION, BLOCK_N, WORDS,
        )  # fmt: skip
        acc = _products(now & 0x0F0F0F0F if PLANE else now, x, FORM)
        high = acc
        if PLANE:
            high = _products(now & -0x0F0F0F10, high_x, FORM)
        if PLANE and GROUP and GROUP != 2 * PLANE:
            acc = acc * scales + high * high_scales
        else:
            if PLANE:
                acc += high
            if GROUP:
                acc *= scales
        if MINIMUMS:
            acc -= minimums * x[4]
            if PLANE:
                acc -= high_minimums * high_x[4]
        y = tl.sum(acc, 1)
        rows = _weight_rows(block, N, ACTIVATION, BLOCK_N)
        if not GROUP:
            y *= tl.load(scales_ptr + tl.minimum(rows, N - 1))
        if NORM:
            y *= norm
        _finish(
            y[:, None], block, tl.arange(0, 1), rows, bias_ptr, residual_ptr, out_ptr, 1, N, BIAS, RESIDUAL,
            ACTIVATION, 1, BLOCK_N,
        )  # fmt: skip
        block += 1
