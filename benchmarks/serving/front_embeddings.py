"""The CPU time of HTTP and the front for an embedding: a toy runner behind a real engine loop, link and HTTP server.

    python -m benchmarks.serving.front_embeddings [--posts 2000] [--width 1024] [--text-len 100]

All are in this process: the event loop of the main thread has the HTTP server and the front, the engine loop has
threads of its own, and so has the client, which posts one text after another. The figure is the CPU time of the main
thread for each text: parsing, checks, tokens, the link both ways, the vector and its JSON. `of 64` are texts of one
request. The loop is uvloop, as a front's, and requests are not logged. The least of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import time
from collections.abc import Callable

import numpy as np
import uvicorn
import uvloop

from actors.engine_group import EngineGroup
from actors.engine_loop import EngineLoop
from actors.transport import Address
from runtime.core.config import DEFAULT_MODEL, EngineConfig, ModelInfo
from runtime.core.executor import Executor, InProcess
from runtime.core.plan import StepPlan, StepResult
from runtime.core.pooling import Pooling
from runtime.loading.resolve import resolve
from runtime.text.tokenizer import Tokenizer
from serve_app.http import build_http_app
from serve_app.service import Service

INFO = ModelInfo("toy", 49152, 8192, (2,), 20_000, 16, "none", "none", pooling=Pooling("last", normalized=True))


class ToyRunner:
    """Every sample is in place of a vector."""

    asynchronous = False

    def __init__(self, width: int) -> None:
        self._vectors = np.random.default_rng(0).standard_normal((1024, width), np.float32)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        num = int(plan.num_samples.sum())
        rows = np.arange(num, dtype=np.int32)
        return lambda: StepResult(plan.step_id, rows, pooled_rows=rows, pooled=self._vectors[:num])


class OneEngine:
    """A directory of one engine, in this process."""

    def __init__(self, width: int) -> None:
        def start() -> tuple[Executor, ModelInfo]:
            return InProcess(ToyRunner(width)), INFO

        config = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=8192)
        self._loop = EngineLoop(config, start, lambda index, path: None, lambda level: None)

    async def changed(self, known: list[str]) -> list[str]:
        if known:
            await asyncio.Event().wait()
        return ["toy/engine/0#1"]

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        return self._loop.links.open(True, "127.0.0.1"), INFO

    def close(self) -> None:
        self._loop.close()


def post(port: int, body: bytes, count: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(count):
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
    connection.close()


async def measure(args: argparse.Namespace) -> None:
    directory = OneEngine(args.width)
    group = EngineGroup(directory)
    await group.start()
    app = build_http_app(Service(group, Tokenizer.load(resolve(args.model)), "toy"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    text = ("some words of a text " * args.text_len)[: args.text_len]
    print("| form | texts of a request | CPU us a text |\n|---|---|---|")
    for form, size in (("base64", 1), ("float", 1), ("base64", 64)):
        body = json.dumps({"input": [text] * size if size > 1 else text, "encoding_format": form}).encode()
        await asyncio.to_thread(post, port, body, 20)
        costs = []
        for _ in range(5):
            before = time.thread_time()
            await asyncio.to_thread(post, port, body, args.posts // size)
            costs.append((time.thread_time() - before) / (args.posts // size * size) * 1e6)
        print(f"| {form} | {size} | {min(costs):.0f} |", flush=True)
    server.should_exit = True
    await serving
    group.close()
    directory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer makes tokens of the text")
    parser.add_argument("--posts", type=int, default=2000, help="texts of each measurement")
    parser.add_argument("--width", type=int, default=1024, help="numbers of a vector")
    parser.add_argument("--text-len", type=int, default=100, help="characters of a text")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
