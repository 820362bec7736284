"""An OpenAI-compatible server that sends one word a token at fixed times after the request.

    python -m tests.support.http.paced_server --first-ms 200 --gap-ms 20    # prints its URL

The load of the machine moves its times little, so that two benchmarks can be compared on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

MODEL = "paced"


@dataclass(slots=True)
class PacedServer:
    """Listens while it is a context; `requests` are the bodies of completions so far."""

    first_s: float = 0.0
    gap_s: float = 0.0
    refusals: int = 0  # completions that are answered with a 429 first
    cut_after: int | None = None  # tokens until a stream ends without its last events
    fails: bool = False  # with an error event after the first token
    has_tokenizer: bool = True
    end_of_line: bytes = b"\n"
    chunked: bool = True
    api_key: str = ""
    metrics: str = ""  # the body of /metrics, in which N is the number of completions; without it a 404
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> PacedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while request := (await reader.readline()).split():
                headers = {}
                while line := (await reader.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(request[1].decode(), headers, body, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns True if the connection stays open."""
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            return self._json(writer, 401, {"error": {"message": "wrong key"}})
        if path == "/health":
            return self._json(writer, 200, {})
        if path == "/v1/models":
            return self._json(writer, 200, {"data": [{"id": MODEL, "object": "model"}], "object": "list"})
        if path == "/metrics":
            text = self.metrics.replace("N", str(len(self.requests)))
            return self._send(writer, 200 if text else 404, text)
        fields = json.loads(body)
        if path == "/tokenize" and self.has_tokenizer:
            return self._json(writer, 200, {"count": len(fields["prompt"].split())})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return self._json(writer, 404, {"error": {"message": f"no route {path}"}})
        self.requests.append(fields)
        if self.refusals:
            self.refusals -= 1
            return self._json(writer, 429, {"error": {"message": "too many requests"}})
        return await self._stream(fields, writer)

    def _json(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> bool:
        return self._send(writer, status, json.dumps(content))

    def _send(self, writer: asyncio.StreamWriter, status: int, text: str) -> bool:
        data = text.encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    async def _stream(self, fields: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        framing = "transfer-encoding: chunked" if self.chunked else "connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode())

        def send(event: dict[str, Any] | str) -> None:
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}".encode() + 2 * self.end_of_line
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self.chunked else data)

        loop = asyncio.get_running_loop()
        is_chat, begin = "messages" in fields, loop.time()
        prompt = fields["messages"][-1]["content"] if is_chat else fields["prompt"]
        if is_chat and isinstance(prompt, list):
            prompt = prompt[-1]["text"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        common = {"id": "paced-1", "object": "chat.completion.chunk" if is_chat else "text_completion", "created": 0}
        common["model"] = MODEL
        num_tokens = fields.get("max_tokens") or fields.get("max_completion_tokens") or 16
        if is_chat:
            send(common | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(num_tokens):
            if self.cut_after is not None and i == self.cut_after:
                return False
            await asyncio.sleep(begin + self.first_s + i * self.gap_s - loop.time())
            text = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
            end = "length" if i + 1 == num_tokens else None
            send(common | {"choices": [{"index": 0, **text, "finish_reason": end}]})
            if self.fails:
                send({"error": {"message": "the engine is gone", "code": 500}})
                break
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        usage["prompt_tokens_details"] = {"cached_tokens": 1}
        send(common | {"choices": [], "usage": usage})
        send("[DONE]")
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.chunked


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-ms", type=float, default=200.0, help="from a request to its first token")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between two tokens")
    args = parser.parse_args()
    async with PacedServer(args.first_ms / 1e3, args.gap_ms / 1e3) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
