"""The cost of the path from the engine to an HTTP client: a toy engine behind the real front.

    python -m benchmarks.serving.front_door [--streams 1 8 64 256] [--fronts 1] [--tick-ms 25]

A runner process samples one token a live request every tick and records the time. The same requests are read twice:
over HTTP and SSE through HAProxy and the front replicas, and directly from an engine link (the bare engine). Token
latency is from the runner's note to the client's read; all processes share this machine. CPU is the cost of a delivered
token for the front replicas, HAProxy and the engine while streams are read over HTTP, prompts and ends included. A
token that waits is coalesced with the next one, so a loaded front writes fewer events than tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actors.ray.environment import quiet_port, single_machine
from actors.ray.process import freeze_garbage

_folder = tempfile.TemporaryDirectory(prefix="callboard-")
os.environ.update(single_machine(_folder.name))

import ray  # noqa: E402
from ray import serve  # noqa: E402

from actors.engine.loop import EngineLoop  # noqa: E402
from actors.front.engine_group import EngineGroup  # noqa: E402
from actors.ray.directory import RayDirectory  # noqa: E402
from actors.ray.names import NAMESPACE, engines_of, new_name  # noqa: E402
from actors.runners.step_channel import SocketExecutor, serve_steps  # noqa: E402
from actors.wire.transport import Address, connect  # noqa: E402
from runtime.base.config import DEFAULT_MODEL, EngineConfig  # noqa: E402
from runtime.base.model_info import ModelInfo  # noqa: E402
from runtime.base.types import Request, SamplingParams  # noqa: E402
from runtime.core.executor import Executor  # noqa: E402
from runtime.core.plan import StepPlan, StepResult  # noqa: E402
from runtime.loading.resolve import resolve  # noqa: E402
from runtime.text.tokenizer import Tokenizer  # noqa: E402
from serve_app.front import Front  # noqa: E402
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings  # noqa: E402

TOKENS = 160  # a request
APP = f"front-door-{os.getpid()}"  # its processes carry the name
INFO = ModelInfo("toy", 49152, 8192, (2,), 20_000, 16, "none", "none")
CONFIG = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=8192)


class ToyRunner:
    """One token a live row at every tick; the token is the number of the tick."""

    asynchronous = True

    def __init__(self, words: list[int], tick_s: float) -> None:
        self._words, self._tick_s = words, tick_s
        self._stamps: dict[int, float] = {}
        self._next = time.monotonic()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._execute, plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        now = time.monotonic()
        self._next = max(self._next + self._tick_s, now)
        time.sleep(self._next - now)
        word = self._words[plan.step_id % len(self._words)]
        self._stamps[word] = time.monotonic()
        return StepResult(plan.step_id, np.full(int(plan.num_samples.sum()), word, np.int32))

    def attach(self, address: Any) -> None:
        threading.Thread(target=serve_steps, args=(connect(address), self), daemon=True).start()

    def stamps(self) -> dict[int, float]:
        return self._stamps


class Replica:
    """Takes the place of an engine's Serve replica, which every engine needs."""


class Handle:
    """Takes the place of the engines' Serve handle, by which a front wakes them up."""

    class wake:
        @staticmethod
        def remote() -> None:
            """Do nothing: the engine is awake."""


class ToyEngine:
    """The real engine loop around a toy runner."""

    async def start(self, runner: Any) -> None:
        def start_runners() -> tuple[Executor, ModelInfo]:
            executor = SocketExecutor(1)
            runner.attach.remote(executor.address(0))
            executor.accept()
            return executor, INFO

        unused = lambda *arguments: None  # noqa: E731  # adapters, sleep and weights
        self._loop = await asyncio.to_thread(EngineLoop, CONFIG, start_runners, unused, unused, unused)
        freeze_garbage()

    async def health(self) -> None:
        """It takes requests."""

    async def pid(self) -> int:
        return os.getpid()

    async def open_link(self, node_id: str) -> tuple[Address, ModelInfo]:
        return self._loop.links.open(True, "127.0.0.1"), INFO


def cpu_times(engine_pid: int) -> dict[tuple[str, int], float]:
    """Seconds of CPU that each process on a token's way has used, by its part and id."""
    times = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (path / "cmdline").read_bytes(), (path / "stat").read_text()
        except OSError:  # it has ended since
            continue
        if command.startswith(f"ray::ServeReplica:{APP}:Front".encode()):
            part = "front"
        elif b"haproxy" in command and _folder.name.encode() in command:
            part = "haproxy"
        elif int(path.name) == engine_pid:
            part = "engine"
        else:
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        times[part, int(path.name)] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return times


