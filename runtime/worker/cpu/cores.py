"""The number of CPU cores that this process may use: its affinity, within its control groups' quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores(root: Path = _ROOT, own: Path = _OWN) -> int:
    """At least 1. A quota of 1.5 cores counts as 2: threads that wait in turn lose less than an idle half core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in _quotas(root, own) if quota]
    return max(1, min(cores, *map(math.ceil, quotas)) if quotas else cores)


def _quotas(root: Path, own: Path) -> list[float]:
    """The quotas, in cores, of this process's control groups and the groups around them."""
    quotas = []
    for line in _text(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        group = base / name.lstrip("/")
        for folder in (group, *group.parents):
            quotas.append(_quota(folder))
            if folder == base:
                break
    return quotas


def _quota(folder: Path) -> float:
    """The quota of a group in cores, version 2 or 1; 0 without one."""
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        return max(0.0, int(limit) / int(period))
    except (ValueError, ZeroDivisionError):
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
