"""Facts on this machine and the installed libraries that figures depend on."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimddp", "i8mm")
_PACKAGES = ("xllamacpp", "torch", "llvmlite")


def cpu() -> tuple[str, list[str]]:
    """The CPU's name, and its flags that kernels use."""
    path = Path("/proc/cpuinfo")
    return cpu_of(path.read_text() if path.exists() else "")


def cpu_of(info: str) -> tuple[str, list[str]]:
    """The same from the text of /proc/cpuinfo."""
    name = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    found = set(flags[1].split()) if flags else set()
    return name[1] if name else "unknown", [flag for flag in _FLAGS if flag in found]


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment_of(isa: str) -> dict[str, str]:
    """The variables that limit Callboard's processes to an instruction set.

    CALLBOARD_CPU_ISA limits its own kernels. The others limit ATen, oneDNN and MKL."""
    if isa == "native":
        return {}
    return {
        "CALLBOARD_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": isa, "ONEDNN_MAX_CPU_ISA": isa.upper(),
        "MKL_ENABLE_INSTRUCTIONS": isa.upper(),
    }  # fmt: skip
