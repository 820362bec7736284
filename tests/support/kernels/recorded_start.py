"""Records a tiny model's starts, compiles one of their kernels by a pool, and launches that kernel. Prints JSON.

python tests/support/kernels/recorded_start.py

It runs in a separate process, which pretends to have a GPU.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.library.models import spec_of
from runtime.assembly.dry_run import recorded_kernels
from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.compilation.ahead import CompileJob
from runtime.compilation.fill import gpu_of
from runtime.compilation.kernel_pool import compile_all
from runtime.compilation.spec_source import SpecSource, without_side_effects
from runtime.compilation.triton_cache import Compilation
from runtime.kernels import triton_language
from runtime.kernels.norm import rms_norm
from runtime.models import weights
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.sources import DummySource

SETTINGS = EngineConfig(max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=512)


def start(**changes: Any) -> list[Compilation]:
    """The kernels of a start with these settings."""
    config = without_side_effects(replace(SETTINGS, **changes).sized_for("cuda"))
    spec = spec_of("tiny")
    source = SpecSource.of(DummySource(spec), config, mtp_spec(spec) if config.draft else None)
    return recorded_kernels(CompileJob(source, Shard(), False, gpu_of("sm_90a"), 2))


def main() -> None:
    weights._MOST_DRAWN_ON_CPU = 0  # large models are drawn on their device
    kernels, with_head = start(), start(draft="mtp", num_draft_tokens=2)
    norm = next(kernel for kernel in kernels if kernel.name == "_rms_norm_kernel")
    compiled = compile_all([norm], 2)
    # A launch as in a process that records nothing: Triton compiles what its cache lacks.
    hits, launch = dict[str, bool](), JITFunction.run
    knobs.compilation.listener = lambda *, metadata, cache_hit, **more: hits.update({metadata["hash"]: cache_hit})
    JITFunction.run = lambda own, *args, grid, warmup, **more: launch(own, *args, grid=grid, warmup=True, **more)
    triton_language._has_pdl = lambda device: True
    rms_norm._rms_norm_kernel.device_caches.clear()
    x = torch.empty((32, 64), dtype=torch.bfloat16, device="meta")
    rms_norm.rms_norm_triton(x, x[0], 1e-5)
    names = [kernel.name for kernel in kernels]
    head_names = sorted({kernel.name for kernel in with_head} - set(names))
    found = {"names": names, "head_names": head_names, "compiled": compiled == [norm.key], "hits": list(hits.values())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
