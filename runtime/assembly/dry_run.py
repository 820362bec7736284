"""The helper's program: a runner's start on a pretended GPU, which records kernels, and their compilation.

`python -m runtime.assembly.dry_run` reads one pickled CompileJob from stdin and writes a CompileAnswer to stdout.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.assembly.runner import runner_extras
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.compilation.ahead import CompileAnswer, CompileJob
from runtime.compilation.kernel_pool import compile_all
from runtime.compilation.pretended_gpu import pretended_gpu
from runtime.compilation.triton_cache import (
    Compilation,
    builds_launchers,
    cache_folder,
    has_libcuda,
    recorded_launches,
)
from runtime.kernels.numerics import Numerics
from runtime.worker.ranks.rank_group import RankGroup
from runtime.worker.runner import ModelRunner


class _NoMemory:
    """Memory that other ranks would reach."""

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        return torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda"), b""

    def open(self, handle: bytes) -> int:
        return 0

    def free(self, own: torch.Tensor, opened: Sequence[int]) -> None:
        pass


class _GroupAlone(RankGroup):
    """A group of one process. Its operations launch the kernels for all ranks."""

    def __init__(self, config: EngineConfig, spec: DecoderSpec, numerics: Numerics) -> None:
        super().__init__(config, spec, numerics, _NoMemory())

    def connect(self, handles: Sequence[bytes]) -> None:
        pass

    def least(self, value: int) -> int:
        return value


def recorded_kernels(job: CompileJob) -> list[Compilation]:
    """Start the job's runner on a pretended GPU, and return the kernels that it launches before the first request."""
    config = job.source.config
    plugged = replace(
        runner_extras(config, job.is_draft), tier=None, sleep_memory=None, updates=None, kernels=None, group=_GroupAlone
    )
    with recorded_launches(job.facts.capability) as found, pretended_gpu(job.facts):
        runner = ModelRunner(config, job.source, job.shard, job.is_draft, plugged)
        runner.open(runner.load([runner.handle]).num_kv_blocks)
    return list(found.values())


def answer_of(job: CompileJob) -> CompileAnswer:
    """Record and compile the job's kernels, and write their list."""
    start = time.perf_counter()
    kernels = recorded_kernels(job)
    recorded = time.perf_counter()
    cached = sum(kernel.is_cached() for kernel in kernels)
    compile_all(kernels, job.num_workers)
    failed = sum(not kernel.is_cached() for kernel in kernels)
    if not failed and (has_libcuda() or not builds_launchers()):
        path = cache_folder() / job.list_name
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([[kernel.key, kernel.name] for kernel in kernels]))
        part.rename(path)
    seconds = recorded - start, time.perf_counter() - recorded
    return CompileAnswer(
        kernels=len(kernels), cached=cached, failed=failed, recorded_s=seconds[0], compiled_s=seconds[1]
    )


def main() -> None:
    if data := sys.stdin.buffer.read():  # none from a runner that has ended
        print(json.dumps(answer_of(pickle.loads(data))))


if __name__ == "__main__":
    main()
