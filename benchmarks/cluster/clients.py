"""Clients of a cluster: they read streams one after another, and also send short requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

_NUM_STREAMS = 8
_STREAM_TOKENS = 1500
_SHORT_TOKENS = 8
_SHORT_PAUSE_S = 0.2  # pause between two short requests
_TIMEOUT_S = 30.0  # a request's time without a byte


class Seen:
    """The clients' view of a disturbance."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.num_tokens = self.num_requests = self.num_streams = 0
        self.slowest_s = self.longest_pause_s = 0.0
        self.failures: list[str] = []

    def report(self) -> dict[str, Any]:
        return {
            "failed": len(self.failures),
            "why": sorted(set(self.failures))[:4],
            "streams": self.num_streams,
            "short_requests": self.num_requests,
            "chunks": self.num_tokens,
            "longest_pause_s": round(self.longest_pause_s, 3),
            "slowest_short_request_s": round(self.slowest_s, 3),
        }


class Clients:
    """Clients of one server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._answers: dict[int, str] = {}  # answers by seed

    async def wait_until_ready(self, num_engines: int, timeout_s: float = 600.0) -> None:
        """Until the front is linked to `num_engines` engines."""
        end = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self._url, timeout=5) as client:
            while True:
                found = 0
                try:
                    if (await client.get("/ready")).status_code == 200:
                        found = (await client.get("/metrics")).text.count("vllm:num_requests_running{")
                except httpx.HTTPError:
                    pass
                if found >= num_engines:
                    return
                if time.monotonic() > end:
                    raise TimeoutError(f"{num_engines} engines were to be served within {timeout_s:g} s: {found}")
                await asyncio.sleep(0.1)

    async def phase(self, prefix: str, text: str, timeout_s: float) -> str:
        """Wait until another application's /ready has `text`, and return the answer."""
        end = time.monotonic() + timeout_s
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S) as client:
            while text not in (answer := (await client.get(f"{prefix}/ready")).text):
                if time.monotonic() > end:
                    raise TimeoutError(answer)
                await asyncio.sleep(0.5)
        return answer

    async def learn(self) -> None:
        """Learn the answers of an undisturbed server."""
        seen = Seen()

        async def one(seed: int) -> None:
            self._answers[seed] = await self._stream(seed, seen)

        await asyncio.gather(*map(one, range(_NUM_STREAMS)))
        self._short = await self._answer(seen)

    async def seconds_until_answered(self, timeout_s: float = 120.0) -> float:
        """From now on until a short request is answered."""
        began = time.monotonic()
        while True:
            try:
                await self._answer(Seen())
                return round(time.monotonic() - began, 2)
            except httpx.HTTPError:
                if time.monotonic() - began > timeout_s:
                    raise
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Seen]:
        """Run the clients; at the end their streams are read to the end."""
        seen, stopping = Seen(), asyncio.Event()
        tasks = [asyncio.create_task(self._read(seed, seen, stopping)) for seed in self._answers]
        tasks += [asyncio.create_task(self._ask(seen, stopping))]
        yield seen
        stopping.set()
        await asyncio.gather(*tasks)

    async def _read(self, seed: int, seen: Seen, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                if await self._stream(seed, seen) != self._answers[seed]:
                    seen.failures.append("a stream had other tokens")
            except (httpx.HTTPError, ValueError) as e:
                seen.failures.append(f"a stream: {type(e).__name__}: {e}")
                await asyncio.sleep(_SHORT_PAUSE_S)

    async def _ask(self, seen: Seen, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                began = time.monotonic()
                if await self._answer(seen) != self._short:
                    seen.failures.append("a short request had other tokens")
                seen.slowest_s = max(seen.slowest_s, time.monotonic() - began)
            except (httpx.HTTPError, ValueError) as e:
                seen.failures.append(f"a short request: {type(e).__name__}: {e}")
            await asyncio.sleep(_SHORT_PAUSE_S)

    async def _answer(self, seen: Seen) -> str:
        body = {"model": "model", "prompt": "Hello", "max_tokens": _SHORT_TOKENS, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S) as client:
            answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        seen.num_requests += 1
        return str(answer.json()["choices"][0]["text"])

    async def _stream(self, seed: int, seen: Seen) -> str:
        body = {
            "model": "model", "prompt": f"Once {seed}", "max_tokens": _STREAM_TOKENS, "temperature": 0.7,
            "seed": seed, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        text, last = "", time.monotonic()
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                seen.longest_pause_s, last = max(seen.longest_pause_s, now - last), now
                if line == "data: [DONE]":
                    seen.num_streams += 1
                    return text
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                text += event["choices"][0]["text"]
                seen.num_tokens += 1
        raise ValueError("it ended without [DONE]")
