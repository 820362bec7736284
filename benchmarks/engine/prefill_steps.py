"""The host's time to launch steps with prompts, and their time on the device, as CUDA graphs and launched one by one.

    python -m benchmarks.engine.prefill_steps --model llama-3.2-3b --prompts 64 256 1024 2048 --rows 0 48

A step is one prompt of `--prompts` new tokens behind `--context` cached tokens. Beside it are decode rows, each with a
context of its own. Plans are made by hand and go directly to a runner with random weights of a published shape. Both
ways are measured in turn in one process. `launch_ms` and `cpu_ms` are the host's time until `launch` returns, by the
clock and by the thread's own; `step_ms` is the time until the result. `behind_ms` is a step among eight that are
launched one behind another, as in an engine that plans ahead. Medians. The first line shows the time and memory of the
graphs at the start.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.library.measure import Results, engine_config, new_parser
from benchmarks.library.models import spec_of
from runtime.assembly.runner import build_runner
from runtime.base.types import SamplingParams
from runtime.core.plan import EMPTY, NewSlot, StepPlan
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource

_IN_A_ROW = 8
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Steps:
    """Plans of one shape for a runner: slot 0 has prompts, and the later slots decode."""

    def __init__(self, runner: ModelRunner, rows: int, row_context: int) -> None:
        self.runner, self.rows, self.row_context = runner, rows, row_context
        self.blocks_of_a_slot = -(-runner.info.max_model_len // runner.info.block_size)
        self.rng = np.random.default_rng(0)
        runner.reset()
        new = [self.new_slot(1 + row, row_context + 1) for row in range(rows)]
        if new:
            slots, ones = np.arange(1, rows + 1, dtype=np.int32), np.ones(rows, np.int32)
            runner.execute(
                StepPlan(0, EMPTY, new, self.tables(range(1, rows + 1)), slots, ones * row_context, ones, ones)
            )

    def new_slot(self, slot: int, num_tokens: int) -> NewSlot:
        token_ids = self.rng.integers(0, self.runner.info.vocab_size, num_tokens).astype(np.int32)
        return NewSlot(slot, token_ids, num_tokens, 0, _GREEDY)

    def tables(self, slots: range) -> np.ndarray:
        """Blocks for the whole context of each slot; slots share them where the cache is small, as only times count."""
        n = self.blocks_of_a_slot
        index = np.arange(len(slots) * n)
        blocks = 1 + (np.repeat(np.array(slots), n) * n + index % n) % (self.runner.info.num_kv_blocks - 1)
        return np.stack((np.repeat(np.array(slots), n), index % n, blocks)).astype(np.int32)

    def plan(self, prompt_len: int, context: int) -> StepPlan:
        """A new request, which computes its last `prompt_len` tokens, and the decode rows."""
        used = -(-(context + prompt_len) // self.runner.info.block_size)
        slots = np.arange(1 + self.rows, dtype=np.int32)
        starts = np.array([context] + [self.row_context] * self.rows, np.int32)
        counts = np.array([prompt_len] + [1] * self.rows, np.int32)
        new = [self.new_slot(0, context + prompt_len)]
        return StepPlan(
            0, np.zeros(1, np.int32), new, self.tables(range(1))[:, :used], slots, starts, counts, np.ones_like(counts)
        )

    def measure(self, prompt_len: int, context: int, repeats: int) -> dict[str, Any]:
        """Medians of a step's times."""
        launch_ms, cpu_ms, step_ms, behind_ms = [], [], [], []
        for _ in range(repeats + 3):
            plan = self.plan(prompt_len, context)
            start, start_cpu = time.perf_counter(), time.thread_time()
            wait = self.runner.launch(plan)
            launch_ms.append((time.perf_counter() - start) * 1e3)
            cpu_ms.append((time.thread_time() - start_cpu) * 1e3)
            wait()
            step_ms.append((time.perf_counter() - start) * 1e3)
        for _ in range(max(3, repeats // 4)):
            plans = [self.plan(prompt_len, context) for _ in range(_IN_A_ROW)]
            start = time.perf_counter()
            for wait in [self.runner.launch(plan) for plan in plans]:
                wait()
            behind_ms.append((time.perf_counter() - start) * 1e3 / _IN_A_ROW)
        times = {"launch_ms": launch_ms[3:], "cpu_ms": cpu_ms[3:], "step_ms": step_ms[3:], "behind_ms": behind_ms}
        return {name: median(values) for name, values in times.items()} | {"launch_ms_max": max(launch_ms[3:])}


def main() -> None:
    parser = new_parser(__doc__)
    lengths = [64, 128, 200, 256, 257, 512, 768, 1024, 1500, 2048, 3000, 8192]
    parser.add_argument("--prompts", nargs="+", type=int, default=lengths, metavar="TOKENS")
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 48], help="decoding rows beside the prompt")
    parser.add_argument("--row-context", type=int, default=700, help="tokens in the cache of each decoding row")
    parser.add_argument("--context", type=int, default=0, help="tokens of the prompt's request that are in the cache")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = engine_config(args.set)
    results = Results("prefill_steps", args.out)
    before = time.perf_counter()
    runner = build_runner(config, DummySource(spec_of(args.model)))
    steps = runner.steps
    assert isinstance(steps, GpuSteps), "steps are graphs with kernel_backend triton only"
    graphs = steps.graph_runner.prefill_graphs
    results.add(config, model=args.model, num_graphs=len(steps.graph_runner), num_prefill_graphs=len(graphs),
                ready_s=time.perf_counter() - before)  # fmt: skip
    cases = [(rows, prompt) for rows in args.rows for prompt in args.prompts]
    for rows, prompt in tqdm(cases, unit="case"):
        for kind, usable in (("graph", graphs), ("launched", [])):
            steps.graph_runner.prefill_graphs = usable
            plans = Steps(runner, rows, args.row_context)
            plan = plans.plan(prompt, args.context)
            found = steps.graphs_for(plan, steps.needs(plan))
            if kind == "graph" and not found:
                continue
            with torch.inference_mode():
                times = plans.measure(prompt, args.context, args.repeats)
            results.add(config, model=args.model, kind=kind, prompt_len=prompt, rows=rows, context=args.context,
                        row_context=args.row_context, repeats=args.repeats,
                        buckets=[graph.shape[:4] for graph, _ in found], **times)  # fmt: skip


if __name__ == "__main__":
    main()
