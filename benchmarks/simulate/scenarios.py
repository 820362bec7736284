"""The scenarios, and the figures that each gives; `python -m benchmarks.simulate` prints them."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from actors.engine.autoscaling import ScalingPolicy
from benchmarks.simulate.cluster import Cluster, Shape
from benchmarks.simulate.fronts import Policy
from benchmarks.simulate.step_times import MODELS
from benchmarks.simulate.traces import GENERATED, Conversation

MOST_TTFT_S = 1.0


def play(cluster: Cluster, conversations: Iterable[Conversation], until: float = float("inf")) -> float:
    """Run a simulation; returns the CPU seconds that it took. Millions of small live objects would cost
    the garbage collector a third of the time, and cycles do not occur."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    cluster.run(conversations, until)
    gc.enable()
    return time.process_time() - began


def figures(cluster: Cluster, begin: float = 0.0, end: float | None = None) -> dict[str, Any]:
    """Figures of the answers that ended between these times. Answers with the first token in time also count alone."""
    totals = cluster.totals
    ended, ttft = np.array(totals.ended), np.array(totals.ttft)
    chosen = (ended >= begin) & (ended <= (ended.max(initial=0.0) if end is None else end))
    seconds = (float(ended.max(initial=begin)) if end is None else end) - begin
    tokens = np.array(totals.num_output)[chosen]
    ttft = ttft[chosen]
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99]) * 1e3 if len(ttft) else (0.0, 0.0, 0.0)
    num_prompt = max(1, int(np.array(totals.num_prompt)[chosen].sum()))
    return {
        "requests": int(chosen.sum()),
        "output_tok_s": tokens.sum() / seconds,
        "output_tok_s_in_time": tokens[ttft <= MOST_TTFT_S].sum() / seconds,
        "ttft_ms": {"p50": float(p50), "p90": float(p90), "p99": float(p99)},
        "itl_ms": {"p50": totals.gaps.percentile(0.5) * 1e3, "p99": totals.gaps.percentile(0.99) * 1e3},
        "cached": int(np.array(totals.num_cached)[chosen].sum()) / num_prompt,
        "cached_expected": int(np.array(totals.num_expected)[chosen].sum()) / num_prompt,
        "refused": totals.num_refused,
        "lost_tokens": totals.num_lost_tokens,
        "moved_streams": totals.num_moves,
    }


def near_capacity(
    workload: str, policy: Policy, rate: float, seconds: float, seed: int = 0, num_engines: int = 8
) -> dict[str, Any]:
    """Engines at one conversation rate: the last two thirds of `seconds` seconds. `late` is the share of these
    requests with a first token after MOST_TTFT_S."""
    cluster = Cluster(Shape(MODELS["llama-3.1-8b"], num_engines, 20_000, policy=policy))
    cpu_s = play(cluster, GENERATED[workload].generate([(seconds, rate)], seed), seconds)
    begin, totals = seconds / 3, cluster.totals
    sent, ttft = np.array(totals.sent), np.array(totals.ttft)
    num_late, num_all = int((ttft[sent >= begin] > MOST_TTFT_S).sum()), int((sent >= begin).sum())
    for job in cluster.live_jobs():
        if begin <= job.sent <= seconds - MOST_TTFT_S:
            num_all += 1
            num_late += (seconds if job.first_at is None else job.first_at) - job.sent > MOST_TTFT_S
    late = num_late / max(1, num_all)
    return {"rate": rate, **figures(cluster, begin, seconds), "late": late, "cpu_s": cpu_s}


def capacity(workload: str, policy: Policy, seconds: float, low: float, high: float, num_tries: int) -> dict[str, Any]:
    """The highest rate with at most one request in ten late, by halving the span of rates."""
    best: dict[str, Any] = {}
    for _ in range(num_tries):
        rate = (low * high) ** 0.5
        found = near_capacity(workload, policy, rate, seconds)
        if found["late"] <= 0.1:
            low = rate
            if found["output_tok_s_in_time"] > best.get("output_tok_s_in_time", 0.0):
                best = found
        else:
            high = rate
    return best


def many_engines(num_engines: int, seconds: float, rate: float, merge: bool = True) -> dict[str, Any]:
    """So many requests a second for all engines, of conversations that share prompts."""
    workload = GENERATED["chat"]
    turns = sum(workload.turns) / 2
    shape = Shape(MODELS["llama-3.1-8b"], num_engines, 2000, num_fronts=1, merge=merge, max_model_len=16_384)
    cluster = Cluster(shape)
    cpu_s = play(cluster, workload.generate([(seconds, rate / turns)]), seconds)
    found = figures(cluster, end=seconds)
    num_steps = sum(engine.num_steps for engine in cluster.engines.values())
    return {"engines": num_engines, "seconds": seconds, **found, "steps": num_steps, "cpu_s": cpu_s}


def square_wave(num_waves: int, half_s: float, low: float, high: float, most_engines: int = 32) -> dict[str, Any]:
    """Load that jumps up and down, with the scaling policy and its own times. Engines of few rows, so that many are
    needed for little."""
    shape = Shape(MODELS["llama-3.1-8b"], 1, 20_000, max_num_seqs=32)
    cluster = Cluster(shape, ScalingPolicy(1, most_engines))
    rates = [(half_s, rate) for _ in range(num_waves) for rate in (low, high)]
    cpu_s = play(cluster, GENERATED["chat"].generate(rates))
    asked = [num for _, num in cluster.scale]
    directions = [b > a for a, b in itertools.pairwise(asked)]
    turns = sum(a != b for a, b in itertools.pairwise(directions))
    return {
        "waves": num_waves, "half_s": half_s, "rates": [low, high], **figures(cluster),
        "asked": [[round(at), num] for at, num in cluster.scale],
        "turns_of_scale": turns, "turns_of_load": 2 * num_waves - 1, "cpu_s": cpu_s,
    }  # fmt: skip
