"""Fronts with a folder of files and batches."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from runtime.base.model.pooling import Pooling
from serve_app.apis.batches.store import ENDED
from serve_app.apis.batches.worker import Batches
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import eventually
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer

COMPLETIONS = "/v1/completions"


class CountingEngine(FakeEngine):
    """Answers `num_answers` requests and none after them. It counts how many there were at once."""

    def __init__(self, num_answers: int = 1000, **more: Any) -> None:
        super().__init__(group=5, max_model_len=4096, **more)
        self.num_answers, self.num_open, self.most_open = num_answers, 0, 0

    async def generate(self, request, on_engine=None):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if len(self.requests) == self.num_answers:
                await asyncio.Event().wait()
            async for output in super().generate(request, on_engine):
                yield output
        finally:
            self.num_open -= 1


@dataclass
class Front:
    engine: FakeEngine
    batches: Batches
    app: Any

    def client(self, key: str = "one") -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")
        return openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=http)


@asynccontextmanager
async def front(
    folder: Path, engine: FakeEngine | None = None, service: Service | None = None, **settings: Any
) -> AsyncIterator[Front]:
    engine = engine or FakeEngine(group=100, max_model_len=4096, pooling=Pooling("last"))
    http = HttpSettings(api_key=("one", "two"), batch_folder=str(folder), **settings)
    made = Batches(http)
    app = build_http_app(service or Service(engine, byte_tokenizer(), MODEL), http, batches=made)
    made.start()
    try:
        yield Front(engine, made, app)
    finally:
        made.stop()
        await eventually(lambda: not made._running)


def line(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def lines(num: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"r{i}", prompt=f"{i}", **body) for i in range(num)]


async def created(client: openai.AsyncOpenAI, requests: list[dict[str, Any]], endpoint: str = COMPLETIONS, **more: Any):
    content = "\n".join(json.dumps(request) for request in requests).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, batch_id: str):
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.005)
    return batch


async def answered(client: openai.AsyncOpenAI, batch_id: str, num: int):
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).request_counts.completed < num:
            await asyncio.sleep(0.005)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Results by custom_id. Each id is there once."""
    if file_id is None:
        return {}
    entries = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len({entry["id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}
