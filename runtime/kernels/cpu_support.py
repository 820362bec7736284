"""Whether this machine can compile and run the CPU kernels. This module does not import llvmlite."""

from __future__ import annotations

import importlib.util
import platform

import torch


def obstacle() -> str:
    """Why this machine cannot run the CPU kernels; empty if it can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    if importlib.util.find_spec("runtime.kernels.cpu") is None:
        return "runtime/kernels/cpu is not installed"
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if is_x86 and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "this CPU has no AVX2"
    return ""
