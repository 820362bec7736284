"""Tool calls and reasoning over HTTP: messages in, plain and streamed answers out, and OpenAI's own client on both."""

import json
import re
from functools import partial

import openai
import pytest

from serve_app.apis.chat.endpoint import ChatStream
from tests.support.http.chats import (
    ARGUMENTS,
    CALL,
    LLAMA,
    QWEN,
    THINKING,
    TIME_CALL,
    TOOLS,
    answers,
    called,
    engine_of,
    prompt_of,
    send,
    summed,
)
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat, client_of, events_of

pytestmark = pytest.mark.usefixtures("shared_compiler")


# ---- tool calls ------------------------------------------------------------------------------------------------------


async def test_calls():
    message, reason = await answers(QWEN, f"Let me see.\n{CALL}\n{TIME_CALL}", tools=TOOLS)
    assert message["content"] == "Let me see."
    assert called(message) == [("get_weather", ARGUMENTS), ("get_time", ARGUMENTS)]
    assert reason == "tool_calls"
    assert "reasoning_content" not in message


async def test_calls_of_llama():
    call = f'{{"name": "get_time", "parameters": {ARGUMENTS}}}'
    message, reason = await answers(LLAMA, f"{call}; {call}", tools=TOOLS, tool_choice="auto")
    assert message["content"] is None
    assert called(message) == [("get_time", ARGUMENTS)] * 2
    assert reason == "tool_calls"


async def test_a_truncated_call_keeps_its_arguments():
    message, reason = await answers(QWEN, CALL, tools=TOOLS, max_tokens=57)
    assert called(message) == [("get_weather", '{"city":')]
    assert reason == "length"


@pytest.mark.parametrize("text", ["Hi.", "<tool_call>{oops}</tool_call>", "<tool_call>\n", CALL.replace("get", "put")])
async def test_text_that_is_not_a_call(text: str):
    message, reason = await answers(QWEN, text, tools=TOOLS)
    assert message == {"role": "assistant", "content": text, "refusal": None}
    assert reason == "stop"


async def test_without_tools_nothing_is_read():
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert (await answers(QWEN, CALL, **fields))[0]["content"] == CALL
        engine = engine_of("ok")
        await send(engine, QWEN, **fields)
        assert prompt_of(engine) == "<|user|>hi<|assistant|>"


@pytest.mark.parametrize("n", [1, 2])
async def test_one_call_at_most(n: int):
    text = f"{CALL}{TIME_CALL}"
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    message, reason = await answers(QWEN, text, **fields)
    assert called(message) == [("get_weather", ARGUMENTS)]
    assert reason == "tool_calls"
    engine = engine_of(text)
    body = (await send(engine, QWEN, n=n, **fields)).json()
    assert [called(c["message"]) for c in body["choices"]] == [[("get_weather", ARGUMENTS)]] * n
    assert len(engine.aborted) == n
    assert body["usage"]["completion_tokens"] == n * len(CALL.removesuffix("\n</tool_call>").encode())


async def test_a_named_function():
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    engine = engine_of("x")
    await send(engine, QWEN, **fields)
    assert prompt_of(engine).endswith('<|assistant|><tool_call>\n{"name": "get_time", "arguments":')
    message, reason = await answers(QWEN, f" {ARGUMENTS}}}\n</tool_call>\n{CALL}", **fields)
    assert (called(message), reason, message["content"]) == ([("get_time", ARGUMENTS)], "tool_calls", None)
    message, reason = await answers(QWEN, " not in the mood", **fields)
    assert (called(message), reason) == ([("get_time", "not in the mood")], "tool_calls")


@pytest.mark.parametrize("thinks", [False, True])
async def test_any_function_is_required(thinks: bool):
    fields = {"tools": TOOLS, "tool_choice": "required"}
    engine = engine_of("x")
    await send(engine, THINKING if thinks else QWEN, **fields)
    begin = '<tool_call>\n{"name": "'
    assert prompt_of(engine).endswith("<|assistant|>" + ("<think></think>" if thinks else "") + begin)
    message, reason = await answers(QWEN, f"{CALL.removeprefix(begin)}\n{TIME_CALL}", **fields)
    assert (called(message), reason) == ([("get_weather", ARGUMENTS), ("get_time", ARGUMENTS)], "tool_calls")
    message, _ = await answers(LLAMA, f'get_time", "parameters": {ARGUMENTS}}}', **fields)
    assert called(message) == [("get_time", ARGUMENTS)]


