"""A pytest plugin (`-p tests.support.models.intel_mkl`): MKL takes this CPU for one of Intel's.

On other CPUs MKL has only its oldest kernels, and MKL_ENABLE_INSTRUCTIONS does nothing. Tests on such a CPU would miss
the behaviour of MKL on most others. To be loaded before torch multiplies anything."""

import ctypes
import mmap
from pathlib import Path

import torch

_RETURN_1 = b"\xb8\x01\x00\x00\x00\xc3"  # mov eax, 1; ret
_READ, _WRITE, _EXECUTE = 1, 2, 4


def pretend() -> None:
    """Replace the function by which MKL checks the CPU's maker."""
    asked = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).mkl_serv_intel_cpu_true
    address = ctypes.cast(asked, ctypes.c_void_p).value
    pages = ctypes.c_void_p(address & -mmap.PAGESIZE), ctypes.c_size_t(2 * mmap.PAGESIZE)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    assert not mprotect(*pages, _READ | _WRITE | _EXECUTE), ctypes.get_errno()
    ctypes.memmove(address, _RETURN_1, len(_RETURN_1))
    mprotect(*pages, _READ | _EXECUTE)


pretend()
