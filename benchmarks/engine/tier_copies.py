"""Copies between a model's KV cache and a tier, without the model.

    python -m benchmarks.engine.tier_copies --model llama-3.1-8b --gib 8

The cache has a published shape's layout and random bytes. A plan stores all blocks, and another one loads them. On a
GPU this is measured by threads, while no slot is pinned, and again once all slots are pinned. In between the region is
opened again, as after a restart, and a load begins when the runner is ready. The region is new, in /dev/shm. It is
deleted at the end.

    | figure | what |
    | --- | --- |
    | pin_s | seconds from ready until all slots are pinned, with that load; half of them have memory before |
    | first_gb_s, first_pinned | that load; the slots that are pinned at its end |
    | store_gb_s, load_gb_s | bytes over the time from the plan's start to its last transfer's end |
    | store_host_ms, load_host_ms | the step thread's part of that time |
    | step_store_host_us | the step thread's part of a store of 256 blocks, or of all if there are fewer |
    | equal | loaded bits equal the stored ones |
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.library.measure import Results, engine_config, new_parser
from benchmarks.library.models import spec_of
from runtime.core.plan import StepPlan, StepResult, Transfers
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.region import Region
from runtime.tier.runner_tier import copier_of
from runtime.worker.kv_cache import KVCache
from runtime.worker.memory import planned_cache, tier_slot_bytes
from runtime.worker.runner import choose_numerics

_GIB, _STAGING_BYTES = 1 << 30, 128 << 20
_FIRST_SEED, _STEP_SEED = 1000, 2000  # seeds that `figures` does not use


class Copied:
    """A cache, a region with room for all its blocks, and the copier between both."""

    def __init__(self, folder: Path, model: str, settings: list[str], num_bytes: int) -> None:
        config = engine_config(settings)
        numerics, spec = choose_numerics(config), spec_of(model)
        cache, size = planned_cache(config, spec, numerics), config.block_size
        slot_bytes = tier_slot_bytes(cache, size)
        self.num_blocks = num_bytes // slot_bytes
        self.region = Region.open(folder / "tier", repr(cache), 2 * self.num_blocks + 256, slot_bytes, 1)
        self.cache = KVCache(cache, self.num_blocks + 1, size, numerics.device)
        self.copier = copier_of(self.region, cache, repr(cache), 0, numerics)
        self.num_bytes = self.num_blocks * 8 * sum(runs.size for runs in self.cache.runs(0))
        for runs in self.cache.runs(0):
            runs.words.random_()
        self.copier.open(self.cache, _STAGING_BYTES, [b""], lambda: None)

    def run(self, seed: int, is_store: bool, count: int | None = None) -> tuple[float, float, int]:
        """Store or load `count` blocks, or all. Returns the seconds, the step thread's part, and the good transfers."""
        random, count = np.random.default_rng(seed), self.num_blocks if count is None else count
        numbers, keys = np.arange(count, dtype=np.int32), random.bytes(16 * count)
        blocks = random.permutation(numbers) + 1
        transfers = Transfers(numbers, 0 * numbers, blocks, 0 * numbers, keys)
        if is_store:
            self.region.reserve(keys, seed)
        stores, loads = (transfers, None) if is_store else (None, transfers)
        result, ended, good, start = StepResult(0, numbers[:0]), 0, 0, time.perf_counter()
        with torch.inference_mode():
            self.copier.start(StepPlan(0, stores=stores, loads=loads))
        host = time.perf_counter() - start
        while ended < count:
            self.copier.report(result, wait=True)
            good += len(result.stored) + len(result.loaded)
            ended += len(result.stored) + len(result.loaded) + len(result.damaged)
            result = StepResult(0, numbers[:0])
        return time.perf_counter() - start, host, good

    def figures(self, repeats: int) -> dict[str, float | bool]:
        before = [runs.words.clone() for runs in self.cache.runs(0)]
        stores, loads, good = list[tuple[float, float]](), list[tuple[float, float]](), 0
        for seed in range(repeats + 1):  # the first one touches the region's memory
            stores.append(self.run(seed, is_store=True)[:2])
            seconds, host_s, num_loaded = self.run(seed, is_store=False)
            loads.append((seconds, host_s))
            good += num_loaded
            self.region.drop(np.random.default_rng(seed).bytes(16 * self.num_blocks))
        count, hosts = min(256, self.num_blocks), list[float]()
        for seed in range(_STEP_SEED, _STEP_SEED + repeats):
            hosts.append(self.run(seed, is_store=True, count=count)[1])
            self.region.drop(np.random.default_rng(seed).bytes(16 * count))
        found: dict[str, float | bool] = {"loaded": good / (self.num_blocks * (repeats + 1))}
        found["step_store_host_us"] = median(hosts) * 1e6
        for name, timed in (("store", stores[1:]), ("load", loads[1:])):
            found[f"{name}_gb_s"] = self.num_bytes / median(whole for whole, _ in timed) / 1e9
            found[f"{name}_host_ms"] = median(host for _, host in timed) * 1e3
        after = [runs.words for runs in self.cache.runs(0)]
        return found | {"equal": all(torch.equal(a, b) for a, b in zip(before, after, strict=True))}


def _pin(copied: Copied) -> dict[str, float]:
    """Pin all slots, and load all blocks meanwhile."""
    assert isinstance(copied.copier, GpuCopier)
    pinned, start = copied.copier.pinned, time.perf_counter()
    copied.copier.ready()
    seconds, _, good = copied.run(_FIRST_SEED, is_store=False)
    assert good == copied.num_blocks, "a block is damaged"
    found = {"first_gb_s": copied.num_bytes / seconds / 1e9, "first_pinned": float(pinned.num_slots)}
    while pinned.is_pinning:
        time.sleep(0.01)
    assert pinned.is_whole, "the log has the reason"
    return found | {"pin_s": time.perf_counter() - start}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the cache; the region is twice as large")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results, folder = Results("tier_copies", args.out), Path(tempfile.mkdtemp(dir="/dev/shm"))
    config = engine_config(args.set)
    try:
        copied = Copied(folder, args.model, args.set, int(args.gib * _GIB))
        facts: dict[str, Any] = {"model": args.model, "slot_bytes": copied.region.slot_bytes, "gib": args.gib}
        if isinstance(copied.copier, GpuCopier) and not copied.copier.pinned.is_whole:
            results.add(config, **facts, line="threads", **copied.figures(1))
            copied.run(_FIRST_SEED, is_store=True)
            copied.copier.close()
            copied = Copied(folder, args.model, args.set, int(args.gib * _GIB))
            facts |= _pin(copied)
        results.add(config, **facts, line="copies", **copied.figures(args.repeats))
        copied.copier.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