async def test_the_only_function_is_required():
    engine = engine_of(f" {ARGUMENTS}}}")
    body = (await send(engine, LLAMA, tools=TOOLS[:1], tool_choice="required")).json()
    assert prompt_of(engine).endswith('{"name": "get_weather", "parameters":')
    assert called(body["choices"][0]["message"]) == [("get_weather", ARGUMENTS)]


async def test_a_stop_string_within_a_call():
    message, reason = await answers(QWEN, CALL, tools=TOOLS, stop="Z")
    assert (called(message), reason) == ([("get_weather", '{"city": "')], "tool_calls")


async def test_marks_that_are_special_tokens_are_read():
    tokenizer = byte_tokenizer(LLAMA)
    tokenizer._backend.add_special_tokens(["<|python_tag|>"])
    tag = tokenizer.token_to_id("<|python_tag|>")
    tokenizer = type(tokenizer)(
        tokenizer._backend, bos_token_id=None, eos_token_ids=(), special_tokens={}, chat_template=LLAMA
    )
    engine = engine_of(f'{{"name": "get_time", "parameters": {ARGUMENTS}}}')
    engine.script = [*b"Yes. ", tag, *engine.script]
    async with client_of(engine, tokenizer) as client:
        message = (await client.post("/v1/chat/completions", json=chat(tools=TOOLS))).json()["choices"][0]["message"]
        assert (message["content"], called(message)) == ("Yes.", [("get_time", ARGUMENTS)])
        plain = (await client.post("/v1/chat/completions", json=chat())).json()["choices"][0]["message"]
        assert "python_tag" not in plain["content"]


# ---- messages and what the template gets -----------------------------------------------------------------------------


async def test_answers_with_calls_can_be_sent_back():
    first = (await send(engine_of(CALL), QWEN, tools=TOOLS)).json()["choices"][0]["message"]
    messages = [
        {"role": "user", "content": "hi", "name": "Ann"},
        first,
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21 °C"}]},
    ]
    engine = engine_of("ok")
    assert (await send(engine, QWEN, messages=messages, tools=TOOLS[:1])).status_code == 200
    assert prompt_of(engine) == (
        f"<tools>{json.dumps(TOOLS[:1])}</tools><|user Ann|>hi<|assistant|>"
        + CALL
        + "<|tool|>21 °C[call_1]<|assistant|>"
    )


async def test_a_tools_message_gets_the_name_of_its_function():
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": at, "content": "x"} for at in "gfh"),
        {"role": "tool", "tool_call_id": "f", "content": "x", "name": "own"},
    ]
    engine = engine_of("ok")
    await send(engine, QWEN, messages=messages)
    assert re.findall(r"<\|tool ?(.*?)\|>", prompt_of(engine)) == ["g", "f", "", "own"]


async def test_arguments_that_are_not_json_return_unchanged():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": oops'}}
    engine = engine_of("ok")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    assert (await send(engine, QWEN, messages=messages)).status_code == 200
    assert '"arguments": "{\\"a\\": oops"' in prompt_of(engine)


async def test_continuing_the_last_message():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    for more in ({}, {"add_generation_prompt": False}):
        engine = engine_of(" is 42.")
        body = (await send(engine, QWEN, messages=messages, continue_final_message=True, **more)).json()
        assert prompt_of(engine) == "<|user|>hi<|assistant|>The answer"
        assert body["choices"][0]["message"]["content"] == " is 42."
    engine = engine_of("x")
    await send(engine, QWEN, messages=messages[:1], add_generation_prompt=False)
    assert prompt_of(engine) == "<|user|>hi"


