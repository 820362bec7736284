"""Compiles a runner's kernels before and while its weights are read, with all cores.

    runner   [libraries][GPU][ weights are read        ][waits][largest steps][graphs]
    helper   [libraries     ][dry run][ compiles on all cores ]

A dry run is the runner's whole start on a pretended GPU (runtime/assembly/dry_run.py). It records each kernel's launch
with the types, constants and options of the launch. So Triton's cache folder has the kernels under the keys of the
launches.

The list of a model's kernels lies in the cache folder, too. Its name is a hash of model, settings, GPU, versions and
sources. A start that finds the list, and all its kernels in the cache, starts no dry run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from runtime.base.shard import Shard
from runtime.compilation.helper import KernelHelper
from runtime.compilation.pretended_gpu import GpuFacts
from runtime.compilation.spec_source import SpecSource, without_side_effects
from runtime.worker.cpu.cores import available_cores
from runtime.worker.extras import KernelParts

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parents[1]  # the package `runtime`


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What a helper compiles: the kernels of a runner."""

    source: SpecSource
    shard: Shard
    is_draft: bool
    facts: GpuFacts
    num_workers: int

    @property
    def list_name(self) -> str:
        """The name of the file with the job's kernels. All that chooses them is in it, except free memory."""
        import triton

        facts = self.facts
        gpu = facts.name, facts.capability, facts.multi_processor_count, facts.total_memory
        digest = hashlib.sha256(repr((triton.__version__, torch.__version__, gpu, self.shard, self.is_draft)).encode())
        digest.update(repr(self.source).encode())
        for path in sorted(_SOURCES.rglob("*.py")):
            digest.update(path.read_bytes())
        return f"callboard-{digest.hexdigest()[:32]}.json"


class CompileAnswer(TypedDict):
    """A helper's answer."""

    kernels: int
    cached: int  # found in the cache
    failed: int
    recorded_s: float  # seconds of the dry run
    compiled_s: float


class HelpedKernels:
    """A KernelsAhead: waits for a helper."""

    def __init__(self, helper: KernelHelper, job: CompileJob) -> None:
        self._helper, self._workers = helper, job.num_workers
        helper.send(pickle.dumps(job))

    def wait(self) -> None:
        start = time.perf_counter()
        answer = self._helper.wait()
        waited = time.perf_counter() - start
        if "error" in answer:
            logger.warning("kernels: not compiled ahead (%s); launches compile them one by one", answer["error"])
            return
        logger.info(
            "kernels: %d recorded in %.1f s, %d from the cache, %d failed; compiled in %.1f s by %d processes; "
            "waited %.1f s",
            *(answer[name] for name in ("kernels", "recorded_s", "cached", "failed", "compiled_s")),
            self._workers,
            waited,
        )


def kernels_ahead(parts: KernelParts, helper: KernelHelper | None) -> HelpedKernels | None:
    """Begin to compile a runner's kernels. Returns None if the cache has them, or if that fails: a start goes on."""
    try:
        return _begin(parts, helper)
    except Exception as e:
        logger.warning("kernels: not compiled ahead (%s); launches compile them one by one", e)
        if helper is not None:
            helper.cancel()
        return None


def _begin(parts: KernelParts, helper: KernelHelper | None) -> HelpedKernels | None:
    start = time.perf_counter()
    cores = max(1, available_cores() // parts.shard.size)
    source = SpecSource.of(parts.source, without_side_effects(parts.config), parts.head)
    job = CompileJob(source, parts.shard, parts.is_draft, GpuFacts.of(parts.numerics.device), cores)
    names = listed_kernels(job)
    if names is None:
        return HelpedKernels(helper or KernelHelper(), job)
    if helper is not None:
        helper.cancel()
    logger.info("kernels: %d, all from the cache; found in %.1f s", len(names), time.perf_counter() - start)
    return None


def listed_kernels(job: CompileJob) -> list[str] | None:
    """The names of the job's kernels, if all are in the cache; None if one is missing, or the list is."""
    try:
        from runtime.compilation.triton_cache import cache_folder, is_cached

        pairs = json.loads((cache_folder() / job.list_name).read_text())
        return [name for _, name in pairs] if all(is_cached(key, name) for key, name in pairs) else None
    except (ImportError, OSError, ValueError):
        return None
