"""The fault matrix: the tokens that are lost, and the pauses of streams, when one process after another is killed.

    python -m benchmarks.faults --faults engine,runner --when decode --repeats 20 --out benchmarks/results/faults.jsonl
    python -m benchmarks.faults --repeats 20 --instances 8 --out benchmarks/results/faults.jsonl   # all of it
    python -m benchmarks.faults --page                                                             # docs/faults.md

A running application of two engines, on two nodes of one Ray, and two fronts gets one fault after another while streams
are read. Applications follow one another: a plain one, one that speculates, one with a hybrid model, and one with
engines of two ranks. The column `update` has two with a trainer, of one rank and of two. The models are tiny, and their
steps are slowed to `--step-ms`. Each token is compared with the undisturbed model's.

A repeat is one JSON line. Repeats that the file already has are skipped, so an interrupted run can be continued.
`--instances` run side by side, with ports, folders and a Ray of their own, and need three cores each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.faults.matrix import FAULTS, WHEN, Fault
from benchmarks.faults.page import PLOT, draw, lines_of, write_page
from benchmarks.library.measure import Results, new_parser

_FIELDS = {  # of the application
    "deterministic": True,
    "num_threads": 1,
    "kv_cache_memory": 0.3,
    "max_model_len": 2048,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "step_timeout_s": 3.0,
}
_DRAFT = {"num_draft_tokens": 3, "draft_kv_cache_memory": 0.3}
_OWN = "verify", "states", "update"  # columns with applications of their own
_RANKS = {"tensor_parallel_size": 2, "rank_invariant": True}  # one rank, undisturbed, gives the same


def selected(names: str | None) -> list[Fault]:
    """`engine` is each row that begins with this word."""
    if names is None:
        return FAULTS
    found = [f for f in FAULTS if any(f.name == n or f.name.startswith(f"{n} ") for n in names.split(","))]
    if not found:
        sys.exit(f"No row is called {names!r}; there are: {', '.join(f.name for f in FAULTS)}.")
    return found


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--faults", help="rows, with commas between; default: all")
    parser.add_argument("--when", help="columns, with commas between; default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--hold-s", type=float, help="how long what is undone lasts; default: each row's own")
    parser.add_argument("--instances", type=int, default=1, help="applications side by side")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="only each N-th cell, from the I-th on")
    parser.add_argument("--page", action="store_true", help="only write docs/faults.md from the JSON lines")
    args = parser.parse_args()
    if args.page:
        write_page()
        draw(lines_of(), PLOT)
        return
    columns = args.when.split(",") if args.when else list(WHEN)
    if unknown := set(columns) - WHEN.keys():
        sys.exit(f"No column is called {unknown.pop()!r}; there are: {', '.join(WHEN)}.")
    if args.instances > 1:
        shares = [f"{i + 1}/{args.instances}" for i in range(args.instances)]
        others = [subprocess.Popen([*_own_command(), "--share", share]) for share in shares]
        sys.exit(max(other.wait() for other in others))
    cells = [(fault, when) for when in columns for fault in selected(args.faults) if not fault.why_not(when)]
    index, count = map(int, args.share.split("/"))
    sys.exit(asyncio.run(_run(cells[index - 1 :: count], args)))


def _own_command() -> list[str]:
    """This command without its number of instances."""
    given = iter(sys.argv[1:])
    arguments = [a for a in given if a != "--instances" or next(given, None) is None]
    return [sys.executable, "-m", "benchmarks.faults", *arguments]


def _done(out: Path | None, streams: int) -> Counter[tuple[str, str]]:
    """Repeats that the file has."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    told = [line for line in map(json.loads, lines) if line["streams"] == streams]
    return Counter((line["fault"], line["when"]) for line in told)


async def _run(cells: list[tuple[Fault, str]], args: argparse.Namespace) -> int:
    done, results, num_failed = _done(args.out, args.streams), Results("faults", args.out), 0
    with tempfile.TemporaryDirectory() as folder:
        tiny, divisible, hybrid = await asyncio.to_thread(_models, Path(folder))
        updates = {"weight_updates": True, "weight_folder": str(divisible)}
        applications: list[tuple[str, int, Path, dict[str, Any]]] = [
            ("", 1, tiny, {}),
            ("verify", 1, tiny, {"draft": str(tiny), **_DRAFT}),
            ("states", 1, hybrid, {}),
            ("", 2, divisible, _RANKS),
            ("update", 1, divisible, updates),
            ("update", 2, divisible, _RANKS | updates),
        ]
        for column, num_ranks, model, fields in applications:
            todo = [(f, w) for f, w in cells if (w if w in _OWN else "", f.num_ranks) == (column, num_ranks)
                    for _ in range(args.repeats - done[f.name, w])]  # fmt: skip
            while todo:
                num_failed += await _with_application(model, _FIELDS | fields, todo, results, args)
    return int(num_failed > 0)


async def _with_application(
    model: Path, fields: dict[str, Any], todo: list[tuple[Fault, str]], results: Results, args: argparse.Namespace
) -> int:
    """Run cells on one application until all are done or it cannot continue; returns how many cells failed."""
    from benchmarks.faults.cell import NUM_TOKENS, PROMPT_LENS, Answers, Cell
    from benchmarks.faults.remote import Remote
    from serve_app.tools.token_client import first_model

    answers: dict[int, Answers] = {}
    async with Remote(model, args.step_ms, fields) as application:
        server, _ = await first_model("127.0.0.1", application.port, {})
        while todo:
            fault, when = todo.pop(0)
            if reason := fault.why_not(when, application.has_disk):
                print(f"{fault.name}, {when}: {reason}", file=sys.stderr)
                continue
            length = PROMPT_LENS.get(when, 20)
            if length not in answers:
                exact = "rank_invariant" in fields
                answers[length] = await asyncio.to_thread(Answers, str(model), args.streams, length, exact)
            begin = time.monotonic()
            try:
                figures = await Cell(application, server, answers[length], fault, when, args.hold_s).run()
            except (TimeoutError, RuntimeError, AssertionError) as e:
                print(f"{fault.name}, {when}: {type(e).__name__}: {e}", file=sys.stderr)
                with contextlib.suppress(OSError):
                    print(application.log()[-3000:], file=sys.stderr)
                return 1
            took = time.monotonic() - begin
            figures |= {"step_ms": args.step_ms, "step_timeout_s": fields["step_timeout_s"], "took_s": took}
            results.add(fault=fault.name, when=when, streams=args.streams, num_tokens=NUM_TOKENS, **figures)
            if fault.is_final:
                break
    return 0


def _models(folder: Path) -> tuple[Path, Path, Path]:
    """One for engines of one rank, one that ranks can divide, and one with recurrent states."""
    from tests.support.models.divisible_model import write_divisible_model
    from tests.support.models.tiny_gguf import write_tiny_gguf
    from tests.support.models.tiny_hybrid import write_tiny_hybrid

    tiny = write_tiny_gguf(folder / "tiny.gguf", llama__context_length=2048, llama__rope__freq_base=10000.0)
    return tiny, write_divisible_model(folder / "divisible"), write_tiny_hybrid(folder / "hybrid.gguf")


if __name__ == "__main__":
    main()
