"""JSON lines of the benchmarks -> HISTORY.md: what was measured more than once, by date, so that a slower tree is seen.

    python -m benchmarks.library.history                  # after a benchmark has appended its lines with --out
    python -m benchmarks.library.history --slower 0.03    # also exits with 1 if a last figure is 3 % below the best

The best is that from all earlier dates with the same settings, on the same card or else the same number of cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.library.report import BENCHMARKS, SUBJECTS, Line, number, settings

_TIMES = ("s", "ms", "us")  # units in which less is better
_HEAD = (
    "# History\n\n`python -m benchmarks.library.history` writes this page from JSON lines. Each row is a measurement "
    "that\nwas repeated with the same settings, on the same card or else the same number of cores. The last column "
    "compares\nthe last figure with the best one before: below 1.00 it is slower.\n\n"
    "| subject | measurement | machine | unit | figures, each with its date and commit | last / best before |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


class Past(NamedTuple):
    """A measurement's figures by date."""

    cells: tuple[str, ...]  # subject, measurement, machine, unit
    figures: list[tuple[str, str, float]]  # date, commit, value; the oldest first

    @property
    def ratio(self) -> float:
        """The last figure against the best one before, above 1 if it is better."""
        *before, last = (value for _, _, value in self.figures)
        return min(before) / last if self.cells[3] in _TIMES else last / max(before)


def pasts(lines: Iterable[Line]) -> list[Past]:
    """Measurements with more than one date, in the order of the report's subjects. A day's last figure counts."""
    found = list[Past]()
    ordered = sorted(lines, key=lambda line: str(line["time"]))
    for name, subject in SUBJECTS.items():
        own = dict[tuple[str, ...], Past]()
        for line in ordered:
            row = subject.row(line) if line["benchmark"] in subject.benchmarks else None
            if row is None or not row.value:
                continue
            machine = line["machine"].partition(", ")[0]
            keys = machine, *(str(line.get(key)) for key in subject.keys)
            config = settings(line)
            cells = name, row.label if row.label.endswith(config) else f"{row.label} {config}", machine, subject.unit
            past = own.setdefault(keys, Past(cells, []))
            date = line["time"][:10]
            if past.figures and past.figures[-1][0] == date:
                past.figures.pop()
            past.figures.append((date, line["versions"]["commit"], row.value))
        found += [past for past in own.values() if len(past.figures) > 1]
    return found


def markdown(found: list[Past]) -> str:
    rows = []
    for past in found:
        figures = "; ".join(f"{number(value)} ({date}, {commit})" for date, commit, value in past.figures)
        rows.append("| " + " | ".join((*past.cells, figures, f"{past.ratio:.2f}")) + " |")
    return "\n".join([_HEAD, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="by default all of benchmarks/results")
    parser.add_argument("--into", type=Path, default=BENCHMARKS, help="folder of HISTORY.md")
    parser.add_argument("--slower", type=float, metavar="SHARE", help="list what became slower by more than this")
    args = parser.parse_args()
    files = args.files or sorted((BENCHMARKS / "results").glob("*.jsonl"))
    lines = [json.loads(text) for file in files if file.name != "peer.jsonl" for text in file.read_text().splitlines()]
    found = pasts(line for line in lines if "benchmark" in line)
    (args.into / "HISTORY.md").write_text(markdown(found))
    slower = [past for past in found if args.slower is not None and past.ratio < 1 - args.slower]
    for past in slower:
        print(f"{past.ratio:.2f} of the best: {', '.join(past.cells[:3])}")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
