"""The openai package as the client, with its strict validation on: every form of a completion and the shared fields.

Two of its types are stricter than OpenAI's own server, and thus than ours. In a stream of completions the finish reason
is null until the last chunk. The first token of an echoed prompt has a null log-probability. Those two are validated
against types that allow just that null."""

from typing import Any, Literal

import openai
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from tests.support.http.fake_engine import MODEL, FakeEngine, client_of


class EchoedLogprobs(Logprobs):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class OpenChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None
    logprobs: EchoedLogprobs | None


class OpenCompletion(Completion):
    choices: list[OpenChoice]


def strict(engine: FakeEngine) -> openai.AsyncOpenAI:
    http = client_of(engine)
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http, max_retries=0, _strict_response_validation=True
    )


PROMPTS = ["a", ["a", "bc"], [97, 98], [[97], [98, 99]]]
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 2, "seed": 1, "best_of": 2},
    {"stop": ["w", "zz"], "max_tokens": 30, "user": "me"},
    {"stop": "w", "max_tokens": 30, "extra_body": {"include_stop_str_in_output": True}},
    {"logprobs": 2, "temperature": 0},
    {"echo": True, "max_tokens": 3},
    {"max_tokens": 0},
    {"logit_bias": {"65": -100}, "presence_penalty": 1, "frequency_penalty": -1, "top_p": 0.5},
    {"extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}},
    {"extra_body": {"stop_token_ids": [111], "priority": 3, "cache_salt": "s", "request_id": "r"}},
    {"extra_body": {"return_token_ids": True, "truncate_prompt_tokens": 1, "add_special_tokens": False}},
    {"extra_body": {"skip_special_tokens": False, "made_up": 1}},
]


@pytest.mark.parametrize("fields", FIELDS)
async def test_completions(fields: dict[str, Any]):
    for prompt in PROMPTS:
        client = strict(FakeEngine())
        plain = await client.completions.create(model=MODEL, prompt=prompt, **fields)
        assert len(plain.choices) == (1 if prompt in ("a", [97, 98]) else 2) * fields.get("n", 1)
        assert plain.usage.prompt_tokens_details.cached_tokens is not None
        assert plain.system_fingerprint
        body = {"model": MODEL, "prompt": prompt, **fields, "stream": True, "stream_options": {"include_usage": True}}
        body |= body.pop("extra_body", {})
        stream = await client.post(
            "/completions",
            body=body,
            cast_to=OpenCompletion,
            stream=True,
            stream_cls=openai.AsyncStream[OpenCompletion],
        )
        *chunks, last = [chunk async for chunk in stream]
        assert last.choices == []
        assert last.usage == plain.usage
        for choice in plain.choices:
            parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(part.text for part in parts) == choice.text
            assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_logprobs(stream: bool):
    body = {"model": MODEL, "prompt": ["ab", "c"], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    client = strict(FakeEngine())
    if stream:
        chunks = await client.post(
            "/completions",
            body=body,
            cast_to=OpenCompletion,
            stream=True,
            stream_cls=openai.AsyncStream[OpenCompletion],
        )
        choices = sorted([c async for chunk in chunks for c in chunk.choices], key=lambda c: c.index)
    else:
        choices = (await client.post("/completions", body=body, cast_to=OpenCompletion)).choices
    assert [c.text for c in choices] == ["abH", "cH"]
    assert [c.logprobs.token_logprobs for c in choices] == [[None, -98 / 128, -0.5], [None, -0.5]]


@pytest.mark.parametrize(
    "field", [f for f in FIELDS if "echo" not in f and "best_of" not in f and f.get("max_tokens") != 0]
)
async def test_chats(field: dict[str, Any]):
    fields = field | ({"logprobs": True, "top_logprobs": 2} if "logprobs" in field else {})
    client = strict(FakeEngine())
    messages = [{"role": "user", "content": "hi"}]
    plain = await client.chat.completions.create(model=MODEL, messages=messages, **fields)
    assert plain.usage.prompt_tokens_details.cached_tokens is not None
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options=options, **fields
    )
    *chunks, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert last.usage == plain.usage
    for choice in plain.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
    assert {chunk.system_fingerprint for chunk in chunks} == {plain.system_fingerprint}


async def test_the_header_of_ignored_fields_reaches_the_client():
    completions = strict(FakeEngine()).completions.with_raw_response
    answer = await completions.create(model=MODEL, prompt="a", extra_body={"made_up": 1})
    assert answer.headers["x-callboard-ignored-fields"] == "made_up"


async def test_a_stream_that_fails_ends_in_an_error():
    client = strict(FakeEngine(fails_after=2))
    stream = await client.post(
        "/completions",
        body={"model": MODEL, "prompt": "a", "stream": True},
        cast_to=OpenCompletion,
        stream=True,
        stream_cls=openai.AsyncStream[OpenCompletion],
    )
    assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["H", "e"]
    with pytest.raises(openai.APIError, match="no finite logits"):
        await anext(stream)
