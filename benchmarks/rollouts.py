"""Rollouts for another Ray job: the cost of RolloutClient, the Serve handle and HTTP, with a toy engine.

    python -m benchmarks.rollouts ways [--tick-ms 5] [--streams 64]

Prints the CPU time of a token and of a request for each way. One figure adds up the caller, the front and HAProxy; the
other is the engine's. Two loads of different lengths give both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.serving.front_door import APP, cpu_times, toy_application  # first: it sets the environment of Ray

import ray  # isort: skip
from ray import serve  # isort: skip

from actors.client import RolloutClient
from benchmarks.library.measure import Results, new_parser
from runtime.base.types import SamplingParams

LOADS = {"long": (384, 160), "short": (3072, 5)}  # requests, tokens of each
PROMPT_LEN = 32
WAYS = ["client", "handle", "http stream", "http"]


# ---- ways to a toy engine -------------------------------------------------------------------------------------------


async def in_turns(num: int, streams: int, one: Callable[[int], Awaitable[int]]) -> int:
    """Run `one` for each number, `streams` of them at once; return the sum of their tokens."""
    numbers, total = iter(range(num)), 0

    async def work() -> None:
        nonlocal total
        for number in numbers:
            found = await one(number)
            total += found

    await asyncio.gather(*(work() for _ in range(streams)))
    return total


def body_of(number: int, num_tokens: int) -> dict[str, Any]:
    """A completion for token ids, without the work on its text that the server can leave out."""
    prompt = [5 + number % 1000] * PROMPT_LEN
    return {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}


class HttpClient:
    """As little client as possible: completions over connections that stay open."""

    def __init__(self, port: int, stream: bool) -> None:
        self._port, self._stream = port, stream
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(self, num_tokens: int, number: int) -> int:
        """Request one completion, and return its number of tokens."""
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24))
        reader, writer = self._idle.pop()
        body = json.dumps(body_of(number, num_tokens) | {"stream": self._stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        headers = await reader.readuntil(b"\r\n\r\n")
        if self._stream:
            found = 0
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                if line.startswith(b"data: "):
                    found += len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
            await reader.readuntil(b"0\r\n\r\n")
        else:
            size = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            found = len(json.loads(await reader.readexactly(size))["choices"][0]["token_ids"])
        self._idle.append((reader, writer))
        return found


async def by_handle(handle: Any, num_tokens: int, number: int) -> int:
    """One request by the Serve handle. Returns its tokens."""
    found = 0
    async for delta in handle.generate.remote(body_of(number, num_tokens)):
        found += len(delta["token_ids"])
    return found


def by_client(client: RolloutClient, num: int, streams: int, num_tokens: int) -> int:
    """All requests by the client. Returns their tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompts = ([5 + number % 1000] * PROMPT_LEN for number in range(num))
    return sum(len(r.token_ids) for r in client.generate(prompts, params, max_in_flight=streams))


def used(engine_pid: int) -> dict[str, float]:
    """Seconds of CPU so far: of the engine, and of all other processes on a token's way, this one included."""
    sums = {"engine": 0.0, "others": time.process_time()}
    for (part, _), seconds in cpu_times(engine_pid).items():
        sums["engine" if part == "engine" else "others"] += seconds
    return sums


def measure(way: str, run: Callable[[int, int], int], engine_pid: int) -> dict[str, Any]:
    """The CPU time of a token and a request, from two loads; `run` takes a number of requests and of their tokens."""
    rows: list[tuple[int, int]] = []
    costs: list[tuple[float, float]] = []
    rate = 0.0
    run(64, 5)
    for load, (num, num_tokens) in LOADS.items():
        before, start = used(engine_pid), time.perf_counter()
        found = run(num, num_tokens)
        seconds, after = time.perf_counter() - start, used(engine_pid)
        assert found == num * num_tokens, f"{way}: {found} tokens of {num * num_tokens}"
        rows.append((num, found))
        costs.append((after["others"] - before["others"], after["engine"] - before["engine"]))
        rate = found / seconds if load == "long" else rate
    (request, engine_request), (token, engine_token) = np.linalg.solve(np.array(rows, float), np.array(costs)) * 1e6
    return {
        "way": way, "us_a_token": token, "us_a_request": request, "engine_us_a_token": engine_token,
        "engine_us_a_request": engine_request, "tok_s": rate,
    }  # fmt: skip


def ways(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way."""
    with toy_application(list(range(1000, 2000)), args.tick_ms / 1e3) as (port, _, engine):
        engine_pid = ray.get(engine.pid.remote())
        handle = serve.get_app_handle(APP).options(stream=True)

        async def all_of(one: Callable[[int, int], Awaitable[int]], num: int, num_tokens: int) -> int:
            return await in_turns(num, args.streams, partial(one, num_tokens))

        with RolloutClient.connect(APP) as client, asyncio.Runner() as loop:
            runs: dict[str, Callable[[int, int], int]] = {
                "client": lambda num, length: by_client(client, num, args.streams, length),
                "handle": lambda *load: loop.run(all_of(partial(by_handle, handle), *load)),
                "http stream": lambda *load: loop.run(all_of(HttpClient(port, True).one, *load)),
                "http": lambda *load: loop.run(all_of(HttpClient(port, False).one, *load)),
            }
            for way in args.ways:
                yield measure(way, runs[way], engine_pid)


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("mode", choices=["ways"])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--tick-ms", type=float, default=5, help="time of a toy engine's step")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    args = parser.parse_args()
    results = Results("rollouts", args.out)
    for figures in ways(args):
        results.add(tick_ms=args.tick_ms, streams=args.streams, **figures)


if __name__ == "__main__":
    main()
