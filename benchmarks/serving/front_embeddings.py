"""The CPU time of a front for an embedding: HTTP, checks, tokens, the link both ways, the vector and its JSON.

    python -m benchmarks.serving.front_embeddings [--posts 2000] [--width 1024] [--text-len 100]

This process is the front: uvloop, uvicorn, a Service and its link. A child has a toy runner behind a real engine loop,
and the clients, so the CPU time of this process is the front's alone. `at once` is the number of concurrent requests;
`of 64` are texts of one request. The least of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import uvicorn
import uvloop

from actors.engine.loop import EngineLoop
from actors.front.engine_group import EngineGroup
from actors.wire.transport import Address
from runtime.base.config import DEFAULT_MODEL, EngineConfig, ModelInfo
from runtime.base.pooling import Pooling
from runtime.base.reports import Vector
from runtime.core.executor import Executor, InProcess
from runtime.core.plan import StepPlan, StepResult
from runtime.loading.resolve import resolve
from runtime.text.tokenizer import Tokenizer
from serve_app.application import build_http_app
from serve_app.service.service import Service

INFO = ModelInfo("toy", 49152, 8192, (2,), 20_000, 16, "none", "none", pooling=Pooling("last", normalized=True))
_REPEATS = 5


class ToyRunner:
    """Every sample is in place of a vector."""

    asynchronous = False

    def __init__(self, width: int) -> None:
        vectors = np.random.default_rng(0).standard_normal((1024, width), np.float32)
        self._vectors = [Vector(vector.tobytes()) for vector in vectors]

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        reports = [(row, self._vectors[row]) for row in np.flatnonzero(plan.num_samples).tolist()]
        return lambda: StepResult(plan.step_id, np.arange(len(reports), dtype=np.int32), reports=reports)


def run_child(pipe: Connection, width: int) -> None:
    """The engine and the clients: sends the engine's address, then sends each batch of requests that it receives, until
    it receives None."""

    def start() -> tuple[Executor, ModelInfo]:
        return InProcess(ToyRunner(width)), INFO

    config = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=8192)
    loop = EngineLoop(config, start, lambda index, path: None, lambda level: None, lambda method, *_: [])
    pipe.send(loop.links.open(True, "127.0.0.1"))
    while (asked := pipe.recv()) is not None:
        port, body, count, at_once = asked
        clients = [threading.Thread(target=post, args=(port, body, count // at_once)) for _ in range(at_once)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        pipe.send(None)
    loop.close()


class OneEngine:
    """A directory of one engine, the child's, to which one link can be made."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def changed(self, known: list[str]) -> list[str]:
        if known:
            await asyncio.Event().wait()
        return ["toy/engine/0#1"]

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        return self._address, INFO


def post(port: int, body: bytes, count: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(count):
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
    connection.close()


async def measure(args: argparse.Namespace, pipe: Connection) -> None:
    group = EngineGroup(OneEngine(await asyncio.to_thread(pipe.recv)))
    await group.start()
    app = build_http_app(Service(group, Tokenizer.load(resolve(args.model)), "toy"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def load(body: bytes, count: int, at_once: int) -> float:
        """CPU seconds of a request."""
        before = time.process_time()
        pipe.send((port, body, count, at_once))
        await asyncio.to_thread(pipe.recv)
        return (time.process_time() - before) / (count // at_once * at_once)

    text = ("some words of a text " * args.text_len)[: args.text_len]
    print("| form | texts of a request | at once | CPU us a text |\n|---|---|---|---|")
    for form, size, at_once in (("base64", 1, 1), ("base64", 1, 16), ("float", 1, 1), ("base64", 64, 1)):
        body = json.dumps({"input": [text] * size if size > 1 else text, "encoding_format": form}).encode()
        await load(body, 64, at_once)
        costs = [await load(body, args.posts // size, at_once) / size * 1e6 for _ in range(_REPEATS)]
        print(f"| {form} | {size} | {at_once} | {min(costs):.0f} |", flush=True)
    server.should_exit = True
    await serving
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer makes tokens of the text")
    parser.add_argument("--posts", type=int, default=2000, help="texts of each measurement")
    parser.add_argument("--width", type=int, default=1024, help="numbers of a vector")
    parser.add_argument("--text-len", type=int, default=100, help="characters of a text")
    args = parser.parse_args()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    spawn = multiprocessing.get_context("spawn")
    pipe, childs = spawn.Pipe()
    child = spawn.Process(target=run_child, args=(childs, args.width), daemon=True)
    child.start()
    uvloop.run(measure(args, pipe))
    pipe.send(None)
    child.join()


if __name__ == "__main__":
    main()
