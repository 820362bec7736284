"""Tools over HTTP with a chat template that lacks them, by the clients of OpenAI and Anthropic."""

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.chats import CALL, PLAIN, TIME_CALL, TOOLS, answers, called, engine_of, prompt_of, send
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of
from tests.support.http.grammar_engine import GrammarEngine
from tests.support.structured.cases import fits

pytestmark = pytest.mark.usefixtures("shared_compiler")
HI: Any = [{"role": "user", "content": "hi"}]


def openai_client(engine: FakeEngine) -> openai.AsyncOpenAI:
    http = client_of(engine, byte_tokenizer(PLAIN))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}])
async def test_calls_that_the_model_chooses_arrive(fields: dict[str, Any]):
    message, reason = await answers(PLAIN, f"Let me see.\n{CALL}\n{TIME_CALL}", tools=TOOLS, **fields)
    assert (message["content"], reason) == ("Let me see.", "tool_calls")
    assert called(message) == [("get_weather", '{"city": "Zürich"}'), ("get_time", '{"city": "Zürich"}')]


async def test_without_tools_nothing_is_described_or_read():
    engine = engine_of(CALL)
    body = (await send(engine, PLAIN, tools=TOOLS, tool_choice="none")).json()
    assert body["choices"][0]["message"]["content"] == CALL
    assert prompt_of(engine).endswith("<|user|>hi<|assistant|>")
    assert "get_weather" not in prompt_of(engine)


async def test_one_call_if_parallel_calls_are_off():
    message, _ = await answers(PLAIN, f"{CALL}\n{TIME_CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in called(message)] == ["get_weather"]


async def test_strict_functions_bind_calls_that_the_model_chooses():
    engine = engine_of("Hello.")
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    assert (await send(engine, PLAIN, tools=tools)).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    assert all(fits(grammar, text) for text in ("Hello.", CALL, f"Let me see. {TIME_CALL}"))
    assert not fits(grammar, CALL.replace("city", "town"))
    assert not fits(grammar, CALL.replace("weather", "rain"))


async def test_a_second_turn_begins_with_the_first():
    engine = engine_of(CALL)
    client = openai_client(engine)
    system: Any = {"role": "system", "content": "Be brief."}
    answer = await client.chat.completions.create(model=MODEL, messages=[system, *HI], tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    turn: Any = [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    await client.chat.completions.create(model=MODEL, messages=[system, *HI, *turn], tools=TOOLS)
    first, second = (bytes(request.token_ids).decode() for request in engine.requests)
    assert second == f"{first}{CALL}<|user|><tool_response>\nsunny\n</tool_response><|assistant|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_that_must_call(stream: bool):
    engine = GrammarEngine(1, most=60)
    tools: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    asked: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": tools, "tool_choice": "required"}
    client = openai_client(engine)
    if stream:
        async with client.responses.stream(**asked) as events:
            response = await events.get_final_response()
    else:
        response = await client.responses.create(**asked)
    assert response.output
    for item in response.output:
        assert item.type == "function_call"
        assert item.name in ("get_weather", "get_time")
        assert isinstance(json.loads(item.arguments)["city"], str)
    assert response.output[0].name in engine.text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
async def test_messages_that_must_call(choice: Any):
    engine = GrammarEngine(2, most=60)
    app = build_http_app(Service(engine, byte_tokenizer(PLAIN), MODEL))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app, raise_app_exceptions=False))
    client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", http_client=http, max_retries=0)
    tools: Any = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in TOOLS)
    ]
    message = await client.messages.create(
        model=MODEL, max_tokens=800, messages=HI, tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True}
    )
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.name in ({"get_time"} if "name" in choice else {"get_weather", "get_time"})
    assert isinstance(block.input["city"], str)
    assert message.stop_reason == "tool_use"
