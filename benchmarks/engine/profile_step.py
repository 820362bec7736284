"""A decode step's time by kernel: a Chrome trace of steady decoding, the GPU's busy share, the longest kernels.

    python -m benchmarks.engine.profile_step --model llama-3.2-1b --batch 1 64 --trace trace.json.gz

The busy share is the union of all kernel, copy and fill intervals, over the time from the first start to the last end.
The profiler slows the host, so the share is given twice. One is within the trace. The other divides by the time of
unprofiled steps right before and after the traced ones, with contexts equally long on average. A kernel that waits
for its predecessor under programmatic dependent launch counts as busy. Open the trace in Perfetto.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, new_parser

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # trace event categories


def by_name(events: Iterable[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Per kernel name, longest first: calls and microseconds a step. Of kernels that run at the same time, the one that
    ends first gets the time, because the others wait for it. So the sum is the time in which any ran."""
    waiting = sorted(events, key=lambda e: -e["ts"])
    sums: dict[str, list[float]] = {event["name"]: [0, 0.0] for event in waiting}
    running: list[tuple[float, str]] = []  # heap of end times
    now = 0.0
    while waiting or running:
        if not running:
            now = waiting[-1]["ts"]
        while waiting and waiting[-1]["ts"] <= now:
            event = waiting.pop()
            heapq.heappush(running, (event["ts"] + event["dur"], event["name"]))
        end, name = running[0]
        until = min(end, waiting[-1]["ts"]) if waiting else end
        sums[name][1] += until - now
        now = until
        if now >= end:
            sums[heapq.heappop(running)[1]][0] += 1
    rows = [{"name": n[:100], "calls": c / num_steps, "us": us / num_steps} for n, (c, us) in sums.items()]
    return sorted(rows, key=lambda row: -row["us"])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps traced, and as many timed on each side")
    parser.add_argument("--top", type=int, default=12, help="kernels to list")
    parser.add_argument("--host", action="store_true", help="trace operators of the host too, which slows it further")
    parser.add_argument("--trace", type=Path, default=Path("trace.json.gz"), help="the last batch's Chrome trace")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; there is nothing to trace.")
    config = engine_config(args.set)
    results = Results("profile_step", args.out)
    engine = Engine(args.model, config)
    for batch in args.batch:
        profile_batch(engine, batch, args, results)


def profile_batch(engine: Engine, batch: int, args: argparse.Namespace, results: Results) -> None:
    """Print the time by kernel for decode steps with `batch` rows, and add it to the results."""

    def steps(count: int, what: str) -> float:
        """Milliseconds a step."""
        start = time.perf_counter()
        for _ in tqdm(range(count), desc=what):
            engine.core.step()
        return (time.perf_counter() - start) / count * 1e3

    engine.run(batch, args.prompt, 16)
    first_steps = args.steps + batch  # prefill may take a step a request
    engine.add(batch, args.prompt, first_steps + 3 * args.steps + 16)
    steps(first_steps, "prefill and first steps")
    before_ms = steps(args.steps, "timed steps")
    activities = [ProfilerActivity.CUDA] + ([ProfilerActivity.CPU] if args.host else [])
    with profile(activities=activities, acc_events=True) as profiler:
        traced_ms = steps(args.steps, "traced steps")
        torch.cuda.synchronize()
    steps(4, "steps that fill the queue again")
    step_ms = (before_ms + steps(args.steps, "timed steps")) / 2
    while engine.core.has_work:
        engine.core.step()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(plain))
        text = plain.read_bytes()
    args.trace.write_bytes(gzip.compress(text) if args.trace.suffix == ".gz" else text)
    events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") in _ON_GPU]
    window = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    kernels = by_name(events, args.steps)
    busy = sum(row["us"] for row in kernels) * args.steps
    for row in kernels[: args.top]:
        print(f"{row['us']:9.1f} us {row['calls']:7.1f} x  {row['us'] * args.steps / busy:6.1%}  {row['name']}")
    results.add(
        engine.config, model=args.model, batch=batch, prompt_len=args.prompt, steps=args.steps, step_ms=step_ms,
        traced_step_ms=traced_ms, busy_ms=busy / args.steps / 1e3, busy_share_traced=busy / window,
        busy_share=busy / args.steps / 1e3 / step_ms, trace=args.trace.name, kernels=kernels[: args.top],
    )  # fmt: skip


if __name__ == "__main__":
    main()
