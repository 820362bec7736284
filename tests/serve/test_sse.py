"""Streams: the same answer in pieces, one end mark, errors in mid-stream, and clients that leave."""

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from runtime.output.processor import Delta
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.completions.request import CompletionRequest
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat, events_of, post


def joined(events: list[dict]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + new
            if choice["finish_reason"] is not None:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[i], reasons[i]) for i in sorted(texts)]


@pytest.mark.parametrize("group", [1, 4, 99])
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"stop": "w"}, {"logprobs": 2}, {"echo": True, "n": 2}, {"max_tokens": 8}, {"prompt": ["a", "b"]}],
)
async def test_stream_equals_plain_completion(group: int, fields: dict):
    body = {"prompt": "a", "max_tokens": 40, **fields}
    plain = (await post(FakeEngine(group=group), body)).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await post(FakeEngine(group=group), streamed))
    assert joined(events) == [(c["text"], c["finish_reason"]) for c in plain["choices"]]
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {(e["object"], e["model"]) for e in events} == {("text_completion", MODEL)}
    assert len({e["id"] for e in events}) == 1
    if "logprobs" in fields:
        for name, values in plain["choices"][0]["logprobs"].items():
            parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
            assert [value for part in parts for value in part[name]] == values


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}])
async def test_stream_equals_plain_chat(fields: dict):
    plain = (await post(FakeEngine(group=2), chat(**fields), "/v1/chat/completions")).json()
    events = events_of(await post(FakeEngine(group=2), chat(stream=True, **fields), "/v1/chat/completions"))
    assert joined(events) == [(c["message"]["content"], c["finish_reason"]) for c in plain["choices"]]
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert all("usage" not in e for e in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    if fields.get("logprobs"):
        parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
        assert [entry for part in parts for entry in part] == plain["choices"][0]["logprobs"]["content"]


async def test_one_write_for_coalesced_tokens():
    writes = []

    async def send(message):
        if message["type"] == "http.response.body":
            writes.append(message["body"])

    requests = iter([{"type": "http.request", "body": b'{"prompt": "a", "stream": true}', "more_body": False}])

    async def receive():
        for message in requests:
            return message
        await asyncio.Event().wait()

    app = build_http_app(Service(FakeEngine("abcdefgh", group=4), byte_tokenizer(), MODEL))
    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    assert len(writes) == 4  # two groups of letters, the end of the text, the end mark
    assert writes[0].count(b"data: ") == 1
    assert b'"text":"abcd"' in writes[0]


@given(st.text(), st.text())
def test_any_text_survives(text: str, model: str):
    service = Service(FakeEngine(), byte_tokenizer(), model)
    stream = COMPLETIONS.stream(service.prepare(COMPLETIONS, CompletionRequest(prompt="a")), include_usage=False)
    event = stream.events([Delta(0, text)])
    if not text:
        assert event == b""
        return
    assert event.count(b"\n") == 2  # a line end within an event would cut it
    assert b"\r" not in event
    parsed = json.loads(event.removeprefix(b"data: "))
    assert (parsed["choices"][0]["text"], parsed["model"]) == (text, model)


@pytest.mark.parametrize("n", [1, 2])
async def test_error_in_mid_stream(n: int):
    engine = FakeEngine(fails_after=3)
    response = await post(engine, {"prompt": "a", "stream": True, "n": n})
    *chunks, last = events_of(response)
    assert response.status_code == 200
    assert chunks
    assert last["error"]["code"] == "engine_error"
    assert "no finite logits" in last["error"]["message"]
    assert engine.num_running == 0


async def test_unforeseen_error_in_mid_stream_is_one_sentence():
    engine = FakeEngine()
    engine.script[3] = "not a token"
    *_, last = events_of(await post(engine, {"prompt": "a", "stream": True}))
    assert last["error"]["code"] == "internal_error"
    assert len(engine.aborted) == 1


# ---- over a real socket ---------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Starts uvicorn for an engine in a thread; returns its base URL."""
    servers = []

    def start(engine: FakeEngine) -> str:
        app = build_http_app(Service(engine, byte_tokenizer(), MODEL))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(timeout=60)


def test_openai_client(serve):
    url = serve(FakeEngine("Hello, wörld!"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == [MODEL]
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == "Hello, wörld!"
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "Hello, wörld!"
        assert chunks[-1].usage.completion_tokens == 15
        pieces = client.completions.create(model=MODEL, prompt="a", max_tokens=99, stream=True)
        assert "".join(c.choices[0].text for c in pieces) == "Hello, wörld!"
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert caught.value.param == "temperature"


def test_openai_client_sees_an_error_in_mid_stream(serve):
    url = serve(FakeEngine(fails_after=2))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no finite logits"):
            list(stream)


def wait_until(condition, seconds: float = 1.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay_s", [0.01, 30.0])  # between tokens; 30: it leaves before the first one
def test_client_that_leaves_aborts_within_a_second(serve, n: int, stream: bool, delay_s: float):
    engine = FakeEngine("x" * 10_000, delay_s=delay_s, max_model_len=20_000)
    url = serve(engine)
    body = {"prompt": "a", "max_tokens": 10_000, "stream": stream, "n": n}
    with httpx.Client(timeout=1.0) as client:  # on a busy machine the request takes a while to arrive
        if stream and delay_s < 1:
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body)
        assert engine.requests
    assert wait_until(lambda: len(engine.aborted) == n), (engine.aborted, engine.num_running)
    assert engine.num_running == 0
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "ping"),
    [
        ("/v1/completions", {"prompt": "a"}, ": "),
        ("/v1/chat/completions", chat(), ": "),
        ("/v1/responses", {"input": "a"}, ": "),
        ("/v1/responses", {"input": "a", "background": True}, ": "),
        ("/v1/messages", chat(max_tokens=20), 'event: ping\ndata: {"type":"ping"}'),
    ],
)
async def test_a_long_prompt_is_pinged_in_the_form_of_its_api(path: str, fields: dict, ping: str):
    engine = FakeEngine("a", delay_s=0.1)
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), HttpSettings(keep_alive_s=0.02))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        streamed = await client.post(path, json={**fields, "stream": True})
        begin = streamed.text.split("\n\n")[: 4 if "background" in fields else 2]
        assert any(event.startswith(ping) for event in begin)
        plain = await client.post(path, json=fields)
        assert plain.text == plain.text.strip()
        assert plain.json()["model"] == MODEL
