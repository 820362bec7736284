"""One start of each HTTP server: the seconds until it is ready, its memory, and one stream of tokens.

Each round starts each server anew, and stops it before the other one starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_peers.jobs import PROMPT_TOKENS, Job
from benchmarks.cpu_peers.side import Log, SideError
from benchmarks.library.servers import NotReady, server, tree_of
from serve_app.bench.client import Client, Turn

CONTEXT = 4096  # tokens of the context, and of the KV cache, of both servers
_BLOCK = 16  # tokens; Callboard's default block_size
_STREAMS = 3  # of a start, one after the other
_START_S = 120.0
_MIB = 1 << 20


def flags_of(settings: list[str]) -> list[str]:
    """FIELD=VALUE pairs as flags of `callboard serve`."""
    flags = []
    for name, _, value in (setting.partition("=") for setting in settings):
        name = name.replace("_", "-")
        flags += {"true": [f"--{name}"], "false": [f"--no-{name}"]}.get(value, [f"--{name}", value])
    return flags


def callboard_command(model: str, threads: int, port: int, settings: list[str]) -> list[str]:
    size = ["--max-model-len", str(CONTEXT), "--num-kv-blocks", str(CONTEXT // _BLOCK + 1)]  # one is the null block
    flags = ["--port", str(port), "--num-threads", str(threads), "--device", "cpu", *size, *flags_of(settings)]
    return [sys.executable, "-m", "serve_app.cli", "serve", model, *flags]


def llama_cpp_command(model: str, threads: int, port: int) -> list[str]:
    settings: dict[str, Any] = {"model": model, "threads": threads, "port": port, "context": CONTEXT}
    return [sys.executable, "-m", "benchmarks.cpu_peers.llama_cpp", json.dumps(settings)]


def measure_start(command: list[str], port: int, env: Mapping[str, str], job: Job | None) -> dict[str, float]:
    """Start a server, measure it, and stop it. Without a job it gets no requests."""
    log, begin = Log(), time.perf_counter()
    try:
        with server(command, port, env=env, log=log.file, start_s=_START_S) as process:
            figures = {"ready_s": time.perf_counter() - begin} | memory_of(process.pid)
            return figures if job is None else figures | asyncio.run(_streams(f"http://127.0.0.1:{port}", job))
    except NotReady as e:
        raise SideError(f"{e}\n{log.last_lines()}") from None


async def _streams(url: str, job: Job) -> dict[str, float]:
    """The speed of one stream after its first event, and the time until that event; medians of a few streams."""
    client = await asyncio.to_thread(Client, url)
    rates, firsts = [], []
    for prompt in job.prompts(_STREAMS + 1, PROMPT_TOKENS):
        turn = Turn(prompt, job.new_tokens)
        await client.ask(turn)
        assert turn.num_tokens == job.new_tokens, f"{turn.num_tokens} tokens"
        rates.append((turn.num_tokens - 1) / (turn.events[-1] - turn.events[0]))
        firsts.append(turn.events[0] - turn.sent)
    return {"tok_s": median(rates[1:]), "ttft_ms": 1e3 * median(firsts[1:])}  # the first stream warms up


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory_of(root: int) -> dict[str, float]:
    """MiB of a process and its descendants.

    `model_mib` is the highest peak of one process, which is the one with the model. `all_mib` is the memory of all,
    where each of several processes with a page has its share of that page."""
    peaks, shares = [0.0], [0.0]
    for pid in tree_of(root):
        with contextlib.suppress(OSError):
            peaks.append(_kib(Path(f"/proc/{pid}/status"), "VmHWM:") * 1024 / _MIB)
            shares.append(_kib(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") * 1024 / _MIB)
    return {"model_mib": max(peaks), "all_mib": sum(shares)}


def _kib(path: Path, field: str) -> int:
    """A field of a file of /proc; 0 if it is missing, as in that of a process that has ended."""
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(field)), 0)
