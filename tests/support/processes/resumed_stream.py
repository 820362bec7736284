"""A client that takes its stream up again, by the id of the last event, whenever the connection breaks."""

import asyncio
import json

import httpx

MAX_TOKENS = 600  # of a stream: far from its end when its front is killed


class ResumedStream:
    """A completion with a seed of the server's choice, read to its end."""

    def __init__(self, url: str, i: int) -> None:
        self._url = url
        fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1, "return_token_ids": True}
        self.body = {"prompt": f"Once upon a time {i}", **fields}
        self.text, self.token_ids, self.num_cuts, self.seed = "", list[int](), 0, 0
        self._last = ""  # id of the last event
        self._is_over = False

    async def read(self) -> None:
        while not self._is_over:
            try:
                await self._read()
            except (httpx.TransportError, httpx.HTTPStatusError):
                await asyncio.sleep(0.1)

    async def _read(self) -> None:
        headers = {"Last-Event-ID": self._last} if self._last else {"X-Callboard-Event-Ids": "true"}
        async with httpx.AsyncClient(base_url=self._url, timeout=100) as client:
            request = client.stream("POST", "/v1/completions", json={**self.body, "stream": True}, headers=headers)
            async with request as response:
                response.raise_for_status()
                self.seed = int(response.headers["x-callboard-seed"])
                try:
                    await self._take(response)
                finally:
                    self.num_cuts += not self._is_over

    async def _take(self, response: httpx.Response) -> None:
        event = dict[str, str]()
        async for line in response.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
                continue
            if event.get("data") == "[DONE]":
                self._is_over = True
            elif "id" in event:
                (choice,) = json.loads(event["data"])["choices"]
                self.text += choice["text"]
                self.token_ids += choice["token_ids"]
            self._last, event = event.get("id", self._last), {}
