"""A client that reads a long stream in the background."""

import asyncio
import json
import time

import httpx

PROMPTS = ["Once upon a time, in a small village by the sea,", "def fibonacci(n):\n"]
MAX_TOKENS = 16_000  # a stream is stopped long before


async def until(condition, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.05)


class Reader:
    """One stream of a prompt, read in the background until it is closed."""

    def __init__(self, url: str, prompt: int, model: str | None = None) -> None:
        self._url, self._model, self.prompt, self.text, self.first_at = url, model, prompt, "", 0.0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = {
            "model": self._model,
            "prompt": PROMPTS[self.prompt],
            "temperature": 0.7 * self.prompt,
            "seed": 1,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.first_at = self.first_at or time.monotonic()
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    async def more(self, num_characters: int = 40) -> None:
        wanted = len(self.text) + num_characters

        async def has_more() -> bool:
            if self.task.done():
                self.task.result()
                raise AssertionError("the stream has ended")
            return len(self.text) >= wanted

        await until(has_more, "more text of a stream")

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
