"""The anthropic package as the client, with strict validation, beside chats of the same requests."""

import json
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from runtime.base.types import FinishReason
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.chats import ARGUMENTS, CALL, QWEN, THINKING, TIME_CALL
from tests.support.http.chats import TOOLS as CHAT_TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, post
from tests.support.structured.cases import fits

pytestmark = pytest.mark.usefixtures("shared_compiler")
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in CHAT_TOOLS)
]
CITY = json.loads(ARGUMENTS)
SCHEMA = TOOLS[0]["input_schema"]


def engine_of(text: str = "Hello, wörld!", **options: Any) -> FakeEngine:
    return FakeEngine(text, **{"max_model_len": 4096, **options})


def client_of(engine: FakeEngine, template: str = QWEN, key: str = "k", **settings: Any) -> anthropic.AsyncAnthropic:
    app = build_http_app(Service(engine, byte_tokenizer(template), MODEL), HttpSettings(**settings))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app, raise_app_exceptions=False))
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key=key, http_client=http, max_retries=0, _strict_response_validation=True
    )


def fields_of(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 500, "messages": HI, **fields}


def content_of(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """Blocks without their random parts and without fields that the client adds."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{k: v for k, v in block.items() if k not in ("id", "parsed_output")} for block in blocks]


def prompt_of(engine: FakeEngine, at: int = -1) -> str:
    return bytes(engine.requests[at].token_ids).decode()


async def answered(text: str, template: str = QWEN, **fields: Any) -> tuple[FakeEngine, anthropic.types.Message]:
    """The plain answer. A streamed answer equals it, however the tokens arrive."""
    engine = engine_of(text)
    plain = await client_of(engine, template).messages.create(**fields_of(**fields))
    for group in (1, 3, 1000):
        async with client_of(engine_of(text, group=group), template).messages.stream(**fields_of(**fields)) as stream:
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        assert content_of(final) == content_of(plain)
        assert "".join(pieces) == "".join(block.text for block in plain.content if block.type == "text")
        assert (final.stop_reason, final.stop_sequence, final.role) == (
            plain.stop_reason,
            plain.stop_sequence,
            plain.role,
        )
        if group == 1:
            assert final.usage == plain.usage
    return engine, plain


# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_a_message_is_the_chat_of_the_same_request():
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "min_p": 0.1}
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    ours = {"system": system, "stop_sequences": ["zz"], "metadata": {"user_id": "u"}, "extra_body": more}
    engine, message = await answered("Hello, wörld!", **ours)
    assert message.id.startswith("msg_")
    assert content_of(message) == [{"type": "text", "text": "Hello, wörld!"}]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, MODEL)
    chat = engine_of()
    messages = [{"role": "system", "content": "be brief"}, *HI]
    body = {"model": MODEL, "max_tokens": 500, "messages": messages, "stop": ["zz"], "user": "u", **more}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_http_app(Service(chat, byte_tokenizer(QWEN), MODEL))),
        base_url="http://test",
    ) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    one, other = engine.requests[0], chat.requests[0]
    assert (one.token_ids, one.params, one.seed) == (other.token_ids, other.params, other.seed)
    usage = message.usage
    assert usage.cache_read_input_tokens == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    num_prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert num_prompt == answer["usage"]["prompt_tokens"]
    assert usage.output_tokens == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("one, two", {"stop_sequences": ["two"]}, ("stop_sequence", "two")),
        ("one, two", {"max_tokens": 3}, ("max_tokens", None)),
        ("", {}, ("end_turn", None)),
    ],
)
async def test_reasons_to_stop(text: str, fields: dict[str, Any], reason: tuple[str, str | None]):
    _, message = await answered(text, **fields)
    assert (message.stop_reason, message.stop_sequence) == reason
    assert content_of(message) == (
        [{"type": "text", "text": text[: 5 if "stop_sequences" in fields else 3]}] if text else []
    )


async def test_events_in_their_order():
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{TIME_CALL}"
    client = client_of(engine_of(text, group=1000), QWEN + "{# </think> #}")
    raw = await client.messages.with_raw_response.create(**fields_of(tools=TOOLS, stream=True))
    events = [json.loads(line[6:]) async for line in raw.http_response.aiter_lines() if line.startswith("data: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    assert [event["type"] for event in events] == kinds
    assert [e["content_block"]["type"] for e in events if "content_block" in e] == [
        "thinking",
        "text",
        *["tool_use"] * 2,
    ]
    deltas = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]


async def test_a_waiting_stream_is_pinged():
    client = client_of(engine_of("a", delay_s=0.1), keep_alive_s=0.02)
    raw = await client.messages.with_raw_response.create(**fields_of(stream=True))
    lines = [line async for line in raw.http_response.aiter_lines() if line.startswith("event: ")]
    assert lines[:2] == ["event: ping"] * 2
    async with client.messages.stream(**fields_of()) as stream:
        assert await stream.get_final_text() == "a"


# ---- tools and reasoning ---------------------------------------------------------------------------------------------


async def test_a_round_trip_of_tools():
    calls = [{"type": "tool_use", "name": f"get_{what}", "input": CITY} for what in ("weather", "time")]
    _, message = await answered(f"Let me see.\n{CALL}\n{TIME_CALL}", tools=TOOLS)
    assert content_of(message) == [{"type": "text", "text": "Let me see."}, *calls]
    assert message.stop_reason == "tool_use"
    one, other = (block.id for block in message.content if block.type == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": other, "content": "unknown", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    messages = [*HI, message.to_param(), {"role": "user", "content": results}, {"role": "user", "content": "Now?"}]
    engine, _ = await answered("Rain.", tools=TOOLS, messages=messages)
    chat = engine_of()
    turn = {"role": "assistant", "content": "Let me see."}
    turn["tool_calls"] = [
        {"id": i, "type": "function", "function": {"name": call["name"], "arguments": ARGUMENTS}}
        for i, call in zip((one, other), calls, strict=True)
    ]
    same = [
        *HI,
        turn,
        {"role": "tool", "tool_call_id": one, "content": "rain"},
        {"role": "tool", "tool_call_id": other, "content": "Error: unknown"},
        {"role": "user", "content": "Well?\nNow?"},
    ]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(build_http_app(Service(chat, byte_tokenizer(QWEN), MODEL))),
        base_url="http://test",
    ) as client:
        await client.post("/v1/chat/completions", json={"messages": same, "tools": CHAT_TOOLS, "max_tokens": 500})
    assert prompt_of(engine) == prompt_of(chat)


async def test_the_choice_of_a_tool():
    begin = '<tool_call>\n{"name": "'
    engine, message = await answered(
        f" {ARGUMENTS}}}\n</tool_call>", tools=TOOLS, tool_choice={"type": "tool", "name": "get_time"}
    )
    assert prompt_of(engine).endswith(f'{begin}get_time", "arguments":')
    assert content_of(message) == [{"type": "tool_use", "name": "get_time", "input": CITY}]
    assert engine.requests[0].params.grammar is not None
    engine, message = await answered(CALL.removeprefix(begin), tools=TOOLS, tool_choice={"type": "any"})
    assert prompt_of(engine).endswith(begin)
    assert content_of(message) == [{"type": "tool_use", "name": "get_weather", "input": CITY}]
    once = {"type": "auto", "disable_parallel_tool_use": True}
    _, message = await answered(f"{CALL}{TIME_CALL}", tools=TOOLS, tool_choice=once)
    assert len(message.content) == 1
    engine, message = await answered(CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert content_of(message) == [{"type": "text", "text": CALL}]
    assert "<tools>" not in prompt_of(engine)


async def test_arguments_that_are_truncated_or_not_json():
    _, message = await answered(CALL, tools=TOOLS, max_tokens=63)
    assert message.stop_reason == "max_tokens"
    assert content_of(message) == [{"type": "tool_use", "name": "get_weather", "input": {}}]
    client = client_of(engine_of(CALL.replace('"city"', "city")))
    message = await client.messages.create(**fields_of(tools=TOOLS))
    assert content_of(message)[0]["input"] == {"INVALID_JSON": '{city: "Zürich"}'}


async def test_reasoning():
    thinking = {"type": "enabled", "budget_tokens": 2000}
    engine, message = await answered("hm\n</think>\n\nHi.", THINKING, thinking=thinking)
    budget = engine.requests[-1].params.thinking
    assert budget is not None
    assert budget.num_tokens == 2000
    assert content_of(message) == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hi."},
    ]
    engine, message = await answered("Hi.", THINKING, thinking={"type": "disabled"})
    assert prompt_of(engine).endswith("<think></think>")
    assert content_of(message) == [{"type": "text", "text": "Hi."}]
    _, message = await answered("hm\n</think>Hi.", THINKING, thinking={"type": "adaptive", "display": "omitted"})
    assert content_of(message) == [{"type": "text", "text": "Hi."}]
    shows = QWEN.replace("{{ m.content", "{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}{{ m.content")
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    turns = [{"role": "assistant", "content": [*blocks, {"type": "text", "text": "Hi."}]}] * 2
    engine, _ = await answered("Hi.", shows, messages=[*HI, {"role": "assistant", "content": "So"}, *turns, *HI])
    assert prompt_of(engine) == "<|user|>hi<|assistant|>(hm\nhm)So\nHi.\nHi.<|user|>hi<|assistant|>"


async def test_a_started_answer_is_continued():
    messages = [*HI, {"role": "assistant", "content": "The best "}]
    engine, message = await answered("one.", messages=messages)
    assert prompt_of(engine) == "<|user|>hi<|assistant|>The best "
    assert content_of(message) == [{"type": "text", "text": "one."}]


async def test_output_that_follows_a_schema():
    engine = engine_of(ARGUMENTS)
    output = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    raw = await client_of(engine).messages.with_raw_response.create(**fields_of(output_config=output))
    assert raw.headers["x-callboard-ignored-fields"] == "output_config.effort"
    grammar = engine.requests[0].params.grammar
    assert fits(grammar, ARGUMENTS)
    assert not fits(grammar, "{}")


async def test_counted_tokens_equal_the_prompts():
    fields = {"system": "s", "tools": TOOLS, "messages": HI, "thinking": {"type": "disabled"}}
    engine, _ = await answered("x", THINKING, **fields)
    counted = await client_of(engine_of(), THINKING).messages.count_tokens(model=MODEL, **fields)
    assert counted.input_tokens == len(engine.requests[0].token_ids)


# ---- refusals --------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is []"),
        (user(IMAGE), 'messages.0.content.0.type is "image", but the model "fake" takes no images'),
        (user(DOCUMENT), "messages.0.content.0.type is"),
        (user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "unexpected `tool_use_id` found"),
        (user(TOOL_USE), "messages.0.content.0 is a tool_use"),
        ({"system": [IMAGE]}, "system.0 is"),
        ({"system": 1}, "it should be a text or a list of blocks"),
        ({"tools": [{**TOOLS[0], "type": "function_tool"}]}, "tools.0 is"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name is"),
        ({"tools": [{**TOOLS[0], "strict": True, "input_schema": {"not": {}}}]}, "has a function get_weather"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed when there are tools"),
        ({"stop_sequences": [""]}, "stop_sequences.0 is"),
        ({"stop_sequences": ["a"] * 9}, "stop_sequences has 9 stop strings"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is"),
        ({"extra_body": {"temperature": -1}}, "temperature is -1"),
        ({"extra_body": {"n": 2}}, "n is no field of Anthropic's requests"),
        ({"messages": [*HI, {"role": "assistant", "content": [TOOL_USE]}]}, "messages.1 is a tool_use"),
        ({"max_tokens": 5000}, "exceed context limit"),
    ],
)
async def test_a_bad_request(fields: dict[str, Any], says: str):
    engine = engine_of()
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client_of(engine, max_stop=8).messages.create(**fields_of(**fields))
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body.keys() == {"type", "error"}
    assert says in caught.value.body["error"]["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("engine", "fields", "error", "kind"),
    [
        ({}, {"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"busy": True}, {}, anthropic.RateLimitError, "rate_limit_error"),
        ({"reason": "The engine restarts."}, {}, anthropic.ServiceUnavailableError, "overloaded_error"),
        ({"fails_after": 0}, {}, anthropic.InternalServerError, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_statuses(engine: dict[str, Any], fields: dict[str, Any], error: type, kind: str, stream: bool):
    with pytest.raises(error) as caught:
        await client_of(engine_of(**engine)).messages.create(**fields_of(stream=stream, **fields))
    assert caught.value.type == kind


async def test_an_error_within_a_stream():
    failure = (FinishReason.ERROR, "The model gave no finite logits.")
    async with client_of(engine_of("abcdef", fails_after=3, failure=failure)).messages.stream(**fields_of()) as stream:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await stream.get_final_message()
        assert stream.current_message_snapshot.content[0].text == "abc"
    assert caught.value.type == "api_error"
    assert caught.value.body["error"]["message"] == failure[1]


async def test_keys_and_wrong_routes():
    settings = {"api_key": ("right", "other")}
    for key in ("right", "other"):
        assert (await client_of(engine_of(), key=key, **settings).messages.create(**fields_of())).stop_reason
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await client_of(engine_of(), key="wrong", **settings).messages.create(**fields_of())
    assert caught.value.type == "authentication_error"
    app = build_http_app(Service(engine_of(), byte_tokenizer(QWEN), MODEL), HttpSettings(**settings))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        bearer = {"Authorization": "Bearer right"}
        assert (await client.post("/v1/messages", json=fields_of(), headers=bearer)).status_code == 200
        assert (await client.get("/v1/models", headers={"x-api-key": "right"})).status_code == 200
        wrong = await client.get("/v1/messages", headers=bearer)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        nowhere = await client.post("/v1/messages/batches", json={}, headers=bearer)
        assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_body_that_is_not_a_request():
    body = {"messages": HI}
    response = await post(engine_of(), body, "/v1/messages")
    assert response.json()["error"]["message"] == "max_tokens is missing; it is required."
    response = await post(engine_of(), [], "/v1/messages")  # type: ignore[arg-type]
    assert response.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "The request body must be a JSON object."},
    }
