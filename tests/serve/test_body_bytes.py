"""The bytes of bodies that a front receives at once."""

import asyncio
from typing import Any

import httpx
import pytest

from serve_app.application import build_http_app
from serve_app.http.limits import BodyBytes, read_json_body
from serve_app.protocol.errors import ApiError
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer


class Sender:
    """A body of pieces. Each piece arrives when the test sends it."""

    def __init__(self, bodies: BodyBytes, settings: HttpSettings, owner: str = "one") -> None:
        self.pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        headers = [(b"content-type", b"application/json")]
        scope = {"headers": headers, "owner": owner, "bodies": bodies}
        self.task = asyncio.create_task(read_json_body(scope, self.receive, settings))

    async def receive(self) -> dict[str, Any]:
        body, more = await self.pieces.get()
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(self, body: bytes, more: bool = True) -> None:
        self.pieces.put_nowait((body, more))
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize(("limit", "other"), [("max_unread_bytes_per_key", "one"), ("max_unread_bytes", "two")])
async def test_bodies_received_at_once_are_limited(limit: str, other: str):
    settings = HttpSettings(**{limit: 100})
    bodies = BodyBytes(settings)
    first, second = Sender(bodies, settings), Sender(bodies, settings, other)
    await first.send(b"a" * 60)
    await second.send(b"b" * 60)
    with pytest.raises(ApiError, match=rf"over the limit of 100 \({limit}\); try again later") as error:
        await second.task
    assert (error.value.status, error.value.code) == (429, "too_many_bodies")
    third = Sender(bodies, settings, other)
    await third.send(b"c" * 40)
    await first.send(b"a", more=False)
    assert await first.task == b"a" * 61
    await third.send(b"c" * 60)
    await third.send(b"", more=False)
    assert await third.task == b"c" * 100
    assert (bodies._by_owner, bodies._num_bytes) == ({}, 0)


async def test_an_abandoned_body_no_longer_counts():
    settings = HttpSettings(max_body_bytes=10)
    bodies = BodyBytes(settings)
    sender = Sender(bodies, settings)
    await sender.send(b"12345678")
    await sender.send(b"9012")
    with pytest.raises(ApiError, match="over 10 bytes"):
        await sender.task
    cancelled = Sender(bodies, settings)
    await cancelled.send(b"1234")
    cancelled.task.cancel()
    await asyncio.wait([cancelled.task])
    assert (bodies._by_owner, bodies._num_bytes) == ({}, 0)


async def test_every_route_counts_its_body():
    settings = HttpSettings(max_unread_bytes=10)
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), settings)

    async def pieces():
        yield b'{"model": "fake", '
        yield b'"prompt": "hi"}'

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        headers = {"content-type": "application/json"}
        for path in ("/v1/completions", "/tokenize"):
            response = await client.post(path, content=pieces(), headers=headers)
            assert_error(response, 429, None, "(max_unread_bytes)", "too_many_bodies")
