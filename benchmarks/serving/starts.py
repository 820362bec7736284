"""Starts of `callboard serve`, from the command to the first token: the end of each phase, and the work of each
process.

    python -m benchmarks.serving.starts --table                                # one start, by phase and by process
    python -m benchmarks.serving.starts --count 100 --side-by-side 2           # do all of them become ready?
    python -m benchmarks.library.make_random_model llama-3.1-8b /tmp/8b
    python -m benchmarks.serving.starts --model /tmp/8b --count 3 --table      # compile cache of the one before
    python -m benchmarks.serving.starts --model /tmp/8b --compile-cache cold   # TRITON_CACHE_DIR is an empty folder

A JSON line a start. `phases` are the seconds at which the console reported them, by the clock of the server. `ready_s`
and `first_token_s` run from the command, by this program's clock. `cpu_s` is the time of all its processes until they
were ready. Files are read once before, so that the page cache is warm. `--set max-num-seqs=64` passes flags on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from actors.ray.environment import quiet_port
from benchmarks.library.measure import Results, new_parser
from benchmarks.library.servers import tree_of
from runtime.base.config import DEFAULT_MODEL
from runtime.loading.resolve import resolve

_START_S, _STOP_S = 300, 60
_PHASE = re.compile(r" *([\d.]+) s  (\w+(?: \w+)*)")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what `callboard serve` takes")
    parser.add_argument("--count", type=int, default=1, help="starts")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="of these at the same time")
    parser.add_argument("--compile-cache", choices=("warm", "cold"), default="warm", help="of Triton's kernels")
    parser.add_argument("--table", action="store_true", help="show the processes of each start")
    args = parser.parse_args()
    path = resolve(args.model)
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with file.open("rb") as data:
            while data.read(1 << 24):
                pass
    sys.exit(asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    results, places, started = Results("starts", args.out), asyncio.Semaphore(args.side_by_side), []

    async def one(number: int) -> None:
        async with places:
            start = await _start(args)
        started.append(start)
        what = {"number": number, "model": args.model, "side_by_side": args.side_by_side}
        results.add(**what, compile_cache=args.compile_cache, **start)

    await asyncio.gather(*(one(number) for number in range(args.count)))
    ready = sorted(start["ready_s"] for start in started if start["ready_s"] is not None)
    if ready:
        spread = {"least": ready[0], "median": median(ready), "p90": ready[int(0.9 * (len(ready) - 1))]}
        spread["most"] = ready[-1]
        results.add(count=args.count, side_by_side=args.side_by_side, num_ready=len(ready), ready_s=spread)
    return 0 if len(ready) == args.count else 1


async def _start(args: argparse.Namespace) -> dict[str, Any]:
    """One server, from its command to its end."""
    port = quiet_port()
    flags = [part for setting in args.set for part in (f"--{setting.partition('=')[0]}", setting.partition("=")[2])]
    with tempfile.TemporaryDirectory() as folder:
        cache = {"TRITON_CACHE_DIR": folder} if args.compile_cache == "cold" else {}
        begin = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "serve_app.cli", "serve", args.model, "--port", str(port), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=os.environ | cache, limit=1 << 20,
        )  # fmt: skip
        found: dict[str, Any] = {"ready_s": None, "phases": {}}
        lines: list[str] = []
        try:
            async with asyncio.timeout(_START_S):
                assert process.stdout is not None
                while found["ready_s"] is None and (line := (await process.stdout.readline()).decode()):
                    lines.append(line)
                    if phase := _PHASE.match(line):
                        found["phases"][phase[2]] = float(phase[1])
                    if line.startswith("Callboard serves"):
                        found["ready_s"] = time.monotonic() - begin
            if found["ready_s"] is not None:
                processes = _processes(process.pid)
                found["cpu_s"] = sum(cpu_s for _, cpu_s, _ in processes)
                if args.table:
                    print(_table(processes), file=sys.stderr, flush=True)
                await asyncio.to_thread(_first_token, port)
                found["first_token_s"] = time.monotonic() - begin
        except (TimeoutError, OSError) as e:
            lines.append(repr(e))
            found["ready_s"] = None
        if found["ready_s"] is None:
            found["said"] = lines[-3:]
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), _STOP_S)
        return found


def _first_token(port: int) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=_START_S) as answer:
        json.load(answer)


# ---- by process ------------------------------------------------------------------------------------------------------


def _processes(root: int) -> list[tuple[float, float, str]]:
    """(seconds from the root's start to its own, seconds of CPU, command) of a process and all its descendants."""
    stats = {}
    for pid in tree_of(root):
        path = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it has ended since
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cpu = sum(map(int, fields[11:15]))  # with its ended children's
            stats[pid] = int(fields[19]) * _TICK_S, cpu * _TICK_S, command.strip()
    return sorted((start - stats[root][0], cpu, command) for start, cpu, command in stats.values())


def _table(processes: list[tuple[float, float, str]]) -> str:
    head = f"{'starts':>7} {'CPU s':>7}  process\n"
    total = f"\n{'':>7} {sum(cpu for _, cpu, _ in processes):7.2f}  all"
    return head + "\n".join(f"{start:7.2f} {cpu:7.2f}  {command[:90]}" for start, cpu, command in processes) + total


if __name__ == "__main__":
    main()
