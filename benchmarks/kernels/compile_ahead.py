"""Compilation for a Hopper card in processes without one: launches over tensors without data fill the compile cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from runtime.kernels import triton_language


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches within compile their kernels alone. The process must not launch on a GPU afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    driver.set_active(hopper)
    triton_language._has_pdl = lambda device: True
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: launch(
        self, *args, grid=grid, warmup=True, **options
    )
    try:
        yield
    finally:
        JITFunction.run = launch
