"""Causal depthwise convolutions over a request's tokens, on a GPU.

A program takes a tile of a row's tokens and a channel block. Earlier inputs come from the row's own tokens, and in
its first tile from the ring. A short row also writes the ring, because its tokens have other places in the ring than
the inputs that it reads. Behind longer rows, a second kernel does.
"""

from __future__ import annotations

import torch

from runtime.base.kv_cache_spec import RING
from runtime.kernels.attention.paged_attention import find_row, rows_searched
from runtime.kernels.step.state_rows import ConvState, DeltaState, StateRows
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_CHANNELS = 512  # channels per program
_TILE_TOKENS = 8
_WARPS = 2
_KEPT_CHANNELS = 256  # channels per program that writes the ring


@jit
def _load_inputs(at, inside, channels, GATED: tl.constexpr):
    """The convolution's inputs, zeros where not inside; with GATED the product of gate and x."""
    inputs = tl.load(at, mask=inside, other=0.0)
    if GATED:
        x = tl.load(at + 2 * channels, mask=inside, other=0.0)
        inputs = (inputs.to(tl.float32) * x.to(tl.float32)).to(inputs.dtype)
    return inputs


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _causal_conv_kernel(
    x_ptr,  # [num_tokens, channels], or [num_tokens, 3 * channels] with GATED; tokens x_stride apart
    weight_ptr,  # [channels, WIDTH], channels and taps channel_stride and tap_stride apart
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
    channels,
    channel_stride,
    tap_stride,
    num_rows,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,  # see `short_conv_torch`
    WRITES: tl.constexpr,  # the inputs enter the ring; rows then have RING - WIDTH + 1 tokens at most
    RING: tl.constexpr,
    NUM_ROWS: tl.constexpr,  # power of two, at least num_rows; 0 if a row is one tile
    TILE_TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    BEFORE: tl.constexpr = WIDTH - 1
    if NUM_ROWS:
        row, row_tile = find_row(q_starts_ptr, tl.program_id(0), num_rows, TILE_TOKENS, NUM_ROWS)
    else:
        row, row_tile = tl.program_id(0), 0
    first = tl.load(q_starts_ptr + row)
    count = tl.load(q_starts_ptr + row + 1) - first - row_tile * TILE_TOKENS
    first += row_tile * TILE_TOKENS
    start = tl.load(starts_ptr + row) + row_tile * TILE_TOKENS  # position of the tile's first token
    own = tl.load(places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_col = cols < channels
    bias = tl.zeros([BLOCK_C], tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(WIDTH):
        at_tap = weight_ptr + cols * channel_stride + w * tap_stride
        taps += (tl.load(at_tap, mask=is_col, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    ring_ptr = inputs_ptr + own * inputs_stride + cols
    if PDL and WRITES:  # first: the kernel that follows may request its weights, or states
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and (not WRITES):
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    at_x = x_ptr + first.to(tl.int64) * x_stride + cols
    known = ()  # all loads are in flight together
    for i in tl.static_range(BEFORE + TILE_TOKENS):
        if i < BEFORE:
            if row_tile == 0:
                position = start + (i - BEFORE)
                at = ring_ptr + (position & (RING - 1)) * channels
                inputs = tl.load(at, mask=is_col & (cols < tl.where(position < 0, 0, channels)), other=0.0)
            else:
                inputs = _load_inputs(at_x + (i - BEFORE) * x_stride, is_col, channels, GATED)
        else:
            inside = cols < tl.where(i - BEFORE < count, channels, 0)
            inputs = _load_inputs(at_x + (i - BEFORE) * x_stride, inside, channels, GATED)
        known += (inputs,)  # type: ignore[assignment]
    at_out = out_ptr + first.to(tl.int64) * channels + cols
    for i in tl.static_range(TILE_TOKENS):
        total = bias
        for w in tl.static_range(WIDTH):
            total = tl.fma(known[i + w].to(tl.float32), taps[w], total)  # explicit: the same bits in all tiles
        inside = cols < tl.where(i < count, channels, 0)
        if GATED:
            gate = tl.load(at_x + i * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
            out = gate * total.to(out_ptr.dtype.element_ty).to(tl.float32)
        else:
            out = total / (1.0 + tl.exp(-total))
        tl.store(at_out + i * channels, out.to(out_ptr.dtype.element_ty), mask=inside)
        if WRITES:
            tl.store(ring_ptr + ((start + i) & (RING - 1)) * channels, known[i + BEFORE], mask=inside)


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
    x_ptr += first.to(tl.int64) * x_stride + cols[None, :]
    if (start < snapshot_end) & (snapshot_end <= stop):
        positions = snapshot_end - RING + tl.arange(0, RING)
        at, places = positions - start, ((positions & (RING - 1)) * channels)[:, None]
        inside = (at >= 0)[:, None] & is_col
        inputs = _load_inputs(x_ptr + at.to(tl.int64)[:, None] * x_stride, inside, channels, GATED)
        earlier = ((at < 0) & (at > -WIDTH) & (positions >= 0))[:, None] & is_col
        inputs = tl.where(earlier, tl.load(own_ptr + places, mask=earlier, other=0.0), inputs)
        tl.store(inputs_ptr + snapshot * inputs_stride + cols[None, :] + places, inputs, mask=inside | earlier)
        tl.debug_barrier()  # the ring was read before it is written
    positions = stop - RING + tl.arange(0, RING)
    at, places = positions - start, ((positions & (RING - 1)) * channels)[:, None]
    inside = (at >= 0)[:, None] & is_col
    inputs = _load_inputs(x_ptr + at.to(tl.int64)[:, None] * x_stride, inside, channels, GATED)
    tl.store(own_ptr + places, inputs, mask=inside)


def causal_conv_triton(
    x: torch.Tensor,  # [num_tokens, channels], any stride between tokens
    weight: torch.Tensor,  # [channels, width], in any order; by taps is fastest
    bias: torch.Tensor | None,  # [channels]
    rows: StateRows,
    state: ConvState | DeltaState,
) -> torch.Tensor:
    """`causal_conv_torch` as one kernel, or as two if rows may be long."""
    return _launch(x, weight, bias, rows, state, gated=False)


def short_conv_triton(
    gates_and_x: torch.Tensor,  # [num_tokens, 3 * channels]: input gate, output gate, x
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
    block, pdl = min(next_power_of_2(channels), _CHANNELS), use_pdl(x)
    arrays = (rows.slots, rows.starts, rows.q_starts, rows.places)
    strides = x.stride(0), state.inputs.stride(0), rows.places.stride(0)
    options = {"WIDTH": width, "GATED": gated, "RING": RING, "PDL": pdl, "launch_pdl": pdl}
    _causal_conv_kernel[(places, -(-channels // block))](
        x, weight, weight if bias is None else bias, state.inputs, out, *arrays, *strides, channels, *weight.stride(),
        rows.num_rows, BIAS=bias is not None, WRITES=short, NUM_ROWS=0 if short else rows_searched(rows.num_rows),
        TILE_TOKENS=tile, BLOCK_C=block, num_warps=_WARPS, **options,
    )  # fmt: skip
    if not short:
        block = min(block, _KEPT_CHANNELS)
        _keep_inputs_kernel[(rows.num_rows, -(-channels // block))](
            x, state.inputs, *arrays, *strides, channels, BLOCK_C=block, num_warps=4, **options
        )
    return out