@contextlib.contextmanager
def toy_application(
    words: list[int], tick_s: float, model: str = DEFAULT_MODEL, fronts: int = 1
) -> Iterator[tuple[int, Any, Any]]:
    """Real fronts and a real engine loop around a toy runner: the port, the runner and the engine."""
    port = quiet_port()
    ray.init(num_cpus=5 + fronts, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    runner: Any = ray.remote(max_concurrency=4)(ToyRunner).remote(words, tick_s)  # type: ignore[call-overload]
    replica = ray.remote(num_cpus=0)(Replica).options(name="toy#toy", namespace="serve").remote()  # type: ignore[call-overload]
    config, remote_engine = EngineConfig(model=model), ray.remote(ToyEngine)
    name = new_name(f"{engines_of(APP, config)}toy")
    engine: Any = remote_engine.options(name=name, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]
    ray.get(engine.start.remote(runner))
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    front = serve.deployment(serve.ingress()(Front), num_replicas=fronts, max_ongoing_requests=4096)
    models = ModelSettings.of_all([(config, ("toy",), ScalingSettings())])
    serve.run(front.bind(models, HttpSettings(), [Handle()]), name=APP)
    try:
        yield port, runner, engine
    finally:
        ray.kill(replica)
        serve.shutdown()
        ray.shutdown()


async def read_http(port: int, words: dict[str, int], seen: list[tuple[int, float]]) -> int:
    """One streamed completion, read with as little client as possible: it shares the cores.
    Returns its number of events."""
    num_events = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "Hi", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    while True:
        line = await reader.readline()
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: "):
            num_events += 1
            for word in json.loads(line[6:])["choices"][0]["text"].split():
                seen.append((words[word], now))
    writer.close()
    return num_events


async def read_link(link: Any, number: int, seen: list[tuple[int, float]]) -> None:
    """The same request without HTTP and text."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    async for output in link.generate(Request(f"{number}", [5, 6], 2, params)):
        now = time.monotonic()
        seen.extend((token, now) for token in output.token_ids)


async def measure(runner: Any, engine: Any, port: int, words: dict[str, int], cases: list[int]) -> None:
    link = EngineGroup(RayDirectory(engines_of(APP)))
    await link.start()
    engine_pid = await engine.pid.remote()
    print(
        "| streams | bare engine p50 / p99 ms | through HTTP p50 / p99 ms | delivered tok/s | tokens an event ", end=""
    )
    print("| CPU us a token: front + HAProxy + engine |\n|---|---|---|---|---|---|")
    for streams in cases:
        figures = []
        for mode in ("link", "http"):
            seen: list[tuple[int, float]] = []
            start, before = time.monotonic(), cpu_times(engine_pid)
            if mode == "link":
                await asyncio.gather(*(read_link(link, i, seen) for i in range(streams)))
            else:
                num_events = sum(await asyncio.gather(*(read_http(port, words, seen) for _ in range(streams))))
            seconds, after = time.monotonic() - start, cpu_times(engine_pid)
            assert len(seen) == streams * TOKENS, f"{len(seen)} tokens arrived of {streams * TOKENS}"
            stamps = await runner.stamps.remote()
            figures.append("{:.2f} / {:.2f}".format(*np.percentile([(t - stamps[i]) * 1e3 for i, t in seen], [50, 99])))
        costs = dict.fromkeys(("front", "haproxy", "engine"), 0.0)
        for key, used in after.items():
            costs[key[0]] += (used - before.get(key, 0.0)) / len(seen) * 1e6
        cpu = " + ".join(f"{us:.0f}" for us in costs.values())
        print(f"| {streams} | {figures[0]} | {figures[1]} | {len(seen) / seconds:.0f} ", end="")
        print(f"| {len(seen) / num_events:.2f} | {cpu} |", flush=True)
    link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer turns tokens into text")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64, 256], help="streams read at once")
    parser.add_argument("--fronts", type=int, default=1, help="front replicas")
    parser.add_argument("--tick-ms", type=float, default=25, help="time of a step; 0: as fast as it goes")
    args = parser.parse_args()
    path = resolve(args.model)
    tokenizer = Tokenizer.load(path)
    words: dict[str, int] = {}
    for token in range(1000, 40_000):
        text = tokenizer.decode([token])
        if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha():
            words.setdefault(text[1:], token)
    with toy_application(list(words.values()), args.tick_ms / 1e3, args.model, args.fronts) as (port, runner, engine):
        freeze_garbage()
        asyncio.run(measure(runner, engine, port, words, args.streams))


if __name__ == "__main__":
    main()
