"""The report of `callboard bench`: one level's table, or a line a level with a plot of throughput and latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError

_LATENCIES = {  # key: the figure's name
    "ttft_ms": "time to first token (TTFT)",
    "itl_ms": "inter-token latency (ITL)",
    "tpot_ms": "time per output token (TPOT)",
    "event_gap_ms": "gap between events",
    "latency_ms": "end-to-end latency",
}
_RATES = {
    "requests_per_s": "requests/s",
    "input_tokens_per_s": "input tokens/s",
    "output_tokens_per_s": "output tokens/s",
}
_STATISTICS = ("mean", "p50", "p90", "p99")
_COLUMNS = {  # columns when there are several levels
    "req/s": ("requests_per_s", None),
    "in tok/s": ("input_tokens_per_s", None),
    "out tok/s": ("output_tokens_per_s", None),
    "TTFT p50": ("ttft_ms", "p50"),
    "TTFT p99": ("ttft_ms", "p99"),
    "ITL p50": ("itl_ms", "p50"),
    "ITL p99": ("itl_ms", "p99"),
    "latency p50": ("latency_ms", "p50"),
    "latency p99": ("latency_ms", "p99"),
}
_WIDTH, _HEIGHT = 60, 12  # a plot's size in characters


def report(about: dict[str, Any], levels: list[dict[str, Any]]) -> str:
    """The whole report as text."""
    api = "chat completions" if about["chat"] else "completions"
    shared = f" after {about['shared_prefix']} in common" if about["shared_prefix"] else ""
    images = ", pictures of {} x {}, {} each".format(*about["image"]) if about.get("image") else ""
    head = [
        f"{about['model']} at {about['url']}, {api}",
        f"prompts of {about['prompt_tokens']} tokens{shared} (counted by {about['prompt_tokens_counted_by']}){images}, "
        f"answers of at most {about['output_tokens']} tokens, seed {about['seed']}",
    ]
    parts = [[*head], _one(levels[0]) if len(levels) == 1 else _several(levels)]
    shown = [level for level in levels if level["requests"]]
    if len(shown) > 1:
        parts.append(_plot(shown))
    parts.append([line for level in levels for line in _drafts(level)])
    if errors := [level for level in levels if level["errors"]]:
        parts.append([f"{level['name']}: {level['errors']} errors, first: {level['first_error']}" for level in errors])
    return "\n\n".join("\n".join(part) for part in parts if part)


def _one(level: dict[str, Any]) -> list[str]:
    if not level["requests"]:
        return [f"{level['name']}: no request was answered"]
    tokens = f"tokens a request: {level['prompt_tokens']:.1f} of prompt ({level['cached_tokens']:.1f} from a cache), "
    lines = [
        f"{level['name']}: {level['requests']} requests in {level['seconds']:.1f} s, {level['errors']} errors",
        f"{tokens}{level['output_tokens']:.1f} of output, {level['tokens_per_event']:.2f} an event",
        "",
        *(f"{label:<30}{_number(level[name]):>10}" for name, label in _RATES.items()),
        "",
        f"{'milliseconds':<30}" + "".join(f"{statistic:>10}" for statistic in _STATISTICS),
    ]
    for name, label in _LATENCIES.items():
        values = level.get(name, {})
        lines.append(f"{label:<30}" + "".join(f"{_number(values.get(key)):>10}" for key in _STATISTICS))
    return lines


def _drafts(level: dict[str, Any]) -> list[str]:
    if "rounds" not in level:
        return []
    shares = ", ".join(f"{share:.1%}" for share in level["accepted_by_position"]) or "none"
    rounds = f"{level['tokens_per_round']:.2f} tokens a round"
    return [f"{level['name']}: draft tokens accepted by position: {shares}; {rounds}, by the server's metrics"]


def _several(levels: list[dict[str, Any]]) -> list[str]:
    rows = [["load", "requests", "errors", *_COLUMNS]]
    for level in levels:
        values = [_number(_value(level, *column)) for column in _COLUMNS.values()]
        rows.append([level["name"], str(level["requests"]), str(level["errors"]), *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [*lines, "(latencies in milliseconds)"]


def _plot(levels: list[dict[str, Any]]) -> list[str]:
    """End-to-end latency over throughput, as characters: each level is a letter."""
    points = [(level["output_tokens_per_s"], level["latency_ms"]["p50"]) for level in levels]
    most_x, most_y = (max(values) for values in zip(*points, strict=True))
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    names = [chr(ord("A") + i % 26) for i in range(len(points))]
    for name, (x, y) in zip(names, points, strict=True):
        grid[_HEIGHT - 1 - round(y / most_y * (_HEIGHT - 1))][round(x / most_x * (_WIDTH - 1))] = name
    top, margin = _number(most_y), max(len(_number(most_y)), 1)
    labels = [top, *[""] * (_HEIGHT - 2), "0"]
    lines = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    return [
        "latency p50 in ms, over output tokens/s",
        *lines,
        f"{'':>{margin}} +{'-' * _WIDTH}",
        f"{'':>{margin}}  0{_number(most_x):>{_WIDTH - 1}}",
        ", ".join(f"{name}: {level['name']}" for name, level in zip(names, levels, strict=True)),
    ]


def draw(about: dict[str, Any], levels: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG with TTFT, ITL and end-to-end latency over throughput. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = [level for level in levels if level["requests"]]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, name in zip(axes, ("ttft_ms", "itl_ms", "latency_ms"), strict=True):
        points = [level for level in levels if name in level]
        x = [level["output_tokens_per_s"] for level in points]
        for statistic in ("p50", "p99"):
            axis.plot(x, [level[name][statistic] for level in points], marker="o", label=statistic)
        for level in points:
            at = (level["output_tokens_per_s"], level[name]["p50"])
            axis.annotate(f"{level['level']:g}", at, textcoords="offset points", xytext=(0, -14), ha="center")
        axis.set(title=f"{_LATENCIES[name]}, ms", xlabel="output tokens/s", xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    kind = "requests/s" if about["is_rate"] else "concurrency"
    figure.suptitle(f"{about['model']} by {kind}")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as e:
        raise CallboardError(f"The plot cannot be written to {path}: {e.strerror}.") from None
    finally:
        pyplot.close(figure)


def _value(level: dict[str, Any], name: str, statistic: str | None) -> float | None:
    value = level.get(name)
    if statistic is not None and value is not None:
        value = value[statistic]
    return None if value is None else float(value)


def _number(value: float | None) -> str:
    """At least three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
