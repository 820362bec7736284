"""Triton's names for kernels. Without Triton, kernels can be imported, but not launched."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

try:
    import triton.language as tl
    from triton import jit, knobs, next_power_of_2
    from triton.tools.tensor_descriptor import TensorDescriptor

    constexpr = tl.constexpr  # for module constants that kernels use

    INTERPRETED = bool(knobs.runtime.interpret)  # kernels run in numpy, on a CPU
    # Bits depend on it. Later versions of Triton have another default; a kernel may set `enable_fp_fusion` itself.
    knobs.language.default_fp_fusion = True
except ImportError:
    tl = TensorDescriptor = None
    INTERPRETED = False

    def constexpr(value: Any) -> Any:
        return value

    def jit(fn: Any = None, **options: Any) -> Any:
        return fn or jit

    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


# Arrays with one number a row. They are views into packed buffers, and another offset must not compile a kernel again.
ROW_ARRAYS = [
    "slots_ptr",
    "places_ptr",
    "starts_ptr",
    "own_counts_ptr",
    "adapters_ptr",
    "q_starts_ptr",
    "positions_ptr",
    "kv_index_ptr",
    "rows_ptr",
    "token_ids_ptr",
    "wanted_ptr",
]

__all__ = ["INTERPRETED", "ROW_ARRAYS", "TensorDescriptor", "constexpr", "jit", "next_power_of_2", "tl", "use_pdl"]


def use_pdl(tensor: torch.Tensor) -> bool:
    """True if kernels on the tensor's device use programmatic dependent launch (Hopper and later).

    The rule for a kernel launched with `PDL=use_pdl(x), launch_pdl=use_pdl(x)`: every program runs

        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    in this order, exactly once, before any early return, any write, and any read of what earlier kernels of the step
    wrote. Load tensors that no kernel in a step writes (weights, tables) before the wait. When a kernel passes its
    wait, its predecessor is complete. That kernel waited, too, so everything before it is complete as well. Programs
    without work may end before, if another program of the launch always waits, as in decode attention.

    Norms, linear layers for few rows, dense experts for few choices, decode convolutions and sums over ranks call
    gdc_launch_dependents first. A decode step is a chain of such kernels; a kernel then requests its weights while two
    kernels before it still run. A kernel after another kind may rely on more before its wait: all kernels but its
    immediate predecessor are complete when it starts."""
    return not INTERPRETED and _has_pdl(tensor.device)


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
