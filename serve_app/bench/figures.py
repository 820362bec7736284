"""The figures of a load: rates, and how latencies are distributed. docs/benchmarking.md defines each."""

from __future__ import annotations

from typing import Any

import numpy as np

from serve_app.bench.client import Turn

PERCENTILES = (50, 90, 99)


def distribution(values: Any, weights: Any = None) -> dict[str, float]:
    """The mean and the percentiles of at least one value."""
    values = np.asarray(values, dtype=float)
    if weights is None:
        found = np.percentile(values, PERCENTILES)
    else:
        order = np.argsort(values)
        share = np.cumsum(np.asarray(weights, dtype=float)[order])
        places = np.searchsorted(share, np.array(PERCENTILES) / 100 * share[-1])
        found = values[order][places]
    return {"mean": float(np.average(values, weights=weights))} | {
        f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, found, strict=True)
    }


def gaps(turns: list[Turn]) -> np.ndarray:
    """Seconds between events of the same answer."""
    return np.concatenate([np.diff(turn.events) for turn in turns])


def draft_figures(before: list[float], after: list[float]) -> dict[str, Any]:
    """What was accepted between two `Client.draft_counts`: by position, the share of rounds. {} without rounds."""
    before = before + [0.0] * (len(after) - len(before))
    rounds, *accepted = [b - a for a, b in zip(before, after, strict=False)] or [0.0]
    if rounds <= 0:
        return {}
    shares = [count / rounds for count in accepted if count]
    return {"rounds": rounds, "accepted_by_position": shares, "tokens_per_round": 1 + sum(shares)}


def figures(turns: list[Turn]) -> dict[str, Any]:
    """The figures of some requests, latencies in milliseconds; without a complete answer only their counts."""
    done = [turn for turn in turns if turn.ended]
    errors = [turn.error for turn in turns if turn.error]
    counts = {"requests": len(done), "errors": len(errors), "first_error": errors[0] if errors else ""}
    if not done:
        return counts
    seconds = max(turn.ended for turn in done) - min(turn.sent for turn in done)
    rates = {
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "input_tokens_per_s": sum(turn.num_prompt_tokens for turn in done) / seconds,
        "output_tokens_per_s": sum(turn.num_tokens for turn in done) / seconds,
        "prompt_tokens": float(np.mean([turn.num_prompt_tokens for turn in done])),
        "cached_tokens": float(np.mean([turn.num_cached_tokens for turn in done])),
        "output_tokens": float(np.mean([turn.num_tokens for turn in done])),
        "tokens_per_event": sum(turn.num_tokens for turn in done) / sum(len(turn.events) for turn in done),
    }
    latencies = {
        "ttft_ms": distribution([turn.events[0] - turn.sent for turn in done]),
        "tpot_ms": distribution(
            [(turn.events[-1] - turn.sent) / turn.num_tokens for turn in done], [turn.num_tokens for turn in done]
        ),
        "latency_ms": distribution([turn.ended - turn.sent for turn in done]),
    }
    if several := [turn for turn in done if turn.num_tokens > 1 and len(turn.events) > 1]:
        means = [(turn.events[-1] - turn.events[0]) / (turn.num_tokens - 1) for turn in several]
        latencies["itl_ms"] = distribution(means, [turn.num_tokens - 1 for turn in several])
        latencies["event_gap_ms"] = distribution(gaps(several))
    return (
        counts | rates | {name: {key: 1e3 * value for key, value in found.items()} for name, found in latencies.items()}
    )
