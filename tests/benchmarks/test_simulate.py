"""The simulator of many engines: a thousand requests through the real scheduler, router and scaling policy."""

import json
from itertools import chain, pairwise

import numpy as np
import pytest

from actors.engine.autoscaling import ScalingPolicy
from actors.front.router import Prompt
from benchmarks.simulate.cluster import Cluster, Shape
from benchmarks.simulate.engine import Stretch
from benchmarks.simulate.step_times import MODELS
from benchmarks.simulate.traces import Lengths, Sessions, azure, mooncake

TIMES = MODELS["llama-3.1-8b"]
SMALL = Sessions(12, 512, Lengths(40, 60), Lengths(8, 12), turns=(1, 3), pauses_s=(0.1, 1.0))


def simulated(workload=SMALL, rate=50.0, seconds=10.0, scaling=None, events=(), **shape) -> Cluster:
    cluster = Cluster(Shape(TIMES, **({"num_engines": 4, "num_kv_blocks": 250} | shape)), scaling)
    for at, what, *args in events:
        cluster.at(at, getattr(cluster, what), *args)
    cluster.run(workload.generate([(seconds, rate)], seed=1))
    totals = cluster.totals
    assert len(totals.sent) == totals.num_asked > 0
    assert (totals.num_refused, totals.num_lost_tokens) == (0, 0)
    for engine in cluster.engines.values():
        assert engine.scheduler.find_faults() == []
        assert not engine.scheduler.requests
    return cluster


def ttft_p90(cluster: Cluster) -> float:
    return float(np.percentile(cluster.totals.ttft, 90))


def cached_share(cluster: Cluster) -> float:
    return sum(cluster.totals.num_cached) / sum(cluster.totals.num_prompt)


def test_a_thousand_requests_go_to_their_prefixes():
    """Four engines; none of them can hold all prefixes."""
    prefix = simulated()
    least_load, oracle = (simulated(policy=policy, seconds=3.0) for policy in ("least-load", "oracle"))
    assert len(prefix.totals.sent) > 950
    assert cached_share(least_load) < 0.7 < 0.85 < cached_share(prefix)
    assert ttft_p90(prefix) < 0.8 * ttft_p90(least_load)
    assert cached_share(prefix) > 0.95 * cached_share(oracle)
    assert sum(prefix.totals.num_expected) == pytest.approx(sum(prefix.totals.num_cached), rel=0.05)


def test_caches_with_foresight_have_more_hits():
    prefix, foresight = (simulated(policy=policy, seconds=20.0) for policy in ("prefix", "foresight"))
    assert cached_share(prefix) < cached_share(foresight) < 0.95


def test_steps_planned_at_once_take_the_same_time():
    merged, single = (
        simulated(rate=12.0, seconds=5.0, num_engines=1, num_kv_blocks=4000, merge=merge) for merge in (True, False)
    )
    assert np.median(merged.totals.ttft) == pytest.approx(np.median(single.totals.ttft), rel=0.1)
    assert merged.totals.gaps.percentile(0.5) == pytest.approx(single.totals.gaps.percentile(0.5), rel=0.02)
    assert max(merged.totals.ended) == pytest.approx(max(single.totals.ended), rel=0.01)


def test_streams_of_dead_or_draining_engines_go_on():
    long = Sessions(1, 0, Lengths(100, 150), Lengths(150, 200))
    events = [(1.0, "kill_engine", "engine-1"), (2.0, "drain_engine", "engine-2"), (2.5, "start_engine")]
    cluster = simulated(long, 30.0, 4.0, events=events, num_kv_blocks=4000)
    assert cluster.totals.num_moves > 1
    assert len(cluster.engines) == 3


def test_the_scaling_policy_follows_a_wave():
    """Streams move when engines go, and a wave turns the scale once up and once down."""
    slow = Sessions(1, 0, Lengths(1500, 1800), Lengths(8, 10))
    policy = ScalingPolicy(1, 8, downscale_delay_s=10.0)
    cluster = Cluster(Shape(TIMES, 1, 4000), policy)
    cluster.run(slow.generate([(5.0, 2.0), (20.0, 60.0), (30.0, 2.0)], seed=1))
    totals, asked = cluster.totals, [num for _, num in cluster.scale]
    assert len(totals.sent) == totals.num_asked
    assert (totals.num_refused, totals.num_lost_tokens) == (0, 0)
    up = [b > a for a, b in pairwise(asked)]
    assert max(asked) > 1
    assert up == sorted(up, reverse=True)


def test_a_stretch_has_its_steps():
    stretch = Stretch(2.0, 0.004, 1e-6, 3, 500)
    for num in (0, 1, 2, 77, 499):
        assert stretch.num_done(stretch.end(num) + 1e-9) == num
        assert stretch.num_done(stretch.end(num + 1) - 1e-9) == num


def test_public_traces_are_read(tmp_path):
    """Equal blocks of Mooncake give equal prefixes; Azure's prompts share nothing."""
    lines = [
        {"timestamp": 2500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 46, 47]},
        {"timestamp": 0, "input_length": 1030, "output_length": 0, "hash_ids": [0, 46, 99]},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = mooncake(tmp_path / "m.jsonl")
    assert (first.start, second.start) == (0.0, 2.5)
    jobs = [conversation.next_job(i, 0.0) for i, conversation in enumerate((first, second))]
    assert [(len(job.prompt), job.output_len) for job in jobs] == [(1030, 1), (1100, 7)]
    keys = [list(chain(*Prompt(job.prompt).keys(("f", 16)))) for job in jobs]
    assert keys[0][:64] == keys[1][:64]
    assert keys[0][64] != keys[1][64]
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    (tmp_path / "a.csv").write_text("\n".join([*rows, "2023-11-16 18:15:50.9951690,396,109"]))
    first, second = azure(tmp_path / "a.csv")
    assert second.start - first.start == pytest.approx(4.314579, abs=1e-5)
    assert first.next_job(1, 0.0).prompt[:16] != second.next_job(2, 0.0).prompt[:16]
