"""Requests over HTTP to an engine with a tier: lifetimes, prompts that are only cached, and tenants."""

import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.base.types import FinishReason, Request, RequestOutput
from runtime.llm import LLM
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.processes.tiers import opened, regions_of

PROMPT = np.random.default_rng(0).integers(3, 250, 600).tolist()
WHOLE = 599 // 16 * 16  # its tokens that a cache can supply


class OverLLM(FakeEngine):
    """An engine in this process, in place of the script."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm, self.info = llm, llm.runner.info

    async def generate(self, request: Request, on_engine=None) -> AsyncGenerator[RequestOutput, None]:
        taken = _Taken()
        self.llm.engine.add(request, taken)
        while self.llm.engine.has_work:  # its stores, too
            self.llm._step()
        for output in taken.outputs:
            yield output


class _Taken:
    """A request's outputs."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.reason, self.error = FinishReason.NONE, ""

    def take(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.reason, self.error = output.finish_reason, output.error


@pytest.fixture
def start(tmp_path: Path, monkeypatch) -> Callable[..., httpx.AsyncClient]:
    """Begins an engine with an empty cache over the same tier, and returns a client of it."""
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path / "tier"))
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, llama__context_length=4096, llama__rope__freq_base=10000.0)

    def begin(num_slots: int = 4096) -> httpx.AsyncClient:
        memory = num_slots * 4096 / 2**30
        llm = LLM(str(path), num_threads=1, kv_cache_memory=0.1, kv_tier_name="t", kv_tier_memory=memory)
        app = build_http_app(Service(OverLLM(llm), llm.tokenizer, MODEL))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return begin


async def cached(client: httpx.AsyncClient, **fields: Any) -> int:
    """Send the prompt; return its tokens that were in a cache."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def lifetimes() -> set[int]:
    """What the tier's entries have left, in seconds; 0 for entries without a lifetime."""
    region = opened(regions_of("t")[0])
    now, expires = time.time(), region.entries().expires
    region.close()
    return {round((end - now) / 60) * 60 if end else 0 for end in expires.tolist()}


async def test_another_salt_finds_nothing_in_the_tier(start):
    async with start() as first:
        assert await cached(first, cache_salt="a") == 0
        assert await cached(first, cache_salt="b") == 0
        assert await cached(first, cache_salt="a") == WHOLE
    async with start() as second:
        assert [await cached(second, cache_salt=salt) for salt in ("c", "", "a")] == [0, 0, WHOLE]


async def test_a_lifetime_reaches_the_entries(start):
    async with start() as client:
        await cached(client)
        assert lifetimes() == {0}
        await cached(client, cache_control={"type": "ephemeral", "ttl": "1h"})
        assert lifetimes() == {3600}, "a hit on the device extends it, too"
        await cached(client, prompt_cache_options={"ttl": "30m"})
        assert lifetimes() == {3600}
    async with start() as client:
        assert await cached(client, prompt_cache_options={"ttl": "12h"}) == WHOLE
        assert lifetimes() == {43_200}


async def test_a_prewarmed_prompt_is_in_the_tier(start):
    async with start() as first:
        body = {"model": MODEL, "prompt": PROMPT, "prompt_cache_options": {"prewarm": True}}
        answer = (await first.post("/v1/completions", json=body)).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 592}
    async with start() as second:
        assert await cached(second) == WHOLE


async def test_a_lifetime_holds_under_load(start):
    """Four times as many blocks as the tier has room for follow."""
    others = [np.random.default_rng(i).integers(3, 250, 600).tolist() for i in range(1, 15)]
    async with start(128) as first:
        await cached(first, prompt=others[0])
        await cached(first, cache_control={"type": "ephemeral", "ttl": "1h"})
        for prompt in others[1:]:
            await cached(first, prompt=prompt)
    async with start(128) as second:
        assert await cached(second) == WHOLE
        assert await cached(second, prompt=others[0]) == 0
