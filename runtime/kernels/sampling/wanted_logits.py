"""A captured step's rows that need all ranks' logits, because each rank's one key cannot decide them.

All ranks have the same parameters and positions, and therefore find the same rows."""

from __future__ import annotations

import torch

from runtime.kernels.sampling.sample import (
    COLUMNS,
    MIN_P,
    PENALISED_FROM,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from runtime.kernels.sampling.token_keys import is_filtered, is_penalised
from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl


def wanted_logits_torch(
    slots: torch.Tensor,  # [n] int32
    positions: torch.Tensor,  # [n] int32, positions to be sampled
    params: torch.Tensor,  # [num_slots + 1, NUM_PARAMS] int32
) -> torch.Tensor:
    """[n] int32: 1 for rows with filters, or with penalties that the captured pass applies, else 0."""
    own = params.index_select(0, slots)
    floats, first = own.view(torch.float32), own[:, PENALISED_FROM]
    has_filter = (own[:, TOP_K] > 0) | (floats[:, TOP_P] < 1.0) | (floats[:, MIN_P] > 0.0)
    return (has_filter & (floats[:, TEMPERATURE] > 0) | (first > 0) & (positions >= first)).int()


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _wanted_logits_kernel(
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    wanted_ptr,  # [n] int32
    state_stride,
    AT: tl.constexpr,  # `Columns`
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
    filtered = is_filtered(params, AT)
    position = tl.load(positions_ptr + row)
    penalised = is_penalised(params, position, AT, False)
    if PDL:  # the step's head wrote rows and parameters
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(wanted_ptr + row, (filtered | penalised).to(tl.int32))


def wanted_logits_triton(slots: torch.Tensor, positions: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """`wanted_logits_torch` as one kernel; rows of parameters may be strided."""
    wanted, pdl = torch.empty_like(slots), use_pdl(slots)
    if len(slots):
        _wanted_logits_kernel[(len(slots),)](
            slots, positions, params, wanted, params.stride(0), COLUMNS, pdl, num_warps=1, launch_pdl=pdl
        )
    return wanted
