"""Callboard on a CPU against llama.cpp and transformers: the same file, the same number of threads, in turns.

    pip install xllamacpp                                  # a wheel of llama.cpp
    python -m benchmarks.cpu_peers --output benchmarks/results/cpu_peers.jsonl
    python -m benchmarks.cpu_peers --model model.gguf --cells decode prompt --threads 1 2 4 --rounds 7
    python -m benchmarks.cpu_peers --isa avx2              # Callboard without AVX-512 and AMX
    python -m benchmarks.cpu_peers --peers transformers --cells decode prompt --set dtype=float32  # both in float32

Each side runs in a process of its own. A round measures the sides one after another, and all but one are stopped.
Answers are greedy, EOS is ignored, and prompts are random token ids that differ in each round.

    | cell | what | Callboard | llama.cpp |
    | --- | --- | --- | --- |
    | decode | 16 tokens in, 64 out, after the first token | the engine | `llama_decode` and its greedy sampler |
    | batch8 | the same eight times at once, prompts included | LLM.generate | its server in the process, 8 slots |
    | prompt | 480 tokens until the first token | the engine | `llama_decode` |
    | http | one stream, after its first event | `callboard serve` | its HTTP server, 1 slot |
    | load | from the command until /health answers 200 | the same | the same |
    | memory | when ready, with a KV cache of 4,096 tokens | the same | the same |
    | deterministic | decode, batch8 and prompt with deterministic=true | against Callboard itself | - |

A figure is the median of the rounds. A ratio is the median of the rounds' ratios, above 1 if Callboard is better.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actors.ray.environment import quiet_port
from benchmarks.cpu_peers import servers
from benchmarks.cpu_peers.dense_copy import write_dense_copy
from benchmarks.cpu_peers.figures import CALLBOARD, DEFAULT, DETERMINISTIC, Row, rows_of, table
from benchmarks.cpu_peers.jobs import Job
from benchmarks.cpu_peers.machine import cpu, environment_of, versions
from benchmarks.cpu_peers.side import Rounds, Side, SideError, closing_all, in_turns
from benchmarks.library.measure import Results, engine_config
from runtime.base.config import DEFAULT_MODEL
from runtime.loading.resolve import resolve

IN_PROCESS, SERVED = ("decode", "batch8", "prompt"), ("http", "load", "memory")
_QUIET_LOAD = 0.5  # processes, at the start of the program
PEERS = ("llama.cpp", "transformers")


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file, or what names one")
    cells = (*IN_PROCESS, *SERVED, DETERMINISTIC)
    parser.add_argument("--cells", nargs="*", choices=cells, default=list(cells), metavar="CELL", help=", ".join(cells))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, len(os.sched_getaffinity(0))], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each cell")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of Callboard's EngineConfig"
    )
    parser.add_argument("--isa", choices=("native", "avx2"), default="native", help="instructions of Callboard")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS[:1], metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--output", "--out", type=Path, metavar="FILE", help="append JSON lines to this file")
    return parser


def absent_peers(args: argparse.Namespace, path: Path) -> dict[str, str]:
    """The peers that cannot run, with the reason."""
    reasons = {}
    if find_spec("xllamacpp") is None:
        reasons["llama.cpp"] = "the package xllamacpp is not installed."
    elif path.suffix != ".gguf":
        reasons["llama.cpp"] = "the model is not a GGUF file."
    if find_spec("transformers") is None:
        reasons["transformers"] = "the package is not installed."
    return {name: reason for name, reason in reasons.items() if name in args.peers}


class Benchmark:
    """One run of the program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._env = args, environment_of(args.isa)
        self._path = resolve(args.model)
        self._results = Results("cpu_peers", args.output, show=False)
        name, flags = cpu()
        load = os.getloadavg()[0]
        if load > _QUIET_LOAD:
            print(f"Other work runs on this machine: its load is {load:.1f}. The figures are not reliable.\n")
        self._common: dict[str, Any] = {
            "cpu": name, "cpu_flags": flags, "load_at_start": load, "packages": versions(), "isa": args.isa,
            "set": args.set,
        }  # fmt: skip
        self.threads = list(dict.fromkeys(args.threads))
        self._absent = absent_peers(args, self._path)  # peer -> the reason
        self.peers = [name for name in args.peers if name not in self._absent]

    def run(self) -> None:
        cells, rows = self._args.cells, list[Row]()
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            if own := [cell for cell in IN_PROCESS if cell in cells]:
                rows += [row for threads in self.threads for row in self._in_process(own, threads)]
            rows += self._served([cell for cell in SERVED if cell in cells])
        if rows:
            absent = "".join(f"{name} is absent: {reason}\n\n" for name, reason in self._absent.items())
            print(f"\n{self._title()}\n\n{table(rows, [CALLBOARD, *self.peers])}\n\n{absent}", flush=True)
        if DETERMINISTIC in cells:
            rows = [row for threads in self.threads for row in self._deterministic(threads)]
            print(f"{table(rows, [DETERMINISTIC, DEFAULT])}\n", flush=True)

    def _title(self) -> str:
        mib = self._path.stat().st_size / (1 << 20) if self._path.is_file() else 0
        return f"{self._path.name}{f' ({mib:.0f} MiB)' if mib else ''} on {self._common['cpu']}, {self._args.isa}"

    # ---- cells ------------------------------------------------------------------------------------------------------

    def _in_process(self, cells: list[str], threads: int) -> list[Row]:
        sides, rows = dict[str, Side](), list[Row]()
        with closing_all(sides):
            for name in [CALLBOARD, *self.peers]:
                try:
                    sides[name] = self._side(name, threads)
                except SideError as e:
                    if name == CALLBOARD:
                        raise
                    self._absent[name] = str(e)
            self.peers = [name for name in self.peers if name not in self._absent]
            facts = {name: side.facts for name, side in sides.items()}
            for cell in cells:
                rounds = in_turns(sides, cell, self._args.rounds, self._args.new_tokens)
                rows += self._rows(cell, threads, rounds, facts)
        return rows

    def _side(self, name: str, threads: int, more: tuple[str, ...] = ()) -> Side:
        settings: dict[str, Any] = {"model": str(self._path), "threads": threads}
        if name == CALLBOARD:
            return Side("callboard", settings | {"set": [*self._args.set, *more]}, self._env)
        if name == "llama.cpp":
            return Side("llama_cpp", settings, {})
        folder = self._folder / "dense"
        if not folder.exists():
            folder.mkdir()
            write_dense_copy(self._path, folder)
        return Side("transformers_side", settings | {"model": str(folder), "dtype": "float32"}, self._env)

    def _deterministic(self, threads: int) -> list[Row]:
        sides, rows = dict[str, Side](), list[Row]()
        with closing_all(sides):
            sides[DETERMINISTIC] = self._side(CALLBOARD, threads, ("deterministic=true",))
            sides[DEFAULT] = self._side(CALLBOARD, threads)
            for cell in IN_PROCESS:
                rounds = in_turns(sides, cell, self._args.rounds, self._args.new_tokens)
                rows += self._rows(cell, threads, rounds, {}, "deterministic ")
        return rows

    def _served(self, cells: list[str]) -> list[Row]:
        """The rows of starts of servers. Load and memory are measured with the most threads alone."""
        rows, model = list[Row](), str(self._path)
        names = [CALLBOARD, *(name for name in self.peers if name == "llama.cpp")]
        for threads in self.threads if "http" in cells else [max(self.threads)] if cells else []:
            rounds: Rounds = {name: [] for name in names}
            for number in range(self._args.rounds):
                for name in names:
                    port = quiet_port()
                    command, env = servers.llama_cpp_command(model, threads, port), dict[str, str]()
                    if name == CALLBOARD:
                        command, env = servers.callboard_command(model, threads, port, self._args.set), self._env
                    job = Job("http", number, self._args.new_tokens) if "http" in cells else None
                    rounds[name].append(servers.measure_start(command, port, env, job))
            for cell in cells:
                if cell == "http" or threads == max(self.threads):
                    rows += self._rows(cell, threads, rounds, {})
        return rows

    # ---- results ----------------------------------------------------------------------------------------------------

    def _rows(self, cell: str, threads: int, rounds: Rounds, facts: dict[str, Any], prefix: str = "") -> list[Row]:
        rows = rows_of(cell, threads, rounds, prefix)
        size = self._path.stat().st_size if self._path.is_file() else None
        for row in rows:
            self._results.add(
                **self._common, cell=row.cell, figure=row.text, threads=threads, model=self._path.name, file_bytes=size,
                rounds=self._args.rounds, new_tokens=self._args.new_tokens, sides=facts, medians=row.medians,
                ranges=row.ranges, ratios=row.ratios,
            )  # fmt: skip
        return rows


def main() -> None:
    args = new_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the sides too
    engine_config(args.set)
    Benchmark(args).run()


if __name__ == "__main__":
    main()
