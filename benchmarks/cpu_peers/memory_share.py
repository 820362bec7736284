"""The share of the memory's speed that a decode step uses, as a side: random weights of a published shape.

`read` is the fastest of several ways to read an array that no cache holds. `decode` gives the bytes of weights that
one token reads, and its speed. The KV cache is left out: 80 tokens of it are below one percent of a 1B's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.cpu_peers.jobs import PROMPT_TOKENS, Job, Measure, do_jobs
from benchmarks.library.measure import Engine, engine_config
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.kernels.numerics import Numerics
from runtime.quant.model_formats import weight_formats

_ARRAY_BYTES, _READS = 1 << 30, 4


class MemoryShare:
    def __init__(self, model: str, threads: int, settings: list[str]) -> None:
        config = engine_config(settings, device="cpu", num_threads=threads, max_model_len=1024, kv_cache_memory=0.2)
        self._engine = Engine(model, config)
        self.bytes = bytes_per_token(self._engine.runner.spec, self._engine.runner.numerics)
        self._array = torch.ones(_ARRAY_BYTES // 4)
        self._ways = _ways_to_read(self._array, threads)

    def read(self, job: Job) -> dict[str, float]:
        return {"gb_s": max(_ARRAY_BYTES / _seconds(way) / 1e9 for way in self._ways for _ in range(_READS))}

    def decode(self, job: Job) -> dict[str, float]:
        rate = self._engine.run(1, PROMPT_TOKENS, job.new_tokens).decode_rate
        return {"tok_s": rate, "gb_s": rate * self.bytes / 1e9}


def bytes_per_token(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes of all weights on the device that a step of one token reads: all but the rows of other tokens."""
    format_of = weight_formats(spec, numerics)
    shapes = {name: shape for name, shape in spec.shapes().items() if name not in ("embed", "positions")}
    shapes["head"] = spec.vocab_size, spec.hidden_size
    return sum(format_of(name).device_bytes(shape, numerics) for name, shape in shapes.items())


def _ways_to_read(array: torch.Tensor, threads: int) -> list[Callable[[], object]]:
    parts, pool = np.array_split(array.numpy(), threads), ThreadPoolExecutor(threads)
    rows, ones = array.view(-1, 4096), torch.ones(4096)
    return [array.sum, lambda: torch.mv(rows, ones), lambda: list(pool.map(np.max, parts))]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def load(settings: dict[str, Any]) -> tuple[Mapping[str, Measure], dict[str, str]]:
    cells = MemoryShare(settings["model"], settings["threads"], settings["set"])
    return {"read": cells.read, "decode": cells.decode}, {"bytes_per_token": str(cells.bytes)}


if __name__ == "__main__":
    do_jobs(load)
