"""fill_cache: compiles a model's kernels into a folder, for GPUs that need not be here."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.compilation.ahead import CompileJob
from runtime.compilation.helper import KernelHelper
from runtime.compilation.pretended_gpu import GpuFacts
from runtime.compilation.spec_source import SpecSource, without_side_effects
from runtime.loading.resolve import resolve, with_known_draft
from runtime.worker.cpu.cores import available_cores

_GIB = 1 << 30
# The usual GPU of each target. Kernels depend on the number of multiprocessors, too.
_TARGETS = {
    "sm_80": GpuFacts("A100", (8, 0), 108, 80 * _GIB, 79 * _GIB),
    "sm_89": GpuFacts("L40S", (8, 9), 142, 48 * _GIB, 47 * _GIB),
    "sm_90a": GpuFacts("H100 or H200", (9, 0), 132, 140 * _GIB, 139 * _GIB),
    "sm_100a": GpuFacts("B200", (10, 0), 148, 180 * _GIB, 179 * _GIB),
}


def gpu_of(target: str) -> GpuFacts:
    """The GPU that a target names, such as `sm_90a` or `sm_90a:114` with another number of multiprocessors."""
    name, _, number = target.partition(":")
    if name not in _TARGETS or (number and not number.isdecimal()):
        raise CallboardError(f"target is {target!r}; it must be one of {', '.join(_TARGETS)}, or such as sm_90a:114.")
    facts = _TARGETS[name]
    return facts._replace(multi_processor_count=int(number)) if number else facts


def fill_cache(config: EngineConfig, targets: Sequence[str], cache: Path | None, report: Callable[[str], None]) -> None:
    """Compile the kernels that a model and its draft launch, for each target and rank.

    A model's weights are not fetched. A head in another folder is described by its tensors, so its files are fetched.

    Raises CallboardError if a model is not found, or a kernel fails."""
    gpus, config = {target: gpu_of(target) for target in targets}, with_known_draft(config)
    configs = [config, *([config.draft_config()] if config.has_draft_model else [])]
    for own in configs:
        path = resolve(own.model, own.revision, weights=False)
        source = SpecSource.at(path, without_side_effects(own.sized_for("cuda")))
        for target, gpu in gpus.items():
            for rank in range(own.tensor_parallel_size):
                shard, is_draft = Shard(rank, own.tensor_parallel_size), own is not config
                job = CompileJob(source, shard, is_draft, gpu, available_cores())
                helper = KernelHelper(cache)
                helper.send(pickle.dumps(job))
                answer, name = helper.wait(), f"{own.model}, {target}, rank {rank}"
                if "error" in answer or answer["failed"]:
                    error = answer.get("error") or f"{answer['failed']} kernels were not compiled"
                    raise CallboardError(f"{name}: {error}; correct the settings, or look for memory that is missing.")
                seconds = f"recorded in {answer['recorded_s']:.1f} s, compiled in {answer['compiled_s']:.1f} s"
                report(f"{name}: {answer['kernels']} kernels, {answer['cached']} were in the cache; {seconds}")
