"""Answers to requests that were aborted by their ids, or by a pause: their tokens so far, where the API has a form."""

import json
from typing import Any

import pytest

from runtime.base.model.pooling import Pooling
from runtime.base.types import FinishReason
from tests.support.http.chats import THINKING
from tests.support.http.fake_engine import (
    MODEL,
    FakeEngine,
    assert_error,
    byte_tokenizer,
    chat,
    client_of,
    events_of,
    post,
)

WHY = "A pause of the server ended this request; send it again."
MESSAGE = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def engine_of(text: str = "Hello, wörld!", after: int = 5, **options: Any) -> FakeEngine:
    """The engine aborts each request after some tokens."""
    return FakeEngine(text, fails_after=after, failure=(FinishReason.ABORT, WHY), max_model_len=4096, **options)


async def test_a_completion_has_its_tokens_so_far():
    versions = [(0, "a"), (3, "b")]
    request = {"prompt": "a", "max_tokens": 50, "return_token_ids": True, "logprobs": 0}
    answer = (await post(engine_of(weight_versions=versions), request)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "abort", None)
    assert (len(choice["token_ids"]), len(choice["logprobs"]["tokens"])) == (5, 5)
    assert choice["weight_versions"][-1] == {"version": "b", "start": 3, "end": 5}
    assert answer["usage"]["completion_tokens"] == 5
    waiting = (await post(engine_of(after=0), request)).json()
    assert (waiting["choices"][0]["text"], waiting["choices"][0]["finish_reason"]) == ("", "abort")


async def test_half_a_character_ends_as_it_does_at_the_token_limit():
    request = {"prompt": "a", "max_tokens": 50}
    aborted = (await post(engine_of("wörld", after=2), request)).json()["choices"][0]["text"]
    assert aborted == (await post(FakeEngine("wörld"), request | {"max_tokens": 2})).json()["choices"][0]["text"]


async def test_a_chat_has_its_reasoning_so_far():
    async with client_of(engine_of("Hm, well"), byte_tokenizer(THINKING)) as client:
        (choice,) = (await client.post("/v1/chat/completions", json=chat())).json()["choices"]
        streamed = events_of(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert choice["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == "abort"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm, w", None)


async def test_each_choice_of_a_stream_ends():
    request = {"prompt": "a", "max_tokens": 50, "n": 2, "stream": True}
    events = events_of(await post(engine_of(), request))
    ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted((end["index"], end["finish_reason"]) for end in ends) == [(0, "abort"), (1, "abort")]


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"input": "a"}),
        ("/api/generate", {"model": MODEL, "prompt": "a", "stream": False}),
        ("/api/chat", MESSAGE | {"stream": False}),
    ],
)
async def test_other_apis_report_an_error(path: str, request_body: dict[str, Any]):
    response = await post(engine_of(), request_body, path)
    assert response.status_code == 499
    assert WHY in response.text


async def test_a_streamed_response_fails_with_its_output_so_far():
    streamed = await post(engine_of(), {"input": "a", "stream": True}, "/v1/responses")
    *_, last = (line for line in streamed.text.splitlines() if line.startswith("data: {"))
    response = json.loads(last.removeprefix("data: "))["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", WHY)
    assert response["output"][0]["content"][0]["text"] == "Hello"


async def test_a_vector_has_no_part():
    engine = engine_of(pooling=Pooling("last", normalized=True))
    assert_error(await post(engine, {"input": "a"}, "/v1/embeddings"), 499, None, WHY, "request_aborted")
