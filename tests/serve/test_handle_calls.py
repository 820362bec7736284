"""Calls of the application's Serve handle: bodies and answers of the HTTP API."""

import asyncio
import base64
import io
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict
from ray.llm._internal.batch.stages.serve_deployment_stage import ServeDeploymentStageUDF

from actors.ray import callers
from actors.ray.callers import Callers, current_call
from runtime.base.model.pooling import Pooling
from serve_app.application import build_http_app
from serve_app.handle import CallError, HandleCalls, Turns
from serve_app.protocol.errors import ApiError
from serve_app.service.service import Service
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat, events_of, post
from tests.support.http.fake_images import TEMPLATE, FakeImages, app_with_images, engine_with_images

TEXT = "Hello, wörld!"
VARYING = ("id", "created", "seed")


class Handle(HandleCalls):
    """A front without Serve."""

    def __init__(self, engine: FakeEngine) -> None:
        self._routes = build_http_app(Service(engine, byte_tokenizer(), MODEL)).router
        self._callers, self._turns = Callers(), Turns()


async def whole(method, body, caller=None):
    """As Serve's replica runs a call without options(stream=True)."""
    request_metadata = SimpleNamespace(is_streaming=False, caller=caller)  # noqa: F841  # as Serve names it
    return await method(body)


async def streamed(method, body, caller=None) -> list[dict]:
    request_metadata = SimpleNamespace(is_streaming=True, caller=caller)  # noqa: F841
    return [item async for item in await method(body)]


def alike(answer):
    """The answer without what differs between two runs."""
    if isinstance(answer, dict):
        return {key: alike(value) for key, value in answer.items() if key not in VARYING}
    return [alike(value) for value in answer] if isinstance(answer, list) else answer


ROUTES = {
    "chat": ("/v1/chat/completions", chat(logprobs=True, top_logprobs=1)),
    "completions": ("/v1/completions", {"prompt": "a", "logprobs": 1, "n": 2}),
    "responses": ("/v1/responses", {"input": "a"}),
}


async def test_hints_set_a_lifetime():
    handle = Handle(engine := FakeEngine())
    await whole(handle.chat, chat(cache_control={"type": "ephemeral", "ttl": "1h"}))
    await whole(handle.completions, {"prompt": "a", "prompt_cache_options": {"ttl": "12h"}})
    assert [request.cache_ttl_s for request in engine.requests] == [3600, 43_200]


async def test_a_picture_may_be_a_value_of_python(tmp_path):
    handle, images, engine = Handle(FakeEngine()), FakeImages(), engine_with_images()
    handle._routes = app_with_images(engine, TEMPLATE, images).router
    array = np.full((2, 3, 3), 7, np.uint8)
    (tmp_path / "a.png").write_bytes(b"a picture")
    for picture in (array, Image.fromarray(array), tmp_path / "a.png"):
        part = {"type": "image_url", "image_url": {"url": picture}}
        await whole(handle.chat, {"messages": [{"role": "user", "content": [part]}]})
    files = [base64.b64decode(source.url.partition(",")[2]) for source in images.sources]
    assert files[2] == b"a picture"
    assert all((np.asarray(Image.open(io.BytesIO(file))) == array).all() for file in files[:2])
    part["image_url"] = {"url": tmp_path / "b.png"}
    with pytest.raises(CallError, match="which cannot be read") as caught:
        await whole(handle.chat, {"messages": [{"role": "user", "content": [part]}]})
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ROUTES)
async def test_whole_answer_is_that_of_http(name):
    path, body = ROUTES[name]
    handle = Handle(FakeEngine())
    answer = await whole(getattr(handle, name), body)
    assert TEXT in str(answer)
    assert answer["usage"]
    if name != "responses":  # its parts have ids of their own
        assert alike(answer) == alike((await post(FakeEngine(), body, path)).json())
    (only,) = await streamed(getattr(handle, name), body)  # as Ray Data's stage calls it
    assert TEXT in str(only)


@pytest.mark.parametrize("name", ["chat", "completions"])
async def test_chunks_are_those_of_http(name):
    path, body = ROUTES[name]
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = await streamed(getattr(Handle(FakeEngine()), name), body)
    expected = events_of(await post(FakeEngine(), body, path))
    key = lambda chunk: str(chunk["choices"] and chunk["choices"][0]["index"])  # noqa: E731  # choices interleave
    assert sorted(map(alike, chunks), key=key) == sorted(map(alike, expected), key=key)
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_response_events_are_those_of_http():
    events = await streamed(Handle(FakeEngine()).responses, {"input": "a", "stream": True})
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"


async def test_vectors_and_scores():
    handle = Handle(FakeEngine(pooling=Pooling("last", normalized=True)))
    answer = await whole(handle.embeddings, {"input": ["aab", "cd"]})
    assert [len(entry["embedding"]) for entry in answer["data"]] == [4, 4]
    assert answer["usage"]["prompt_tokens"] == 5
    (answer,) = await streamed(handle.score, {"text_1": "a", "text_2": ["a", "b"]})
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([1.0, 0.0])


class Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    messages: list
    top_k: int = 7  # a default, which is not sent
    temperature: float | None = None


@dataclass
class Plain:
    messages: list


