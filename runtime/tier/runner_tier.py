"""The tier of a runner: the region that its settings and its cache's layout name, and the copier for its device."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model_info import TierInfo
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.tier.copies import CpuCopier, TierCopier
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.region import Region
from runtime.worker.extras import RunnerParts
from runtime.worker.memory import has_tier, planned_cache, tier_slot_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MOST_BY_DEFAULT = 64 * _GIB


def tier_of(parts: RunnerParts) -> TierCopier | None:
    """A runner's copier, with its region open; None without a tier.

    Raises CallboardError if there is too little memory for a tier of the requested size. A default tier is left out."""
    config, spec, numerics = parts.config, parts.decoder.spec, parts.decoder.numerics
    if parts.is_draft or not has_tier(config):
        return None
    info = tier_info(config, planned_cache(config, spec, numerics), spec.shard, numerics)
    try:
        return open_tier(info, spec.shard.rank, numerics)
    except CallboardError as e:
        if getattr(config, "kv_tier_memory", None) is not None:
            raise
        logger.warning("no KV tier: %s", e)
        return None


def open_tier(info: TierInfo, rank: int, numerics: Numerics) -> TierCopier:
    """Open the region, and return a rank's copier. An open region keeps its size."""
    region = Region.open(Path(info.folder), info.layout, info.num_slots, info.slot_bytes, info.num_ranks)
    info = replace(info, num_slots=region.num_slots)
    if numerics.backend == "triton":
        return GpuCopier(region, info, rank, numerics.device)
    return CpuCopier(region, info, rank)


def tier_info(config: EngineConfig, cache: KVCacheSpec, shard: Shard, numerics: Numerics) -> TierInfo:
    """The tier of a rank's cache. All ranks have the same."""
    base = Path(getattr(config, "kv_tier_folder", None) or f"/dev/shm/callboard-{os.getuid()}")
    slot_bytes = tier_slot_bytes(cache, config.block_size)
    layout = f"{cache}, {config.block_size} tokens, rank of {shard.size}"
    digest = hashlib.sha256(layout.encode()).hexdigest()[:16]
    asked = getattr(config, "kv_tier_memory", None)
    num_bytes = _default_bytes(base) if asked is None else int(asked * _GIB)
    return TierInfo(
        folder=str(base / f"{getattr(config, 'kv_tier_name', None)}-{digest}"),
        layout=layout,
        slot_bytes=slot_bytes,
        num_slots=num_bytes // (slot_bytes * shard.size),
        num_ranks=shard.size,
        state_slots=0 if cache.states is None else -(-cache.states.bytes_per_state // slot_bytes),
        environment=environment(numerics),
        host=socket.gethostname(),
    )


def _default_bytes(base: Path) -> int:
    """An eighth of the machine's memory, and at most half the file system."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    place = next(folder for folder in (base, *base.parents) if folder.exists())
    system = os.statvfs(place)
    return min(_MOST_BY_DEFAULT, memory // 8, system.f_blocks * system.f_frsize // 2)


def environment(numerics: Numerics) -> bytes:
    """Digest of what may change bits and is not in a model's fingerprint."""
    device = numerics.device
    if device.type == "cuda":
        machine: tuple[object, ...] = (torch.cuda.get_device_name(device), torch.version.cuda)
    else:
        machine = _processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    facts = version("callboard"), torch.__version__, numerics.backend, *machine
    return hashlib.sha256(repr(facts).encode()).digest()[:16]


def _processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
