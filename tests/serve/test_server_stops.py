"""Requests that the end of the server cuts off: each client reads an error, never a normal end."""

import asyncio
import json
from dataclasses import replace

import httpx
import openai
import pytest

from actors.engine.supervisor import STOPPED
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.engine.links import INFO, Engine, eventually, link_to
from tests.support.http.fake_engine import byte_tokenizer

_STREAMS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 400},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
    "/v1/responses": {"input": "a", "max_output_tokens": 400},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
}


@pytest.fixture
async def stopping():
    """A client of a front with answers that take twenty seconds, and the call that ends its requests once all have
    begun."""
    engine = Engine(delay_s=0.05, info=replace(INFO, eos_token_ids=(), num_kv_blocks=1000))
    group = link_to(engine)
    await group.start()
    transport = httpx.ASGITransport(build_http_app(Service(group, byte_tokenizer(), "m")))

    async def stop(num_streams: int) -> None:
        streams = lambda: [s for link in group.links.values() for s in link.streams]  # noqa: E731
        await eventually(lambda: len(streams()) == num_streams and all(s.received for s in streams()))
        group.end(STOPPED)

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, stop
    group.close()
    engine.loop.close()


async def test_every_stream_ends_with_an_error_event(stopping):
    client, stop = stopping
    asked = [client.post(path, json={**body, "stream": True}) for path, body in _STREAMS.items()]
    *answers, _ = await asyncio.gather(*asked, stop(len(asked)))
    assert {answer.status_code for answer in answers} == {200}
    completion, chat, response, message = (
        [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] for answer in answers
    )
    error = {"message": STOPPED, "type": "server_error", "param": None, "code": "engine_unavailable"}
    for events in completion, chat:
        assert events[-1] == {"error": error}
        assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    assert response[-1]["type"] == "response.failed"
    assert response[-1]["response"]["error"]["message"] == STOPPED
    assert message[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": STOPPED}}
    assert not any(event["type"] == "message_stop" for event in message)


async def test_an_unstreamed_answer_becomes_a_503(stopping):
    client, stop = stopping
    answer, _ = await asyncio.gather(client.post("/v1/completions", json=_STREAMS["/v1/completions"]), stop(1))
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, STOPPED)
    later = await client.post("/v1/completions", json={"prompt": "a"})
    assert (later.status_code, later.headers["retry-after"]) == (503, "1")


async def test_the_openai_client_raises_when_the_server_stops(stopping):
    client, stop = stopping
    own = openai.AsyncOpenAI(api_key="k", base_url="http://test/v1", http_client=client, max_retries=0)

    async def read() -> None:
        async for _ in await own.completions.create(model="m", prompt="a", max_tokens=400, stream=True):
            pass

    with pytest.raises(openai.APIError, match="The server stopped before this answer was complete"):
        await asyncio.gather(read(), stop(1))
