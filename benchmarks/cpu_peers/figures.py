"""The figures of each cell, their medians and ratios, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cpu_peers.side import Rounds

CALLBOARD = "callboard"
DETERMINISTIC, DEFAULT = "deterministic", "default"
TITLES = {CALLBOARD: "Callboard"}  # of columns that do not have the name of their side


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a cell."""

    key: str  # in the results of a side
    text: str
    is_better_if_lower: bool = False


_SPEED = Figure("tok_s", "tok/s")
FIGURES: dict[str, tuple[Figure, ...]] = {  # by cell
    "decode": (_SPEED, Figure("cpu_ms", "CPU ms a token", True)),
    "http": (_SPEED, Figure("ttft_ms", "ms to the first token", True)),
    "batch8": (_SPEED,),
    "prompt": (Figure("tok_s", "prompt tok/s"),),
    "load": (Figure("ready_s", "s until ready", True),),
    "memory": (Figure("model_mib", "MiB, model's process", True), Figure("all_mib", "MiB, all processes", True)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all sides."""

    cell: str
    text: str
    threads: int
    medians: dict[str, float]  # by side
    ranges: dict[str, tuple[float, float]]
    ratios: dict[str, float]  # by side other than the first


def rows_of(cell: str, threads: int, rounds: Rounds, prefix: str = "") -> list[Row]:
    """The rows of a cell. A ratio compares the first side with another: the median of the rounds' ratios, above 1 if
    the first side is better. Thus a machine that slows down for some rounds does not change it."""
    first, *others = rounds
    rows = []
    for figure in FIGURES[cell]:
        values = {name: [each[figure.key] for each in found] for name, found in rounds.items()}
        pairs = {name: list(zip(values[first], values[name], strict=True)) for name in others}
        ratios = {
            name: median(theirs / ours if figure.is_better_if_lower else ours / theirs for ours, theirs in each)
            for name, each in pairs.items()
        }
        medians = {name: median(each) for name, each in values.items()}
        ranges = {name: (min(each), max(each)) for name, each in values.items()}
        rows.append(Row(prefix + cell, figure.text, threads, medians, ranges, ratios))
    return rows


def table(rows: Sequence[Row], sides: Sequence[str]) -> str:
    """A Markdown table. `sides` are the columns, the compared side first; a row may lack some of them."""
    first, *others = sides
    head = ["cell", "threads", TITLES.get(first, first)]
    for name in others:
        head += [TITLES.get(name, name), "ratio"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        line = [f"{row.cell}, {row.text}", str(row.threads), number(row.medians[first])]
        for name in others:
            found = name in row.medians
            line += [number(row.medians[name]), f"{row.ratios[name]:.2f}"] if found else ["-", "-"]
        lines.append(line)
    return _markdown(lines)


def number(value: float) -> str:
    """Three significant digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
