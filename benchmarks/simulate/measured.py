"""One simulated engine against a server that was measured: the same requests at the same times.

The figures are the 3B's over HTTP on one H200: output tok/s, TTFT p50 and p99, ITL p50 and p99 in milliseconds. A
figure that was not recorded is None. They come from 2026-11-22 (benchmarks/NOTES.md, the engine's present steps, pacing
and late planning) and the quiet host. Workloads that were not measured there come from another host. Hosts differ:
where "steady" took its 8.7 ms, "shared-prefix" took 8.9, and 8.15 on the quiet host. The throughput of "steady", which
its arrivals set, comes from the day before: the first of two draws (benchmarks/results/serving.jsonl).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.serving.__main__ import WORKLOADS, Draw, Session
from benchmarks.simulate.cluster import Cluster, Shape
from benchmarks.simulate.engine import Gaps
from benchmarks.simulate.scenarios import figures, play
from benchmarks.simulate.step_times import MODELS
from benchmarks.simulate.traces import Conversation, Job

# Repeats, and the figures.
MEASURED: dict[str, tuple[int, tuple[float | None, ...]]] = {
    "sequential": (2, (557.9, 6.2, None, 1.77, None)),
    "steady": (1, (516.4, 8.7, 15.5, 2.1, 2.8)),
    "burst48": (1, (11_340, None, None, None, None)),
    "long-prompts": (2, (814.0, 19.9, 30.3, 2.3, 8.5)),
    "shared-prefix": (2, (1079.2, 8.15, None, 2.2, 4.1)),
    "burst256": (2, (23_700, None, None, None, None)),
}
_NAMES = ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


class Replay(Conversation):
    """A session of `benchmarks.serving` with prompts that are given whole."""

    def __init__(self, session: Session, begin: float) -> None:
        super().__init__(begin + session.start, [])
        self.session = session

    def next_job(self, number: int, sent: float) -> Job | None:
        turn = self.session.turns[self.num_sent]
        self.num_sent += 1
        prompt, length = array("i", turn.prompt), turn.max_tokens
        return Job(number, self, prompt, len(prompt), length, length, "", sent)

    def answered(self, job: Job, answer: array[int], block_hashes: list[bytes]) -> float | None:
        more = self.num_sent < len(self.session.turns)
        return self.session.turns[self.num_sent].pause if more else None


def replays(sessions: list[Session], begin: float) -> Iterator[Conversation]:
    """All sessions, ordered by start."""
    return iter(sorted((Replay(session, begin) for session in sessions), key=lambda replay: replay.start))


def compare(workload: str, merge: bool) -> dict[str, Any]:
    """The simulated figures of a workload, those measured, and by how much they differ."""
    cluster = Cluster(Shape(MODELS["llama-3.2-3b"], 1, 40_000, num_fronts=1, merge=merge))
    play(cluster, replays(Draw(1 << 20).requests(64, (64, 512), (16, 64)), 0.0))  # the client warms a server up so
    (repeats, measured), runs = MEASURED[workload], []
    for seed in range(repeats):
        begin = cluster.now + 1.0
        cluster.totals.gaps = Gaps()
        for engine in cluster.engines.values():
            engine.gaps = cluster.totals.gaps
        sessions = WORKLOADS[workload](Draw(seed))
        num_requests = sum(len(session.turns) for session in sessions)
        play(cluster, replays(sessions, begin))
        runs.append(figures(cluster, min(cluster.totals.sent[-num_requests:])))
    found = [
        mean(run["output_tok_s"] for run in runs),
        *(mean(run["ttft_ms"][share] for run in runs) for share in ("p50", "p99")),
        *(mean(run["itl_ms"][share] for run in runs) for share in ("p50", "p99")),
    ]
    pairs = list(zip(_NAMES, found, measured, strict=True))
    return {
        "workload": workload,
        "model": "llama-3.2-3b",
        "merge": merge,
        **{name: ours for name, ours, _ in pairs},
        "measured": {name: theirs for name, _, theirs in pairs if theirs is not None},
        "difference": {name: ours / theirs - 1 for name, ours, theirs in pairs if theirs is not None},
    }
