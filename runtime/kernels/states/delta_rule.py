"""The gated delta rule on a GPU: the kernels of a step, in order."""

from __future__ import annotations

import torch

from runtime.kernels.states.delta_chunks import launch_chunks
from runtime.kernels.states.delta_steps import launch_steps
from runtime.kernels.step.state_rows import DeltaForm, DeltaState, StateRows


def delta_rule_triton(
    qkv: torch.Tensor,
    z: torch.Tensor,
    gates: torch.Tensor,
    form: DeltaForm,
    rows: StateRows,
    state: DeltaState,
) -> torch.Tensor:
    """`delta_rule_torch`; qkv, z and gates may have any stride between tokens.

    The grids depend only on the rows' ints, so a captured launch follows the rows on the device."""
    value_heads, value_dim = state.state.shape[1], state.state.shape[3]
    out = torch.empty((len(qkv), value_heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    if len(out):
        arguments = qkv, z, gates, form, rows, state, out
        if not rows.steps_only:
            launch_chunks(*arguments)  # first: a row's steps follow its prompt
        launch_steps(*arguments)
    return out
