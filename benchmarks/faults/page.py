"""docs/faults.md from the JSON lines."""

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

_HEAD = """# What a death costs

`python -m benchmarks.faults --page` writes this page from `benchmarks/results/faults.jsonl`.

`python -m benchmarks.faults` applies each fault to a running application: two engines, each on a node of its own, and
two fronts. Streams are read over HTTP, and each client sends a new request after a complete answer.

The model is tiny, and its steps are slowed to the time of a larger model's. Every token is compared with an undisturbed
answer.

| part of a cell | meaning, over all its repeats |
| --- | --- |
| lost | requests that ended with an error, or never |
| wrong | tokens that were lost, doubled or changed |
| hit | longest pause of a stream that was hit, median / worst |
| others | worst pause of the other streams |
| all | the same of all streams, where none was hit |
| connections cut | clients that sent again with the tokens that they had; the answers continued |
| refused with a time | 429 and 503 answers |
| held | how long the fault lasted |
| updates | weight updates that ended, and the time from the fault, or its end, to the first later one |
| whole | from the fault, or its end, until the application had all processes and links again |
| n | repeats; [all of them](#repeats) |

Cells with one or two repeats were measured on a busy machine of two cores. They show that nothing is lost, not the
length of a pause.
"""


def write_page(lines: Path = LINES, page: Path = PAGE) -> None:
    told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    page.write_text("\n".join([_HEAD, *_matrix(told), *_repeats(told), *_legend(told)]))


def _matrix(told: list[dict[str, Any]]) -> list[str]:
    return _table(lambda fault, when: _cell(fault, when, told))


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
    for name, text in (("cut", "connections cut"), ("refused", "refused with a time")):
        if number := sum(run[name] for run in runs):
            parts.append(f"{number / len(runs):.3g} {text}")
    if held := {run["held_s"] for run in runs} - {0.0}:
        parts.append(f"held {_seconds(max(held))}")
    if updated := [run["updated_s"] for run in runs if "updated_s" in run]:
        number = sum(run["updates"] for run in runs) / len(runs)
        parts.append(f"{number:.3g} updates, the next after {_seconds(median(updated))}")
    parts.append("started anew" if fault.is_final else f"whole {_seconds(median(run['whole_s'] for run in runs))}")
    return "<br>".join([*parts, f"n={len(runs)}"])


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
