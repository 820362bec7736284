"""Plain calls over every API: the answer that Qwen2.5-Coder writes is a call, where tools may be called."""

import json
from typing import Any

import pytest

from tests.support.http.chats import LLAMA, PLAIN, QWEN
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
CALL = '{\n  "name": "get_weather",\n  "arguments": {"city": "Bern"}\n}'
ANSWER = f"I look.\n```json\n{CALL}\n```\nDone."
USER = [{"role": "user", "content": "hi"}]


async def answered(
    path: str, body: dict[str, Any], template: str = QWEN, is_on: bool = True, text: str = ANSWER
) -> str:
    tokenizer = byte_tokenizer(template)
    tokenizer.plain_tool_calls = is_on
    async with client_of(FakeEngine(text, group=3, max_model_len=4096), tokenizer) as client:
        response = await client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.text


@pytest.mark.parametrize("template", [QWEN, LLAMA, PLAIN], ids=["hermes", "llama3", "generic"])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}], ids=["default", "auto"])
async def test_a_chat_answers_with_the_call(template: str, choice: dict[str, str]):
    body = {"messages": USER, "tools": TOOLS, **choice}
    answer = json.loads(await answered("/v1/chat/completions", body, template))["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Bern"})
    assert (answer["message"]["content"], answer["finish_reason"]) == ("I look.\nDone.", "tool_calls")


async def test_a_streamed_chat_ends_with_tool_calls():
    text = await answered("/v1/chat/completions", {"messages": USER, "tools": TOOLS, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls][:1] == ["get_weather"]
    assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == {"city": "Bern"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "I look.\nDone."
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_other_apis_answer_with_the_call():
    function = TOOLS[0]["function"]
    body: dict[str, Any] = {"input": "hi", "tools": [{"type": "function", "strict": False, **function}]}
    items = json.loads(await answered("/v1/responses", body))["output"]
    assert [json.loads(item["arguments"]) for item in items if item["type"] == "function_call"] == [{"city": "Bern"}]
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    message = json.loads(await answered("/v1/messages", {"messages": USER, "max_tokens": 500, "tools": [tool]}))
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{"city": "Bern"}]
    assert message["stop_reason"] == "tool_use"
    ollama = json.loads(await answered("/api/chat", {"messages": USER, "tools": TOOLS, "stream": False}))
    assert ollama["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER},
        {"messages": USER, "tools": TOOLS, "tool_choice": "none"},
        {"messages": [*USER, {"role": "assistant", "content": "So: "}], "tools": TOOLS, "continue_final_message": True},
    ],
    ids=["no tools", "none", "continued"],
)
async def test_without_callable_tools_the_text_stays(body: dict[str, Any]):
    answer = json.loads(await answered("/v1/chat/completions", body))["choices"][0]
    assert answer["message"]["content"].endswith(ANSWER)
    assert not answer["message"].get("tool_calls")
    assert answer["finish_reason"] == "stop"


async def test_a_server_may_leave_plain_calls_as_text():
    text = await answered("/v1/chat/completions", {"messages": USER, "tools": TOOLS}, is_on=False)
    assert json.loads(text)["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.usefixtures("shared_compiler")
async def test_an_answer_in_json_is_no_call():
    body = {"messages": USER, "tools": TOOLS, "response_format": {"type": "json_object"}}
    answer = json.loads(await answered("/v1/chat/completions", body, text=CALL))["choices"][0]
    assert answer["message"]["content"] == CALL
    assert answer["finish_reason"] == "stop"
