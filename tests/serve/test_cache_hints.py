"""Hints about prompts that will come again, by OpenAI's and Anthropic's clients."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from runtime.base.config import EngineConfig
from runtime.base.types import Request
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.serve.test_messages import client_of as anthropic_client
from tests.serve.test_responses_api import events_of
from tests.support.http.chats import QWEN
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat, client_of

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IN_5_M, IN_1_H, NEVER = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None
EXPLICIT = {"mode": "explicit"}


def engine_of(**options: Any) -> FakeEngine:
    return FakeEngine("Hello", **{"max_model_len": 4096, **options})


def openai_client(engine: FakeEngine) -> openai.AsyncOpenAI:
    http = client_of(engine, byte_tokenizer(QWEN))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)


def text(value: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


async def asked(engine: FakeEngine, **fields: Any) -> anthropic.types.Message:
    return await anthropic_client(engine).messages.create(**{"model": MODEL, "max_tokens": 9, "messages": HI, **fields})


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({}, 0),
        ({"cache_control": IN_5_M}, 300),
        ({"cache_control": NEVER}, 0),
        ({"system": [text(cache_control=IN_1_H), text(cache_control=IN_5_M)]}, 3600),
        ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, 300),
        ({"messages": user(text(cache_control=IN_1_H), text())}, 3600),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    *user({"type": "tool_result", "tool_use_id": "c", "content": [text("a", cache_control=IN_1_H)]}),
                ]
            },
            3600,
        ),
    ],
)
async def test_anthropic_marks_set_the_lifetime(fields: dict[str, Any], ttl_s: float):
    engine = engine_of()
    await asked(engine, **fields)
    assert engine.requests[0].cache_ttl_s == ttl_s


@pytest.mark.parametrize(
    ("fields", "ttl_s"),
    [
        ({}, 0),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"mode": "implicit"}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h"}}, 43_200),
        ({"prompt_cache_options": EXPLICIT}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"messages": user(text(prompt_cache_breakpoint=EXPLICIT))}, 1800),
        ({"messages": user(text(prompt_cache_breakpoint={**EXPLICIT, "ttl": "12h"}))}, 43_200),
        ({"messages": user(text(cache_control=IN_1_H))}, 3600),  # proxies send it
        (
            {
                "messages": user(text(prompt_cache_breakpoint=EXPLICIT)),
                "prompt_cache_options": {**EXPLICIT, "ttl": "12h"},
            },
            43_200,
        ),
    ],
)
async def test_openai_options_set_the_lifetime(fields: dict[str, Any], ttl_s: float):
    engine = engine_of()
    plain = openai_client(engine)
    await plain.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})
    items = fields.pop("messages", HI)
    for item in items:
        if isinstance(item["content"], list):
            item["content"] = [part | {"type": "input_text"} for part in item["content"]]
    await plain.responses.create(model=MODEL, input=items, **fields)
    assert [request.cache_ttl_s for request in engine.requests] == [ttl_s, ttl_s]


async def test_hints_change_no_prompt():
    plain, marked = engine_of(), engine_of()
    await asked(plain, system=[text("s")], tools=[TOOL], messages=user(text("a")))
    await asked(
        marked,
        system=[text("s", cache_control=IN_1_H)],
        tools=[{**TOOL, "cache_control": IN_5_M}],
        messages=user(text("a", cache_control=IN_5_M)),
    )
    one, other = plain.requests[0], marked.requests[0]
    assert (one.token_ids, one.params.max_tokens) == (other.token_ids, other.params.max_tokens)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"system": [text(cache_control=IN_5_M) for _ in range(5)]}, "cache_control marks 5 blocks"),
        (
            {"system": [text(cache_control=IN_5_M) for _ in range(4)], "cache_control": IN_5_M},
            "cache_control marks 5 blocks",
        ),
        ({"system": [text(cache_control={"type": "ephemeral", "ttl": "2h"})]}, r"system\.0\.cache_control\.ttl"),
        ({"messages": user(text(cache_control={"type": "for ever"}))}, r"messages\.0\.content\.0\.cache_control\.type"),
    ],
)
async def test_wrong_marks_are_refused(fields: dict[str, Any], problem: str):
    with pytest.raises(anthropic.BadRequestError, match=problem):
        await asked(engine_of(), **fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_cache_options": {"ttl": "2y"}}, r"prompt_cache_options\.ttl"),
        ({"prompt_cache_options": {"mode": "all"}}, r"prompt_cache_options\.mode"),
        ({"prompt_cache_retention": "1w"}, "prompt_cache_retention"),
        ({"messages": user(text(prompt_cache_breakpoint={}))}, r"messages\.0\.content\.0\.prompt_cache_breakpoint"),
    ],
)
async def test_wrong_options_are_refused(fields: dict[str, Any], problem: str):
    with pytest.raises(openai.BadRequestError, match=problem):
        await openai_client(engine_of()).chat.completions.create(**{"model": MODEL, "messages": HI, **fields})


# ---- usage -----------------------------------------------------------------------------------------------------------


def full_blocks(request: Request) -> int:
    return request.prompt_len // 16 * 16


@pytest.mark.parametrize(("mark", "spans"), [(IN_5_M, (1, 0)), (IN_1_H, (0, 1)), (NEVER, (0, 0))])
async def test_anthropic_usage_counts_created_tokens(mark: dict[str, str] | None, spans: tuple[int, int]):
    engine = engine_of()
    system = [text("a" * 40, cache_control=mark)]
    usage = (await asked(engine, system=system)).usage
    num_created = full_blocks(engine.requests[0]) - 3 if mark else 0
    created = usage.cache_creation
    assert usage.cache_creation_input_tokens == num_created
    assert (created.ephemeral_5m_input_tokens, created.ephemeral_1h_input_tokens) == tuple(
        n * num_created for n in spans
    )
    parts = usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    assert sum(parts) == engine.requests[0].prompt_len
    async with anthropic_client(engine).messages.stream(
        model=MODEL, max_tokens=9, messages=HI, system=system
    ) as stream:
        assert (await stream.get_final_message()).usage.cache_creation == created


async def test_openai_usage_counts_written_tokens():
    engine = engine_of()
    client, options = openai_client(engine), {"ttl": "12h"}
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, n=2, extra_body={"prompt_cache_options": options}
    )
    num_written = full_blocks(engine.requests[0]) - 3
    assert answer.usage.prompt_tokens_details.cache_write_tokens == num_written > 0
    response = await client.responses.create(model=MODEL, input="hi", prompt_cache_options=options)
    details = response.usage.input_tokens_details
    assert details.cache_write_tokens == details.cache_write_tokens_details.ttl_12h_tokens == num_written
    assert details.cache_write_tokens_details.ttl_30m_tokens == 0
    plain = await client.chat.completions.create(model=MODEL, messages=HI)
    assert plain.usage.prompt_tokens_details.cache_write_tokens is None


async def test_without_a_prefix_cache_hints_are_empty():
    engine = engine_of()
    service = Service(engine, byte_tokenizer(QWEN), MODEL, config=EngineConfig(prefix_cache=False))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_http_app(service)), base_url="http://test"
    ) as client:
        body = {"model": MODEL, **chat(prompt_cache_options={"ttl": "30m"})}
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    assert engine.requests[0].cache_ttl_s == 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


# ---- prompts that are only cached ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_prewarms_without_output(stream: bool):
    engine = engine_of()
    fields = {"model": MODEL, "max_tokens": 0, "messages": HI, "system": [text("a" * 40, cache_control=IN_1_H)]}
    client = anthropic_client(engine)
    if stream:
        async with client.messages.stream(**fields) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**fields)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert message.usage.cache_creation_input_tokens == full_blocks(engine.requests[0]) - 3
    assert (engine.requests[0].params.max_tokens, engine.requests[0].cache_ttl_s) == (1, 3600)


async def test_openai_prewarms_without_output():
    engine = engine_of()
    client, options = openai_client(engine), {"prewarm": True}
    response = await client.responses.create(model=MODEL, input="hi", prompt_cache_options=options)
    *_, last = await events_of(client, input="hi", prompt_cache_options=options)
    for answer in (response, last.response):
        assert (answer.status, answer.output, answer.usage.output_tokens) == ("completed", [], 0)
        assert answer.usage.input_tokens_details.cache_write_tokens > 0
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, extra_body={"prompt_cache_options": options}
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.usage.completion_tokens) == ("", "length", 0)
    assert {request.params.max_tokens for request in engine.requests} == {1}
    assert {request.cache_ttl_s for request in engine.requests} == {1800}
