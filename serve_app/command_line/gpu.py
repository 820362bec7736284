"""Find out within milliseconds that torch can use no GPU here, without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path


def missing_gpu() -> str | None:
    """Return the reason why torch can use no GPU here, as a part of a sentence; None if there may be one.

    The driver's management library counts the GPUs: a process must not fork after it has called the driver itself."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    if _torch_has_no_cuda():
        return "torch is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no GPU that torch can use"
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # some machines have a driver without it
        return None
    count = ctypes.c_uint(1)
    if library.nvmlInit_v2() == 0:
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        library.nvmlShutdown()
    return None if count.value else "this machine has no GPU that torch can use"


def _torch_has_no_cuda() -> bool:
    """Read this from torch's version file: importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return False
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) is not None for name in ("cuda", "hip"))
