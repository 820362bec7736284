"""The time from a streamed request to its first event, for each kind of API, with an engine that costs nothing.

    python -m benchmarks.serving.first_event [--rounds 400]

The same question is sent as a chat, a response and a message, in turn, to the ASGI application in this process. Its
engine answers at once. The bar is the extra time of an API over a chat: at most 200 us.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import uvloop
from starlette.types import ASGIApp, Message

from actors.wire.engine_client import OnEngine, ignore_engine
from runtime.base.config import DEFAULT_MODEL, ModelInfo
from runtime.base.types import FinishReason, Request, RequestOutput
from runtime.loading.resolve import resolve
from runtime.text.tokenizer import Tokenizer
from serve_app.application import build_http_app
from serve_app.service.service import Service

TEXT = "Please name a colour. " * 5
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16}),
    "response": ("/v1/responses", {"input": TEXT, "max_output_tokens": 16}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16, "model": "toy"}),
}
_WARM_ROUNDS = 50


class InstantEngine:
    """As much of an EngineClient as an answer of two tokens needs."""

    info = ModelInfo("toy", 49152, 8192, (2,), 20_000, 16, "none", "none")

    def health(self) -> None:
        """It takes requests."""

    async def generate(
        self, request: Request, on_engine: OnEngine = ignore_engine
    ) -> AsyncGenerator[RequestOutput, None]:
        on_engine("toy/engine/0")
        for reason in (FinishReason.NONE, FinishReason.LENGTH):
            await asyncio.sleep(0)
            yield RequestOutput(request.request_id, [28120], finish_reason=reason)


async def first_event_s(app: ASGIApp, path: str, body: bytes) -> float:
    """Seconds from a request to the first bytes of its stream."""
    messages, begun_at, first_at = [{"type": "http.request", "body": body}], time.perf_counter(), 0.0

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Message) -> None:
        nonlocal first_at
        assert message.get("status", 200) == 200
        if message["type"] == "http.response.body" and not first_at:
            first_at = time.perf_counter()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app({**scope, "server": ("localhost", 80)}, receive, send)
    return first_at - begun_at


async def measure(args: argparse.Namespace) -> None:
    engine: Any = InstantEngine()
    app = build_http_app(Service(engine, Tokenizer.load(resolve(args.model)), "toy"))
    bodies = {
        kind: (path, json.dumps({**fields, "stream": True}).encode()) for kind, (path, fields) in REQUESTS.items()
    }
    rounds = [
        [await first_event_s(app, *asked) for asked in bodies.values()] for _ in range(_WARM_ROUNDS + args.rounds)
    ]
    times = np.array(rounds[_WARM_ROUNDS:]) * 1e6
    added = np.median(times - times[:, :1], axis=0)
    print("| API | us to its first event | more than the chat of its round |\n|---|---|---|")
    for kind, us, more in zip(bodies, np.median(times, axis=0), added, strict=True):
        print(f"| {kind} | {us:.0f} | {more:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer and chat template make the prompt")
    parser.add_argument("--rounds", type=int, default=400, help="requests of each API; figures are medians")
    args = parser.parse_args()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    uvloop.run(measure(args))


if __name__ == "__main__":
    main()
