"""Causal depthwise convolutions over a request's tokens, on a GPU.

A program takes a tile of a row's tokens and a channel block. Earlier inputs come from the row's own tokens, and in
its first tile from the ring. A short row also writes the ring, because its tokens have other places in the ring than
the inputs that it reads. Behind longer rows, a second kernel does.
"""

from __future__ import annotations

from typing import NamedTuple

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


class ConvForm(NamedTuple):
    """Constants of `_causal_conv_kernel` and `_keep_inputs_kernel`."""

    width: int
    bias: bool
    gated: bool  # see `short_conv_torch`
    writes: bool  # the inputs enter the ring; rows then have RING - WIDTH + 1 tokens at most
    ring: int
    num_rows: int  # power of two, at least num_rows; 0 if a row is one tile
    tile_tokens: int
    block_c: int
    pdl: bool


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
    FORM: tl.constexpr,  # `ConvForm`
):
    BEFORE: tl.constexpr = FORM.width - 1
    if FORM.num_rows:
        row, row_tile = find_row(q_starts_ptr, tl.program_id(0), num_rows, FORM.tile_tokens, FORM.num_rows)
    else:
        row, row_tile = tl.program_id(0), 0
    first = tl.load(q_starts_ptr + row)
    count = tl.load(q_starts_ptr + row + 1) - first - row_tile * FORM.tile_tokens
    first += row_tile * FORM.tile_tokens
    start = tl.load(starts_ptr + row) + row_tile * FORM.tile_tokens  # position of the tile's first token
    own = tl.load(places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride).to(tl.int64)
    cols = tl.program_id(1) * FORM.block_c + tl.arange(0, FORM.block_c)
    is_col = cols < channels
    bias = tl.full([FORM.block_c], 0, tl.float32)
    if FORM.bias:
        bias += tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(tl.constexpr(FORM.width)):
        at_tap = weight_ptr + cols * channel_stride + w * tap_stride
        taps += (tl.load(at_tap, mask=is_col, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    ring_ptr = inputs_ptr + own * inputs_stride + cols
    if FORM.pdl and FORM.writes:  # first: the kernel that follows may request its weights, or states
        tl.extra.cuda.gdc_launch_dependents()
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    if FORM.pdl and (not FORM.writes):
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    at_x = x_ptr + first.to(tl.int64) * x_stride + cols
    known = ()  # all loads are in flight together
    for i in tl.static_range(BEFORE + FORM.tile_tokens):
        if i < BEFORE:
            if row_tile == 0:
                position = start + (i - BEFORE)
                at = ring_ptr + (position & (FORM.ring - 1)) * channels
                inputs = tl.load(at, mask=is_col & (cols < tl.where(position < 0, 0, channels)), other=0.0)
            else:
                inputs = _load_inputs(at_x + (i - BEFORE) * x_stride, is_col, channels, FORM.gated)
        else:
            inside = cols < tl.where(i - BEFORE < count, channels, 0)
            inputs = _load_inputs(at_x + (i - BEFORE) * x_stride, inside, channels, FORM.gated)
        known += (inputs,)  # type: ignore[assignment]
    at_out = out_ptr + first.to(tl.int64) * channels + cols
    for i in tl.static_range(tl.constexpr(FORM.tile_tokens)):
        total = bias
        for w in tl.static_range(tl.constexpr(FORM.width)):
            total = tl.fma(known[i + w].to(tl.float32), taps[w], total)  # explicit: the same bits in all tiles
        inside = cols < tl.where(i < count, channels, 0)
        if FORM.gated:
            gate = tl.load(at_x + i * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
            out = gate * total.to(out_ptr.dtype.element_ty).to(tl.float32)
        else:
            out = total / (1.0 + tl.exp(-total))
        tl.store(at_out + i * channels, out.to(out_ptr.dtype.element_ty), mask=inside)
        if FORM.writes:
            tl.store(ring_ptr + ((start + i) & (FORM.ring - 1)) * channels, known[i + BEFORE], mask=inside)


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
    FORM: tl.constexpr,  # `ConvForm`
):
    """Write the last inputs of each row, and those before its snapshot, to the rings."""
    row = tl.program_id(0)
    first = tl.load(q_starts_ptr + row)
    count = tl.load(q_starts_ptr + row + 1) - first
    start = tl.load(starts_ptr + row)
    place_ptr = places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride
    own, snapshot_end = tl.load(place_ptr).to(tl.int64), tl.load(place_ptr + 2)
    snapshot = tl.load(place_ptr + 3).to(tl.int64)
    cols = tl.program_id(1) * FORM.block_c + tl.arange(0, FORM.block_c)
    is_col = (cols < channels)[None, :]
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    stop = start + count
    own_ptr = inputs_ptr + own * inputs_stride + cols[None, :]
    x_ptr += first.to(tl.int64) * x_stride + cols[None, :]
    if (start < snapshot_end) & (snapshot_end <= stop):
        positions = snapshot_end - FORM.ring + tl.arange(0, FORM.ring)
        at, places = positions - start, ((positions & (FORM.ring - 1)) * channels)[:, None]
        inside = (at >= 0)[:, None] & is_col
        inputs = _load_inputs(x_ptr + at.to(tl.int64)[:, None] * x_stride, inside, channels, FORM.gated)
        earlier = ((at < 0) & (at > -FORM.width) & (positions >= 0))[:, None] & is_col
        inputs = tl.where(earlier, tl.load(own_ptr + places, mask=earlier, other=0.0), inputs)
        tl.store(inputs_ptr + snapshot * inputs_stride + cols[None, :] + places, inputs, mask=inside | earlier)
        tl.debug_barrier()  # the ring was read before it is written
    positions = stop - FORM.ring + tl.arange(0, FORM.ring)
    at, places = positions - start, ((positions & (FORM.ring - 1)) * channels)[:, None]
    inside = (at >= 0)[:, None] & is_col
    inputs = _load_inputs(x_ptr + at.to(tl.int64)[:, None] * x_stride, inside, channels, FORM.gated)
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
    num_rows = 0 if short else rows_searched(rows.num_rows)
    form = ConvForm(width, bias is not None, gated, short, RING, num_rows, tile, block, pdl)
    _causal_conv_kernel[(places, -(-channels // block))](
        x, weight, weight if bias is None else bias, state.inputs, out, *arrays, *strides, channels, *weight.stride(),
        rows.num_rows, form, num_warps=_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    if not short:
        block = min(block, _KEPT_CHANNELS)
        _keep_inputs_kernel[(rows.num_rows, -(-channels // block))](
            x, state.inputs, *arrays, *strides, channels, form._replace(block_c=block), num_warps=4, launch_pdl=pdl
        )
    return out
