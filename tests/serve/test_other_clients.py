"""Clients that CI does not install: `pip install litellm langchain-openai ollama` runs these tests."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.chats import ARGUMENTS, CALL, PLAIN, QWEN, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

pytestmark = pytest.mark.usefixtures("shared_compiler")
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Weather(BaseModel):
    """The weather of a day."""

    city: str
    degrees: int


def http_of(text: str) -> httpx.AsyncClient:
    return client_of(FakeEngine(text, max_model_len=4096), byte_tokenizer(QWEN))


async def test_litellm():
    litellm = pytest.importorskip("litellm", reason="litellm is not installed.")

    async def ask(text: str, **fields: Any) -> Any:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http_of(text))
        return await litellm.acompletion(model=f"openai/{MODEL}", messages=HI, client=client, **fields)

    answer = await ask("Hello!", temperature=0.5, seed=7)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.usage.completion_tokens == 7  # with the end
    chunks = [chunk async for chunk in await ask("Hello!", stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 7

    answer = await ask(CALL, tools=TOOLS, tool_choice="auto")
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, call.arguments, answer.choices[0].finish_reason) == ("get_weather", ARGUMENTS, "tool_calls")
    chunks = [chunk async for chunk in await ask(CALL, tools=TOOLS, stream=True)]
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)

    text = '{"city": "Paris", "degrees": 21}'
    answer = await ask(text, response_format=Weather)
    assert Weather.model_validate_json(answer.choices[0].message.content).degrees == 21
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await ask("Hello!", temperature=-1)


async def test_langchain():
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed.")

    def model_of(text: str, **fields: Any) -> Any:
        http = http_of(text)
        return langchain.ChatOpenAI(
            model=MODEL, base_url="http://test/v1", api_key="none", http_async_client=http, max_retries=0, **fields
        )

    answer = await model_of("Hello!", temperature=0.5, seed=7).ainvoke("hi")
    assert (answer.content, answer.usage_metadata["output_tokens"]) == ("Hello!", 7)
    chunks = [chunk async for chunk in model_of("Hello!", stream_usage=True).astream("hi")]
    assert "".join(chunk.content for chunk in chunks) == "Hello!"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 7

    answer = await model_of(CALL).bind_tools(TOOLS).ainvoke("hi")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", json.loads(ARGUMENTS))]
    whole = None
    async for chunk in model_of(CALL).bind_tools(TOOLS).astream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", json.loads(ARGUMENTS))]

    text = '{"city": "Paris", "degrees": 21}'
    assert await model_of(text).with_structured_output(Weather, method="json_schema").ainvoke("hi") == Weather(
        city="Paris", degrees=21
    )
    forced = model_of(f" {text}}}\n</tool_call>").with_structured_output(Weather, method="function_calling")
    assert await forced.ainvoke("hi") == Weather(city="Paris", degrees=21)
    answer = await model_of("Hello!", use_responses_api=True).ainvoke("hi")
    assert answer.text == "Hello!"


async def test_ollama():
    ollama = pytest.importorskip("ollama", reason="ollama is not installed.")

    def client_with(text: str) -> Any:
        app = build_http_app(Service(FakeEngine(text, max_model_len=4096), byte_tokenizer(PLAIN), MODEL))
        return ollama.AsyncClient(host="http://test", transport=httpx.ASGITransport(app))

    client = client_with("Hello!")
    assert [model.model for model in (await client.list()).models] == [MODEL]
    assert (await client.show(MODEL)).capabilities == ["completion", "tools"]
    answer = await client.chat(model=MODEL, messages=HI, options={"temperature": 0.5, "num_predict": 9})
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("Hello!", "stop", 7)
    lines = [line async for line in await client.generate(model=MODEL, prompt="hi", stream=True, keep_alive="5m")]
    assert "".join(line.response for line in lines) == "Hello!"
    assert lines[-1].total_duration > 0

    lines = [line async for line in await client_with(CALL).chat(model=MODEL, messages=HI, tools=TOOLS, stream=True)]
    (call,) = (call.function for line in lines for call in line.message.tool_calls or ())
    assert (call.name, call.arguments) == ("get_weather", json.loads(ARGUMENTS))
    text = '{"city": "Paris", "degrees": 21}'
    answer = await client_with(text).chat(model=MODEL, messages=HI, format=Weather.model_json_schema())
    assert Weather.model_validate_json(answer.message.content).degrees == 21
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        await client.chat(model=MODEL, messages=HI, options={"temperature": -1})
