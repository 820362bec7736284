"""Causal depthwise convolutions over the tokens of a request, on a GPU.

A program takes a tile of a row's tokens and a block of channels. Earlier inputs come from the row's own tokens, and in
its first tile from the ring. A short row also writes the ring, because its tokens have other places in the ring than
the inputs that it reads. Behind longer rows, a second kernel does.
"""

from __future__ import annotations

import torch

from runtime.kernels.attention.paged_attention import find_row, rows_searched
from runtime.kernels.states.state_rows import ConvState, DeltaState, StateRows
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl
from runtime.spec.kv_cache_spec import RING

_MOST_CHANNELS = 256  # of a program
_TILE_TOKENS = 16


@jit
def _load_inputs(x_ptr, tokens, cols, inside, x_stride, channels, GATED: tl.constexpr):
    """The convolution's inputs [tokens, cols], zeros where not inside; with GATED the product of gate and x."""
    at = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]
    inputs = tl.load(at, mask=inside, other=0.0)
    if GATED:
        x = tl.load(at + 2 * channels, mask=inside, other=0.0)
        inputs = (inputs.to(tl.float32) * x.to(tl.float32)).to(inputs.dtype)
    return inputs


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _causal_conv_kernel(
    x_ptr,  # [num_tokens, channels], or [num_tokens, 3 * channels] with GATED; tokens x_stride apart
    weight_ptr,  # [channels, WIDTH] contiguous
    bias_ptr,  # [channels]; read with BIAS
    inputs_ptr,  # [num_states, RING, channels], states inputs_stride apart
    out_ptr,  # [num_tokens, channels] contiguous
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    x_stride,
    inputs_stride,
    places_stride,
    num_rows,
    channels,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # as in `short_conv_torch`
    WRITES: tl.constexpr,  # the inputs enter the ring; rows then have RING - WIDTH + 1 tokens at most
    RING: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # power of two, at least num_rows; 0 if a row is one tile
    TILE_TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    if NUM_ROWS:
        row, row_tile = find_row(q_starts_ptr, tl.program_id(0), num_rows, TILE_TOKENS, NUM_ROWS)
    else:
        row, row_tile = tl.program_id(0), 0
    first = tl.load(q_starts_ptr + row)
    count = tl.load(q_starts_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    own = tl.load(places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_col = cols < channels
    index = row_tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    used = index < count
    total = tl.zeros([TILE_TOKENS, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)[None, :]
    ring_ptr = inputs_ptr + own * inputs_stride + cols[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row_tile * TILE_TOKENS >= count:
        return
    for w in tl.static_range(WIDTH):
        at = index + (w - WIDTH + 1)
        inside = (used & (at >= 0))[:, None] & is_col[None, :]
        inputs = _load_inputs(x_ptr, first + at, cols, inside, x_stride, channels, GATED)
        if w < WIDTH - 1:  # a constant
            if row_tile == 0:
                earlier = (used & (at < 0) & (start + at >= 0))[:, None] & is_col[None, :]
                places = (start + at) & (RING - 1)
                known = tl.load(ring_ptr + places[:, None] * channels, mask=earlier, other=0.0)
                inputs = tl.where(earlier, known, inputs)
        tap = tl.load(weight_ptr + cols * WIDTH + w, mask=is_col, other=0.0).to(tl.float32)
        # An explicit fma: the same bits in tiles of all shapes.
        total = tl.fma(inputs.to(tl.float32), tl.broadcast_to(tap[None, :], total.shape), total)
    whole = used[:, None] & is_col[None, :]
    if WRITES:
        places = (start + index) & (RING - 1)
        tl.store(ring_ptr + places[:, None] * channels, inputs, mask=whole)
    tokens = (first + index).to(tl.int64)
    if GATED:
        gate_at = x_ptr + tokens[:, None] * x_stride + channels + cols[None, :]
        gate = tl.load(gate_at, mask=whole, other=0.0).to(tl.float32)
        out = gate * total.to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
        out = total / (1.0 + tl.exp(-total))
    tl.store(out_ptr + tokens[:, None] * channels + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=whole)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _keep_inputs_kernel(
    x_ptr,
    inputs_ptr,
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    x_stride,
    inputs_stride,
    places_stride,
    channels,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the last inputs of each row, and those before its snapshot, to the rings."""
    row = tl.program_id(0)
    first = tl.load(q_starts_ptr + row)
    count = tl.load(q_starts_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    place_ptr = places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride
    own, snapshot_end = tl.load(place_ptr).to(tl.int64), tl.load(place_ptr + 2)
    snapshot = tl.load(place_ptr + 3).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_col = (cols < channels)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    stop = start + count
    own_ptr = inputs_ptr + own * inputs_stride + cols[None, :]
    if (start < snapshot_end) & (snapshot_end <= stop):
        positions = snapshot_end - RING + tl.arange(0, RING)
        at, places = positions - start, ((positions & (RING - 1)) * channels)[:, None]
        inside = (at >= 0)[:, None] & is_col
        inputs = _load_inputs(x_ptr, first + at, cols, inside, x_stride, channels, GATED)
        earlier = ((at < 0) & (at > -WIDTH) & (positions >= 0))[:, None] & is_col
        inputs = tl.where(earlier, tl.load(own_ptr + places, mask=earlier, other=0.0), inputs)
        tl.store(inputs_ptr + snapshot * inputs_stride + cols[None, :] + places, inputs, mask=inside | earlier)
        tl.debug_barrier()  # the ring was read before it is written
    positions = stop - RING + tl.arange(0, RING)
    at, places = positions - start, ((positions & (RING - 1)) * channels)[:, None]
    inside = (at >= 0)[:, None] & is_col
    tl.store(own_ptr + places, _load_inputs(x_ptr, first + at, cols, inside, x_stride, channels, GATED), mask=inside)


def causal_conv_triton(
    x: torch.Tensor,  # [num_tokens, channels], any stride between tokens
    weight: torch.Tensor,  # [channels, width] contiguous
    bias: torch.Tensor | None,  # [channels]
    rows: StateRows,
    state: ConvState | DeltaState,
) -> torch.Tensor:
    """`causal_conv_torch` as one kernel, or as two if rows may be long."""
    return _launch(x, weight, bias, rows, state, gated=False)


def short_conv_triton(
    gates_and_x: torch.Tensor,  # [num_tokens, 3 * channels]: gate of the input, gate of the output, x
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: StateRows,
    state: ConvState,
) -> torch.Tensor:
    """`short_conv_torch`, likewise."""
    return _launch(gates_and_x, weight, bias, rows, state, gated=True)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: StateRows,
    state: ConvState | DeltaState,
    gated: bool,
) -> torch.Tensor:
    channels, width = weight.shape
    out = torch.empty((x.shape[0], channels), dtype=x.dtype, device=x.device)
    if not len(out):
        return out
    short = rows.steps_only and rows.max_count <= RING - width + 1  # no row takes a snapshot, either
    tile = next_power_of_2(rows.max_count) if short else _TILE_TOKENS
    places = rows.num_rows if short else rows.num_tokens // tile + rows.num_rows
    block, pdl = min(next_power_of_2(channels), _MOST_CHANNELS), use_pdl(x)
    blocks, arrays = -(-channels // block), (rows.slots, rows.starts, rows.q_starts, rows.places)
    strides = x.stride(0), state.inputs.stride(0), rows.places.stride(0)
    options = {"WIDTH": width, "GATED": gated, "RING": RING, "BLOCK_C": block, "PDL": pdl, "num_warps": 4}
    _causal_conv_kernel[(places, blocks)](
        x, weight, weight if bias is None else bias, state.inputs, out, *arrays, *strides, rows.num_rows, channels,
        BIAS=bias is not None, WRITES=short, NUM_ROWS=0 if short else rows_searched(rows.num_rows), TILE_TOKENS=tile,
        **options, launch_pdl=pdl,
    )  # fmt: skip
    if not short:
        _keep_inputs_kernel[(rows.num_rows, blocks)](
            x, state.inputs, *arrays, *strides, channels, **options, launch_pdl=pdl
        )
    return out