async def test_bodies_of_other_kinds():
    engine = FakeEngine()
    messages = chat()["messages"]
    for body in (
        Request(messages=messages, max_tokens=3),
        Plain(messages),
        {"messages": np.array(messages, object), "max_tokens": np.int64(3), "temperature": np.float32(0)},
    ):
        assert (await whole(Handle(engine).chat, body))["choices"][0]["message"]["content"]
    assert [request.params.max_tokens for request in engine.requests] == [3, 109, 3]
    assert engine.requests[0].params.top_k != 7


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (chat(max_tokens="x"), "max_tokens", 'max_tokens is "x": input should be a valid integer.'),
        (chat(model="none"), "model", "There is no model 'none' here; this server has 'fake'."),
        (chat(stream=True), "stream", "stream is true; call handle.options(stream=True), or leave it out."),
        ({"messages": [object()]}, None, "The request body is not JSON: object is not one of its types; send plain"),
        ([1], None, "The request body must be a JSON object."),
    ],
)
async def test_refusal_is_a_value_error_with_its_sentence(body, param, says):
    with pytest.raises(CallError) as found:
        await whole(Handle(FakeEngine()).chat, body)
    error = pickle.loads(pickle.dumps(found.value))
    assert isinstance(error, ApiError)
    assert isinstance(error, ValueError)
    assert (error.param, str(error)) == (param, str(found.value))
    assert says in str(error)


async def test_error_after_the_first_chunk_ends_the_call():
    with pytest.raises(CallError, match=r"The model gave no finite logits\."):
        await streamed(Handle(FakeEngine(fails_after=3)).chat, chat(stream=True))


async def test_call_waits_while_no_engine_takes_it():
    engine = FakeEngine(reason="The engine is restarting.")
    call = asyncio.create_task(whole(Handle(engine).chat, chat()))
    await asyncio.sleep(0.1)
    assert not call.done()
    engine.reason = None
    assert (await call)["usage"]["completion_tokens"]


async def test_dead_caller_does_not_wait_for_an_engine(monkeypatch):
    monkeypatch.setattr(callers, "_POLL_S", 0.01)
    monkeypatch.setattr(callers, "_dead", list)
    handle = Handle(FakeEngine(reason="The engine is restarting."))
    with pytest.raises(CallError, match=r"The caller of this request has ended\."):
        await whole(handle.chat, chat(), ("node", "a"))


async def test_leaving_front_refuses_calls():
    handle = Handle(FakeEngine(reason="The server is stopping."))
    handle._is_leaving = True
    with pytest.raises(CallError, match="stopping"):
        await whole(handle.chat, chat())


async def test_closed_stream_aborts_its_request():
    engine = FakeEngine(delay_s=0.01)
    request_metadata = SimpleNamespace(is_streaming=True)  # noqa: F841
    chunks = await Handle(engine).chat(chat(stream=True))
    await anext(chunks)
    await chunks.aclose()
    while not engine.aborted:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_dead_caller_aborts_its_request(monkeypatch, stream):
    dead = []
    monkeypatch.setattr(callers, "_POLL_S", 0.01)
    monkeypatch.setattr(callers, "_dead", lambda found: [caller for caller in found if caller in dead])
    engine = FakeEngine("a" * 100, delay_s=0.05)
    handle = Handle(engine)
    run = streamed if stream else whole
    calls = [asyncio.create_task(run(handle.chat, chat(stream=stream), ("node", name))) for name in "ab"]
    while engine.num_running < 2:
        await asyncio.sleep(0.01)
    assert handle._turns.num_streams <= (2 if stream else 0)
    dead.append(("node", "a"))
    while engine.num_running > 1:
        await asyncio.sleep(0.01)
    assert len(engine.aborted) == 1
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert handle._turns.num_streams == 0


def test_call_outside_of_serve_is_not_streamed():
    assert current_call() == (False, None)


async def test_ray_data_stage_takes_whole_answers_and_bad_rows():
    """The stage's own code, with a handle that calls the front in this process."""
    handle = Handle(FakeEngine())

    class Remote:
        def __getattr__(self, name):
            async def items(body):
                for item in await streamed(getattr(handle, name), body):
                    yield item

            return SimpleNamespace(remote=items)

    stage = object.__new__(ServeDeploymentStageUDF)
    stage._dh, stage._dtype_mapping, stage.request_id = Remote(), {"Request": Request}, 0
    stage.should_continue_on_error, stage.request_timeout_s = True, None
    bodies = [chat(), chat(max_tokens=-9), chat(temperature=np.float64(0))]
    rows = [{"method": "chat", "request_kwargs": body, "__idx_in_batch": at} for at, body in enumerate(bodies)]
    rows.append({**rows[0], "request_kwargs": chat(), "dtype": "Request", "__idx_in_batch": 3})
    found = sorted([row async for row in stage.udf(rows)], key=lambda row: row["__idx_in_batch"])
    assert [bool(row["__inference_error__"]) for row in found] == [False, True, False, False]
    assert "max_tokens is -9" in found[1]["__inference_error__"]
    for row in (found[0], found[2], found[3]):
        assert row["choices"][0]["message"]["content"] == TEXT
        assert row["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert msgspec.json.encode(found[0]["usage"])
