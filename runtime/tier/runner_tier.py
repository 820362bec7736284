"""The tier of a runner: the region for its settings and its cache's layout, and the copier for its device."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model_info import TierInfo
from runtime.kernels.numerics import Numerics
from runtime.tier.copies import CpuCopier, TierCopier
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.place import host, open_region
from runtime.tier.region import Region
from runtime.worker.extras import RunnerParts
from runtime.worker.memory import available_memory, has_tier, planned_cache, tier_slot_bytes


def tier_of(parts: RunnerParts) -> TierCopier | None:
    """A runner's copier, with its region open; None without a tier."""
    config, spec, numerics = parts.config, parts.decoder.spec, parts.decoder.numerics
    if parts.is_draft or not has_tier(config):
        return None
    cache, (rank, size) = planned_cache(config, spec, numerics), spec.shard
    layout = f"{cache}, {config.block_size} tokens, {size} ranks"
    sizes = tier_slot_bytes(cache, config.block_size), size, available_memory(torch.device("cpu"))
    region = open_region(config, numerics.device.type, layout, *sizes)
    return None if region is None else copier_of(region, cache, layout, rank, numerics)


def copier_of(region: Region, cache: KVCacheSpec, layout: str, rank: int, numerics: Numerics) -> TierCopier:
    """A rank's copier for an open region."""
    info = TierInfo(
        folder=str(region.folder),
        layout=layout,
        slot_bytes=region.slot_bytes,
        num_slots=region.num_slots,
        num_ranks=region.num_ranks,
        state_slots=0 if cache.states is None else -(-cache.states.bytes_per_state // region.slot_bytes),
        environment=environment(numerics),
        host=host(),
    )
    if numerics.backend == "triton":
        return GpuCopier(region, info, rank, numerics.device)
    return CpuCopier(region, info, rank)


def environment(numerics: Numerics) -> bytes:
    """A digest of the facts that may change bits and are not in a model's fingerprint."""
    facts: list[object] = [version("callboard"), torch.__version__, numerics.backend]
    if numerics.device.type == "cuda":
        facts += [torch.cuda.get_device_name(numerics.device), torch.version.cuda]
    else:
        facts += [_processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return hashlib.sha256(repr(facts).encode()).digest()[:16]


def _processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
