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

Made by `python -m benchmarks.faults --page` from `benchmarks/results/faults.jsonl`; nothing here is written by hand.
`python -m benchmarks.faults` does each fault to a living application of two engines, each on a node of its own, and
two fronts, while streams are read over HTTP, each client asking again when its answer is complete. The model is tiny,
and each of its steps is slowed to a larger one's. Every token is compared with what the model says undisturbed.

A cell says, of all its repeats: requests lost (that ended with an error, or never) and tokens that were lost, doubled
or changed; the longest pause of a stream that was hit, p50 / worst, and the worst of the others; how long after the
fault, or after its end where it is undone, the application had all its processes and links again. Where clients lost
connections they asked again with the tokens that they had, and the answers went on. The last line of a cell, `n`, is
the number of its repeats; the [table of repeats](#repeats) has all of them at once. Cells with one or two repeats were
measured on a busy machine of two cores: they show that nothing is lost, not how long a pause is.
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
    return ["## Repeats", "", f"Cells by their number of repeats, of {len(possible)}: {text}.", "", *rows]


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
    for name, text in (("cut", "connections cut"), ("refused", "told to come back")):
        if number := sum(run[name] for run in runs):
            parts.append(f"{number / len(runs):.3g} {text}")
    if held := {run["held_s"] for run in runs} - {0.0}:
        parts.append(f"held {_seconds(max(held))}")
    parts.append("started anew" if fault.is_final else f"whole {_seconds(median(run['whole_s'] for run in runs))}")
    return "<br>".join([*parts, f"n={len(runs)}"])


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _legend(told: list[dict[str, Any]]) -> list[str]:
    whole: Callable[[str], list[Any]] = lambda name: sorted({line[name] for line in told})  # noqa: E731
    text = ["## Rows", "", *(f"- **{fault.name}**: {fault.text}." for fault in FAULTS)]
    text += [f"- **{name}** has no row: {why}." for name, why in ABSENT.items()]
    text += ["", "## Columns", "", *(f"- **{name}**: {what}." for name, what in WHEN.items()), ""]
    if told:
        commits = sorted({line["versions"]["commit"] for line in told})
        text += [
            f"Measured on {', '.join(whole('machine'))}, commit {', '.join(commits)}: "
            f"{', '.join(map(str, whole('streams')))} streams of {', '.join(map(str, whole('num_tokens')))} tokens, "
            f"steps of {', '.join(map(str, whole('step_ms')))} ms, step_timeout_s "
            f"{', '.join(map(str, whole('step_timeout_s')))}.",
            "",
        ]
    return text