NAMED = partial(dict, type="function")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools.0", "function or custom"),
        ({"tools": [NAMED(function={})]}, "tools.0.function.name", "missing"),
        ({"tools": [NAMED(function={"name": "a b"})]}, "tools.0.function.name", "pattern"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "names a tool"),
        ({"tools": TOOLS, "tool_choice": NAMED(function={"name": "f"})}, "tool_choice.function.name", "no tool"),
        ({"tool_choice": "auto"}, "tool_choice", "tools"),
        ({"chat_template": "x"}, "chat_template", "a template is a program"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "continue_final"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "missing"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id", "missing"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
            "messages.0.function_call",
            "use tools",
        ),
    ],
)
async def test_unsupported_fields_are_refused(fields: dict, param: str, says: str):
    engine = engine_of("x")
    response = await send(engine, QWEN, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert engine.requests == []


# ---- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [QWEN + "{# </think> #}", THINKING])
async def test_reasoning(template: str):
    opened = template is THINKING
    text = ("" if opened else "<think>\n") + "Well,\nhm.\n</think>\n\nYes."
    message, reason = await answers(template, text)
    assert message == {
        "role": "assistant", "content": "Yes.", "refusal": None,
        "reasoning": "Well,\nhm.", "reasoning_content": "Well,\nhm.",
    }  # fmt: skip
    assert reason == "stop"
    message, _ = await answers(template, text, include_reasoning=False)
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    message, reason = await answers(template, text, max_tokens=14)
    assert (message["content"], reason) == (None, "length")
    message, _ = await answers(template, f"{text}\n{CALL}", tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("Well,\nhm.", "Yes.")
    assert called(message) == [("get_weather", ARGUMENTS)]


async def test_reasoning_that_the_request_turns_off():
    engine = engine_of("Yes.")
    body = (await send(engine, THINKING, chat_template_kwargs={"thinking": False})).json()
    assert prompt_of(engine).endswith("<think></think>")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}


@pytest.mark.parametrize("name", ["self", "", "a b", "caller", "loop", "range", "bos_token", "raise_exception", "m"])
async def test_template_kwargs_accept_any_name(name: str):
    engine = engine_of("x")
    assert (await send(engine, QWEN, chat_template_kwargs={name: 1})).status_code == 200
    assert prompt_of(engine) == "<|user|>hi<|assistant|>"


async def test_continuing_reasoning():
    messages = [{"role": "assistant", "content": "<think>Well,"}]
    message, _ = await answers(THINKING, " hm.</think>Yes.", messages=messages, continue_final_message=True)
    assert (message["reasoning_content"], message["content"]) == (" hm.", "Yes.")


async def test_logprobs_of_all_tokens():
    fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    plain = (await send(engine_of(CALL), QWEN, **fields)).json()["choices"][0]
    assert len(plain["logprobs"]["content"]) == len(CALL.encode()) + 1
    events = events_of(await send(engine_of(CALL, 5), QWEN, stream=True, **fields))
    parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == plain["logprobs"]["content"]


async def test_a_plain_chat_takes_the_short_path(monkeypatch):
    monkeypatch.delattr(ChatStream, "_message_events")
    events = events_of(await send(engine_of("Hi."), QWEN, stream=True))
    assert summed(events) == ({"role": "assistant", "content": "Hi.", "refusal": None}, "stop")


# ---- OpenAI's client, which validates answers ------------------------------------------------------------------------


def openai_client(engine: FakeEngine, template: str = THINKING) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=client_of(engine, byte_tokenizer(template)),
        _strict_response_validation=True,
    )


async def test_openai_client():
    text = f"Hm.\n</think>\n\nI see.\n{CALL}\n{TIME_CALL}"
    request = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with openai_client(engine_of(text)) as client:
        plain = await client.chat.completions.create(**request)
        message = plain.choices[0].message
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("get_weather", ARGUMENTS),
            ("get_time", ARGUMENTS),
        ]
        assert (message.content, message.reasoning_content) == ("I see.", "Hm.")
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("group", [1, 7, 1000])
async def test_openai_clients_sum_of_a_stream(group: int):
    text = f"Hm.\n</think>\n\nI see.\n{CALL}\n{TIME_CALL}"
    request = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with openai_client(engine_of(text, group)) as client:
        done = []
        async with client.chat.completions.stream(**request) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.done":
                    done.append((event.index, event.name, event.arguments))
            final = await stream.get_final_completion()
    assert done == [(0, "get_weather", ARGUMENTS), (1, "get_time", ARGUMENTS)]
    message = final.choices[0].message
    assert (message.content, message.reasoning_content) == ("I see.", "Hm.")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [d[1:] for d in done]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_openai_client_without_calls():
    request = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    async with openai_client(engine_of("Hi."), QWEN) as client:
        async with client.chat.completions.stream(**request) as stream:
            final = await stream.get_final_completion()
        plain = await client.chat.completions.create(**request)
    assert final.choices[0].message.content == plain.choices[0].message.content == "Hi."
