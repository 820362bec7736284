"""One step of a product with quantized weights and 16-bit activations: kernels for few and many rows share
these device functions.

A step loads quantized values, columns of x, scales and zero points, upcasts the values in registers and multiplies them
on the matrix units. Weight rows are the matrix instruction's rows. With groups, a group's sum starts at zero
and is scaled before it is added.
"""

from __future__ import annotations

from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import negative_offset, upcast_bytes, upcast_nibbles
from runtime.kernels.triton_language import jit, tl


def step_columns(weight: QuantizedWeight, block_k: int) -> int:
    """Columns per step: two planes of 4-bit values, a group, or `block_k`."""
    return 2 * weight.plane or weight.group_size or block_k


@jit
def load_values(values, place, start, ROW_BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """The bytes of a step; with WHOLE, no byte lies beyond the row."""
    if WHOLE:
        w = tl.load(values + start, eviction_policy="evict_first")
    else:
        w = tl.load(values + start, mask=place < ROW_BYTES - start, other=0.0, eviction_policy="evict_first")
    return w


@jit
def load_x(
    xs, norms, cols, live, start,
    K: tl.constexpr, LAYOUT: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The columns of x for the low and for the high plane; without planes, the same columns twice."""
    x = _load_columns(xs, norms, cols, live, start, K, NORM, WHOLE)
    high_x = x
    if LAYOUT.plane:
        high_x = _load_columns(xs, norms, cols, live, start + LAYOUT.plane, K, NORM, WHOLE)
    return x, high_x


@jit
def _load_columns(xs, norms, cols, live, start, K: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr):
    """Columns of x from `start` on for each chunk, times the norm's weights with NORM."""
    mask = live if WHOLE else live & (cols < K - start)
    x = tl.load(xs + start, mask=mask, other=0.0)
    if NORM:
        x *= tl.load(norms + start, mask=mask, other=0.0)
    return x


@jit
def load_scales(scales, zero_points, groups, start, K: tl.constexpr, LAYOUT: tl.constexpr, WHOLE: tl.constexpr):
    """Four pairs (scale, zero point): low plane, high plane, the low plane's second group, the high plane's.

    Pairs repeat where a step has fewer groups."""
    scale, zero_point = 1.0, 0.0
    if LAYOUT.group_size:
        group = start // LAYOUT.group_size
        scale = _load_group(scales, groups, group, K, LAYOUT, WHOLE)
        if LAYOUT.has_zero_points:
            zero_point = _load_group(zero_points, groups, group, K, LAYOUT, WHOLE)
    high_scale, high_zero_point = scale, zero_point
    if LAYOUT.group_size == LAYOUT.plane and LAYOUT.group_size:
        high_scale = _load_group(scales, groups, group + 1, K, LAYOUT, WHOLE)
        if LAYOUT.has_zero_points:
            high_zero_point = _load_group(zero_points, groups, group + 1, K, LAYOUT, WHOLE)
    second_scale, second_zero_point, last_scale, last_zero_point = scale, zero_point, high_scale, high_zero_point
    if 2 * LAYOUT.group_size == LAYOUT.plane and LAYOUT.group_size:
        second_scale = _load_group(scales, groups, group + 1, K, LAYOUT, WHOLE)
        high_scale = _load_group(scales, groups, group + 2, K, LAYOUT, WHOLE)
        last_scale = _load_group(scales, groups, group + 3, K, LAYOUT, WHOLE)
        if LAYOUT.has_zero_points:
            second_zero_point = _load_group(zero_points, groups, group + 1, K, LAYOUT, WHOLE)
            high_zero_point = _load_group(zero_points, groups, group + 2, K, LAYOUT, WHOLE)
            last_zero_point = _load_group(zero_points, groups, group + 3, K, LAYOUT, WHOLE)
    return (
        scale, zero_point, high_scale, high_zero_point, second_scale, second_zero_point, last_scale, last_zero_point,
    )  # fmt: skip


@jit
def _load_group(shared, groups, group, K: tl.constexpr, LAYOUT: tl.constexpr, WHOLE: tl.constexpr):
    at = shared + group * LAYOUT.scale_stride
    NUM_GROUPS: tl.constexpr = (K + LAYOUT.group_size - 1) // LAYOUT.group_size
    return tl.load(at) if WHOLE else tl.load(at, mask=groups + group < NUM_GROUPS, other=0.0)


@jit
def add_step(w, x, scales, acc, LAYOUT: tl.constexpr, NUM_CHUNKS: tl.constexpr):
    """acc plus the product of a step: values from `load_values`, x from `load_x`, scales from `load_scales`."""
    if 2 * LAYOUT.group_size == LAYOUT.plane and LAYOUT.group_size:
        # Two groups a plane: multiply each group's x columns, with zeros in place of the other group's.
        low, high = upcast_nibbles(w, LAYOUT, x[0].dtype)
        low_x, second_x = _halves(x[0], NUM_CHUNKS)
        high_x, last_x = _halves(x[1], NUM_CHUNKS)
        acc = _add_plane(low, low_x, scales[0], scales[1], acc, LAYOUT, NUM_CHUNKS)
        acc = _add_plane(low, second_x, scales[4], scales[5], acc, LAYOUT, NUM_CHUNKS)
        acc = _add_plane(high, high_x, scales[2], scales[3], acc, LAYOUT, NUM_CHUNKS)
        acc = _add_plane(high, last_x, scales[6], scales[7], acc, LAYOUT, NUM_CHUNKS)
    elif LAYOUT.plane:  # one group's planes are also scaled one by one: two short sums take less time than one long sum
        low, high = upcast_nibbles(w, LAYOUT, x[0].dtype)
        acc = _add_plane(low, x[0], scales[0], scales[1], acc, LAYOUT, NUM_CHUNKS)
        acc = _add_plane(high, x[1], scales[2], scales[3], acc, LAYOUT, NUM_CHUNKS)
    else:
        w = upcast_bytes(w, LAYOUT, x[0].dtype)
        acc = _add_plane(w, x[0], scales[0], scales[1], acc, LAYOUT, NUM_CHUNKS)
    return acc


@jit
def _halves(x, NUM_CHUNKS: tl.constexpr):
    """x with zeros in the second half of its columns, and x with zeros in the first half."""
    WIDTH: tl.constexpr = x.shape[1] if NUM_CHUNKS == 1 else x.shape[2]
    cols = tl.arange(0, WIDTH)
    is_first = cols[None, :] < WIDTH // 2 if NUM_CHUNKS == 1 else cols[None, None, :] < WIDTH // 2
    zeros = tl.zeros_like(x)
    return tl.where(is_first, x, zeros), tl.where(is_first, zeros, x)


@jit
def _add_plane(w, x, scale, zero_point, acc, LAYOUT: tl.constexpr, NUM_CHUNKS: tl.constexpr):
    """acc plus the product of upcast columns; one group's product with groups.

    Upcast 4-bit integers are too large by an offset. The sum therefore starts with the negative offset times x's
    sum, which zero points multiply, too."""
    OFFSET: tl.constexpr = LAYOUT.encoding == "int4" or LAYOUT.encoding == "uint4"
    part = tl.zeros_like(acc) if LAYOUT.group_size else acc
    if OFFSET or LAYOUT.has_zero_points:
        sums = _dot(negative_offset(w, LAYOUT), x, part if OFFSET else tl.zeros_like(acc), NUM_CHUNKS)
    part = _dot(w, x, sums if OFFSET else part, NUM_CHUNKS)
    if LAYOUT.group_size:
        part = tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
    if LAYOUT.has_zero_points:
        part = tl.fma(sums, tl.broadcast_to(zero_point / 128, sums.shape), part)
    return part


@jit
def _dot(w, x, acc, NUM_CHUNKS: tl.constexpr):
    return tl.dot(w, x.T if NUM_CHUNKS == 1 else tl.trans(x, 0, 2, 1), acc)
