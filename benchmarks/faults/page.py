"""docs/faults.md from the JSON lines, and its plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.matrix import ABSENT, DRAFT_ONLY, FAULTS, WHEN, Fault

ROOT = Path(__file__).parents[2]
LINES, PAGE = ROOT / "benchmarks/results/faults.jsonl", ROOT / "docs/faults.md"
PLOT = ROOT / "benchmarks/plots/faults.png"
_SUMMARY = {  # rows of the summary, by their process
    "engine": "an engine",
    "runner": "a runner",
    "front": "a front",
    "raylet": "a node's raylet",
    "haproxy": "HAProxy, the port of all clients",
}

_HEAD = """# What a death costs

`python -m benchmarks.faults --page` writes this page and its plot from `benchmarks/results/faults.jsonl`.

`python -m benchmarks.faults` applies each fault to a running application: two engines, each on a node of its own, and
two fronts. Streams are read over HTTP, and each client sends a new request after a complete answer.

The model is tiny, and its steps are slowed to the time of a larger model's. Every token is compared with an undisturbed
answer.

![Pause of a stream by fault](../benchmarks/plots/faults.png)
"""

_CELLS = """| part of a cell | meaning, over all its repeats |
| --- | --- |
| lost | requests that ended with an error, or never |
| wrong | tokens that were lost, doubled or changed |
| hit | longest pause of a stream that was hit, median / worst |
| others | worst pause of the other streams |
| all | the same of all streams, where none was hit |
| connections cut | clients that sent again with the tokens that they had; the answers continued |
| refused with Retry-After | 429 and 503 answers that name a time |
| held | how long the fault lasted |
| updates | weight updates that ended, and the time from the fault, or its end, to the first later one |
| whole | from the fault, or its end, until the application had all processes and links again |
| n | repeats; [all of them](#repeats) |

Cells with one or two repeats were measured on a busy machine of two cores. They show that nothing is lost, not the
length of a pause.
"""


def lines_of(lines: Path = LINES) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def write_page(lines: Path = LINES, page: Path = PAGE) -> None:
    told = lines_of(lines)
    matrix = _table(lambda fault, when: _cell(fault, when, told))
    folded = [
        "<details>",
        "<summary>Every fault at every moment</summary>",
        "",
        _CELLS,
        *matrix,
        *_repeats(told),
        "</details>",
        "",
    ]
    page.write_text("\n".join([_HEAD, *_summary(told), *folded, *_legend(told)]))


def _of_decode(fault: str, told: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The (median, longest) pause in seconds of each repeat: of the streams that were hit, or else of all."""
    runs = [line for line in told if (line["fault"], line["when"]) == (fault, "decode")]
    pauses = [run["hit_pause_s"] or run["others_pause_s"] for run in runs]
    return [(p50, worst) for p50, worst in pauses if worst]


def _summary(told: list[dict[str, Any]]) -> list[str]:
    """Five faults while streams decode."""
    rows = [["killed while 100 streams decode", "lost", "wrong", "pause, median", "pause, longest", "whole again", "n"]]
    rows.append(["---"] * len(rows[0]))
    for role, name in _SUMMARY.items():
        runs = [line for line in told if (line["fault"], line["when"]) == (f"{role} killed", "decode")]
        if runs:
            pauses = _of_decode(f"{role} killed", told)
            sums = [str(sum(run[key] for run in runs)) for key in ("lost", "wrong_tokens")]
            times = median(p50 for p50, _ in pauses), max(worst for _, worst in pauses)
            whole = median(run["whole_s"] for run in runs)
            rows.append([name, *sums, *map(_seconds, (*times, whole)), str(len(runs))])
    return ["| " + " | ".join(row) + " |" for row in rows] + [""]


def draw(told: list[dict[str, Any]], plot: Path) -> None:
    """Draw the pauses of each fault while streams decode: a mark for the median, a bar to the longest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {fault.name: pauses for fault in FAULTS if (pauses := _of_decode(fault.name, told))}
    ordered = sorted(found, key=lambda name: median(p50 for p50, _ in found[name]))
    middles = [median(p50 for p50, _ in found[name]) for name in ordered]
    longest = [max(worst for _, worst in found[name]) for name in ordered]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.24 * len(ordered)), layout="constrained")
    axes.hlines(
        range(len(ordered)), middles, longest, color="#3b6ea5", linewidth=5, label="to the longest of all repeats"
    )
    axes.plot(middles, range(len(ordered)), "|", color="#d1495b", markersize=11, markeredgewidth=2.5, label="median")
    axes.set_xscale("log")
    axes.set_xticks([0.03, 0.1, 0.3, 1, 3, 10], ["30 ms", "100 ms", "300 ms", "1 s", "3 s", "10 s"])
    axes.set_yticks(range(len(ordered)), ordered, fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("Pause of a stream by fault, while 100 streams decode", fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(plot, dpi=120)
    plt.close(figure)


def _repeats(told: list[dict[str, Any]]) -> list[str]:
    """The number of repeats of each cell, and how many cells have that number."""
    counts = Counter((line["fault"], line["when"]) for line in told)
    possible = [(fault.name, when) for fault in FAULTS for when in WHEN if not fault.why_not(when)]
    cells = Counter(counts[cell] for cell in possible)
    text = ", ".join(f"{number} with {n}" for n, number in sorted(cells.items(), reverse=True))
    rows = _table(lambda fault, when: "-" if fault.why_not(when) else str(counts[fault.name, when]))
    return ["## Repeats", "", f"Of {len(possible)} cells, by number of repeats: {text}.", "", *rows]


def _table(cell: Callable[[Fault, str], str]) -> list[str]:
    rows = [["what", *WHEN], ["---"] * (1 + len(WHEN))]
    rows += [[fault.name, *(cell(fault, when) for when in WHEN)] for fault in FAULTS]
    return ["| " + " | ".join(row) + " |" for row in rows] + [""]


def _cell(fault: Fault, when: str, told: list[dict[str, Any]]) -> str:
    if reason := fault.why_not(when):
        return "no draft" if reason == DRAFT_ONLY else reason
    runs = [line for line in told if (line["fault"], line["when"]) == (fault.name, when)]
    if not runs:
        return "not run"
    lost, wrong = (sum(run[name] for run in runs) for name in ("lost", "wrong_tokens"))
    parts = [f"{lost} lost, {wrong} wrong"]
    hit = [run["hit_pause_s"] for run in runs if run["hit_pause_s"]]
    others = [run["others_pause_s"] for run in runs if run["others_pause_s"]]
    if hit:
        parts.append(f"hit {_seconds(median(p50 for p50, _ in hit))} / {_seconds(max(worst for _, worst in hit))}")
    if others:
        word = "others" if hit else f"all {_seconds(median(p50 for p50, _ in others))} /"
        parts.append(f"{word} {_seconds(max(worst for _, worst in others))}")
    for name, text in (("cut", "connection"), ("refused", "refused with Retry-After")):
        if number := _count(sum(run[name] for run in runs) / len(runs)):
            parts.append(f"{number} {text}" if name == "refused" else f"{number} {text}{'s' * (number != '1')} cut")
    if held := {run["held_s"] for run in runs} - {0.0}:
        parts.append(f"held {_seconds(max(held))}")
    if updated := [run["updated_s"] for run in runs if "updated_s" in run]:
        number = sum(run["updates"] for run in runs) / len(runs)
        count = _count(number)
        parts.append(f"{count} update{'s' * (count != '1')}, the next after {_seconds(median(updated))}")
    parts.append("started anew" if fault.is_final else f"whole {_seconds(median(run['whole_s'] for run in runs))}")
    return "<br>".join([*parts, f"n={len(runs)}"])


def _count(value: float) -> str:
    """Return at most three significant digits; empty for none."""
    return "" if not value else f"{float(f'{value:.3g}'):,.10g}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _legend(told: list[dict[str, Any]]) -> list[str]:
    whole: Callable[[str], list[Any]] = lambda name: sorted({line[name] for line in told})  # noqa: E731
    text = ["## Rows", "", "| row | fault |", "| --- | --- |"]
    text += [f"| {fault.name} | {fault.text} |" for fault in FAULTS]
    text += [f"| no row: {name} | {why} |" for name, why in ABSENT.items()]
    text += ["", "## Columns", "", "| column | state |", "| --- | --- |"]
    text += [*(f"| {name} | {what} |" for name, what in WHEN.items()), ""]
    if told:
        commits = sorted({line["versions"]["commit"] for line in told})
        text += [
            "| measured with | |",
            "| --- | --- |",
            f"| machine | {', '.join(whole('machine'))} |",
            f"| commits | {', '.join(commits)} |",
            f"| streams | {', '.join(map(str, whole('streams')))} |",
            f"| tokens a stream | {', '.join(map(str, whole('num_tokens')))} |",
            f"| step | {', '.join(map(str, whole('step_ms')))} ms |",
            f"| step_timeout_s | {', '.join(map(str, whole('step_timeout_s')))} |",
            "",
        ]
    return text
