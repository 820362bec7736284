"""Copies between a model's KV cache and a tier, without the model.

    python -m benchmarks.engine.tier_copies --model llama-3.1-8b --gib 8

The cache has a published shape's layout and random bytes. A plan stores all blocks, and another one loads them. On a
GPU this is measured by threads, while no slot is pinned, and again once all slots are pinned. The region is new, in
/dev/shm, and deleted at the end.

    | figure | what |
    | --- | --- |
    | pin_s | seconds until all slots are pinned; half of the region has its memory before |
    | store_gb_s, load_gb_s | bytes over the time from the plan's start to its last transfer's end |
    | store_host_ms, load_host_ms | the step thread's part of that time |
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

    def run(self, seed: int, is_store: bool) -> tuple[float, float, int]:
        """Store or load all blocks. Returns the seconds, the step thread's part, and the number of good transfers."""
        random = np.random.default_rng(seed)
        numbers, keys = np.arange(self.num_blocks, dtype=np.int32), random.bytes(16 * self.num_blocks)
        blocks = random.permutation(numbers) + 1
        transfers = Transfers(numbers, 0 * numbers, blocks, 0 * numbers, keys)
        if is_store:
            self.region.reserve(keys, seed)
        stores, loads = (transfers, None) if is_store else (None, transfers)
        result, ended, good, start = StepResult(0, numbers[:0]), 0, 0, time.perf_counter()
        with torch.inference_mode():
            self.copier.start(StepPlan(0, stores=stores, loads=loads))
        host = time.perf_counter() - start
        while ended < self.num_blocks:
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
        found: dict[str, float | bool] = {"loaded": good / (self.num_blocks * (repeats + 1))}
        for name, timed in (("store", stores[1:]), ("load", loads[1:])):
            found[f"{name}_gb_s"] = self.num_bytes / median(whole for whole, _ in timed) / 1e9
            found[f"{name}_host_ms"] = median(host for _, host in timed) * 1e3
        after = [runs.words for runs in self.cache.runs(0)]
        return found | {"equal": all(torch.equal(a, b) for a, b in zip(before, after, strict=True))}


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
        copier = copied.copier
        if isinstance(copier, GpuCopier) and not copier.pinned.is_whole:
            results.add(config, **facts, line="threads", **copied.figures(1))
            start = time.perf_counter()
            copier.ready()
            while copier.pinned.is_pinning:
                time.sleep(0.01)
            facts["pin_s"] = time.perf_counter() - start
            assert copier.pinned.is_whole, "the log has the reason"
        results.add(config, **facts, line="copies", **copied.figures(args.repeats))
        copier.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
