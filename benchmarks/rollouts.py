"""Rollouts for another Ray job: the cost of RolloutClient, the Serve handle and HTTP; the client's share of an engine.

    python -m benchmarks.rollouts ways [--tick-ms 5] [--streams 64]          # a toy engine behind a real front
    python -m benchmarks.rollouts engine MODEL [--cell 256x128x256]          # the engine alone, in this process
    python -m benchmarks.rollouts client MODEL [--cell 256x128x256]          # the same requests by the client

`ways` prints the CPU time of a token and of a request for each way. One figure adds up the caller, the front and
HAProxy; the other is the engine's. Two loads of different lengths give both. `engine` and `client` print output tokens
a second of batches of BATCHxINxOUT, all requested at once, with log-probabilities. MODEL is a folder, such as one of
`benchmarks.library.make_random_model`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serving.front_door import (  # sets Ray's environment, before Ray is imported
    APP,
    Replica,
    ToyEngine,
    ToyRunner,
    cpu_times,
)

import ray  # isort: skip
from ray import serve  # isort: skip

from actors.client import RolloutClient
from actors.ray.names import NAMESPACE, engines_of, new_name
from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.base.types import Request, SamplingParams

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
    from serve_app.front import Front
    from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    runner = ray.remote(max_concurrency=4)(ToyRunner).remote(list(range(1000, 2000)), args.tick_ms / 1e3)
    replica = ray.remote(num_cpus=0)(Replica).options(name="toy#toy", namespace="serve").remote()
    config = EngineConfig(model=DEFAULT_MODEL)
    name = new_name(f"{engines_of(APP, config)}toy")
    engine: Any = ray.remote(ToyEngine).options(name=name, namespace=NAMESPACE).remote()
    ray.get(engine.start.remote(runner))
    engine_pid = ray.get(engine.pid.remote())
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    front: Any = serve.deployment(serve.ingress()(Front), num_replicas=1, max_ongoing_requests=4096)
    serve.run(
        front.bind(ModelSettings.of_all([(config, ("toy",), ScalingSettings())]), HttpSettings(), [None]), name=APP
    )
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
    ray.kill(replica)
    serve.shutdown()
    ray.shutdown()


# ---- the client's share of an engine --------------------------------------------------------------------------------


def prompts_of(cell: tuple[int, ...], vocab_size: int, repeat: int) -> list[list[int]]:
    """Random prompts. Prompts of different repeats share no block."""
    batch, prompt_len, _ = cell
    return np.random.default_rng(repeat).integers(0, vocab_size, (batch, prompt_len)).tolist()


def params_of(cell: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(max_tokens=cell[2], ignore_eos=True, logprobs=0)


def engine_alone(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rate of an EngineCore and a runner in this process."""
    from benchmarks.library.measure import engine_config
    from runtime.assembly.engine import build_engine, speculation_of
    from runtime.assembly.runner import build_runner
    from runtime.core.executor import InProcess
    from runtime.worker.sources import CheckpointSource

    config = engine_config(args.set, model=args.model)
    runner = build_runner(config, CheckpointSource(Path(args.model)))
    core = build_engine(config, runner.info, InProcess(runner), speculation_of(config, runner.info, time.perf_counter))

    def run(repeat: int) -> int:
        for i, prompt in enumerate(prompts_of(args.cell, runner.info.vocab_size, repeat)):
            core.add(Request(f"{repeat}.{i}", prompt, len(prompt), params_of(args.cell), seed=i))
        found = 0
        while core.has_work:
            output = core.step()
            found += 0 if output is None else len(output.token_ids)
        return found

    yield rate_of("engine", run, args)


def client_of_engine(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rate of the client with the same engine behind Serve."""
    from callboard.app import AppArgs, build_app

    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    settings = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.set)}
    serve.run(build_app(AppArgs(model=args.model, num_fronts=1, **settings)), name=APP)
    with RolloutClient.connect(APP) as client:

        def run(repeat: int) -> int:
            prompts = prompts_of(args.cell, client.info.vocab_size, repeat)
            found = client.generate(prompts, params_of(args.cell), seeds=repeat, max_in_flight=len(prompts))
            return sum(len(rollout.token_ids) for rollout in found)

        before = time.process_time()
        figures = rate_of("client", run, args)
        figures["us_a_token"] = (time.process_time() - before) / figures.pop("num_tokens") * 1e6
        yield figures
    serve.shutdown()
    ray.shutdown()


def rate_of(way: str, run: Callable[[int], int], args: argparse.Namespace) -> dict[str, Any]:
    rates, total = [], 0
    for repeat in range(args.repeats + 1):
        start = time.perf_counter()
        found = run(repeat)
        rates.append(found / (time.perf_counter() - start))
        total += found
    rates = rates[1:]  # the first one warms up
    return {
        "way": way,
        "cell": args.cell,
        "tok_s": median(rates),
        "range": [min(rates), max(rates)],
        "num_tokens": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["ways", "engine", "client"])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--tick-ms", type=float, default=5, help="time of a toy engine's step")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--cell", type=lambda t: tuple(map(int, t.split("x"))), default=(256, 128, 256))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args()
    from benchmarks.library.measure import Results

    results = Results("rollouts", args.out)
    of_mode = {"ways": ways, "engine": engine_alone, "client": client_of_engine}
    for figures in of_mode[args.mode](args):
        settings = {"tick_ms": args.tick_ms, "streams": args.streams} if args.mode == "ways" else {"set": args.set}
        results.add(**settings, **figures)


if __name__ == "__main__":
    main()
