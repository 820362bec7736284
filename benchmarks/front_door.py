"""What the way from the engine to an HTTP client costs: a toy engine behind the real front.

    python benchmarks/front_door.py

A runner process samples one token a live request every 25 ms and notes when. The same requests are read twice: over
HTTP and SSE through HAProxy and a front replica, and straight off an engine link, which is the bare engine. Token
latency is from the runner's note to the client's read; all processes share this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from actors.environment import SINGLE_MACHINE, private_haproxy

_folder = tempfile.TemporaryDirectory(prefix="callboard-")
os.environ.update(SINGLE_MACHINE | private_haproxy(_folder.name))

import ray  # noqa: E402
from ray import serve  # noqa: E402

from actors.channel import SocketExecutor, serve_steps  # noqa: E402
from actors.engine import EngineLoop  # noqa: E402
from actors.frames import LinkAddress  # noqa: E402
from actors.supervisor import NAMESPACE, link_to  # noqa: E402
from runtime.core.config import DEFAULT_MODEL, EngineConfig, ModelInfo  # noqa: E402
from runtime.core.executor import Executor  # noqa: E402
from runtime.core.plan import StepPlan, StepResult  # noqa: E402
from runtime.core.types import Request, SamplingParams  # noqa: E402
from runtime.loading.resolve import resolve  # noqa: E402
from runtime.text.tokenizer import Tokenizer  # noqa: E402
from serve_app.app import Front, engine_name  # noqa: E402

TICK_S = 0.025
TOKENS = 160  # a request: 4 s
APP = "front-door"
INFO = ModelInfo("toy", 49152, 8192, (2,), 20_000, 16, "none", "none")
CONFIG = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)


class ToyRunner:
    """One token a live row at every tick; the token says which tick."""

    def __init__(self, words: list[int]) -> None:
        self._words = words
        self._stamps: dict[int, float] = {}
        self._next = time.monotonic()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._execute, plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        now = time.monotonic()
        self._next = max(self._next + TICK_S, now)
        time.sleep(self._next - now)
        word = self._words[plan.step_id % len(self._words)]
        self._stamps[word] = time.monotonic()
        return StepResult(plan.step_id, np.full(int(plan.samples.sum()), word, np.int32))

    def attach(self, address: Any) -> None:
        threading.Thread(target=serve_steps, args=(address, self), daemon=True).start()

    def stamps(self) -> dict[int, float]:
        return self._stamps


class ToyEngine:
    """The real engine loop around a toy runner."""

    async def start(self, runner: Any) -> None:
        def start_runners() -> tuple[Executor, ModelInfo]:
            executor = SocketExecutor(1)
            runner.attach.remote(executor.address(0))
            executor.accept()
            return executor, INFO

        self._loop = await asyncio.to_thread(EngineLoop, CONFIG, start_runners)

    async def open_link(self, node_id: str) -> tuple[LinkAddress, ModelInfo]:
        return self._loop.links.open(True, "127.0.0.1"), INFO


async def read_http(port: int, words: dict[str, int], seen: list[tuple[int, float]]) -> None:
    """One streamed completion, read with as little client as possible: it shares the cores."""
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
            for word in json.loads(line[6:])["choices"][0]["text"].split():
                seen.append((words[word], now))
    writer.close()


async def read_link(link: Any, number: int, seen: list[tuple[int, float]]) -> None:
    """The same request without HTTP and text."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    async for output in link.generate(Request(f"{number}", [5, 6], 2, params)):
        now = time.monotonic()
        seen.extend((token, now) for token in output.token_ids)


async def measure(runner: Any, port: int, words: dict[str, int]) -> None:
    link = link_to(engine_name(APP, 0))
    await link.start()
    print("| streams | bare engine p50 / p99 ms | through HTTP p50 / p99 ms | added p50 ms | delivered tok/s |")
    print("|---|---|---|---|---|")
    for streams in (1, 8, 64):
        figures, rate = [], 0.0
        for mode in ("link", "http"):
            seen: list[tuple[int, float]] = []
            start = time.monotonic()
            if mode == "link":
                await asyncio.gather(*(read_link(link, i, seen) for i in range(streams)))
            else:
                await asyncio.gather(*(read_http(port, words, seen) for _ in range(streams)))
            rate = len(seen) / (time.monotonic() - start)
            assert len(seen) == streams * TOKENS, f"{len(seen)} tokens arrived of {streams * TOKENS}"
            stamps = await runner.stamps.remote()
            late = [(now - stamps[token]) * 1e3 for token, now in seen]
            figures.append(np.percentile(late, [50, 99]))
        (a, b), (c, d) = figures
        print(f"| {streams} | {a:.2f} / {b:.2f} | {c:.2f} / {d:.2f} | {c - a:.2f} | {rate:.0f} |", flush=True)
    link.close()


def main() -> None:
    path = resolve(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(path)
    words: dict[str, int] = {}
    for token in range(1000, 40_000):
        text = tokenizer.decode([token])
        if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha():
            words.setdefault(text[1:], token)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    remote_runner: Any = ray.remote(max_concurrency=4)(ToyRunner)
    remote_engine: Any = ray.remote(ToyEngine)
    runner = remote_runner.remote(list(words.values()))
    engine = remote_engine.options(name=f"{engine_name(APP, 0)}#1", namespace=NAMESPACE).remote()
    ray.get(engine.start.remote(runner))
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    front = serve.deployment(serve.ingress()(Front), max_ongoing_requests=4096)
    serve.run(front.bind(EngineConfig(), 1, "toy", None), name=APP)
    asyncio.run(measure(runner, port, words))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
