"""/v1/responses through OpenAI's client, which validates answers, and the agents SDK; against the same chat."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.http.chats import CALL, PLAIN, QWEN, THINKING, TIME_CALL, prompt_of
from tests.support.http.fake_engine import MODEL, TEMPLATE, FakeEngine, assert_error, byte_tokenizer, client_of
from tests.support.http.responses import TOOLS, data_of, engine_of, openai_client, said

pytestmark = pytest.mark.usefixtures("shared_compiler")
CHAT_TOOLS = [{"type": "function", "function": {k: t[k] for k in ("name", "description", "parameters")}} for t in TOOLS]
ALL = f"Hm.\n</think>\n\nI see.\n{CALL}\n{TIME_CALL}"


async def events_of(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    stream = await client.responses.create(model=MODEL, stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def without_names(response: Any) -> dict[str, Any]:
    """A response without fields that differ in every response."""
    fields = response.model_dump(exclude={"id", "created_at", "completed_at", "seed"})
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return fields


# ---- the same as a chat ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "template", "fields", "group"),
    [
        ("Hello, wörld!", TEMPLATE, {"instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9}, 1),
        ("Hello, wörld!", TEMPLATE, {"max_output_tokens": 5, "top_logprobs": 2, "include": ["logprobs"]}, 2),
        (ALL, THINKING, {"tools": TOOLS, "parallel_tool_calls": True}, 1),
        (ALL, THINKING, {"tools": TOOLS, "top_logprobs": 1, "include": ["logprobs"]}, 7),
        (ALL, THINKING, {"max_output_tokens": 2}, 1),
        ("", TEMPLATE, {}, 1),
        (f"{CALL}.", QWEN, {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, 1000),
    ],
)
async def test_a_response_equals_the_same_chat(text: str, template: str, fields: dict[str, Any], group: int):
    asked = fields | ({"include": ["message.output_text.logprobs"]} if "include" in fields else {})
    chat = {k: v for k, v in fields.items() if k in ("temperature", "top_p", "parallel_tool_calls", "tool_choice")}
    chat |= {"max_tokens": fields.get("max_output_tokens"), "tools": CHAT_TOOLS if "tools" in fields else None}
    if "include" in fields:
        chat |= {"logprobs": True, "top_logprobs": fields["top_logprobs"]}
    messages = [{"role": "user", "content": "hi"}]
    if "instructions" in fields:
        messages.insert(0, {"role": "system", "content": fields["instructions"]})
    engine = engine_of(text, group)
    client = openai_client(engine, template)
    answer = await client.chat.completions.create(model=MODEL, messages=messages, **chat)
    plain = await client.responses.create(model=MODEL, input="hi", **asked)
    *_, last = await events_of(client, input="hi", **asked)
    assert [r.token_ids for r in engine.requests] == [engine.requests[0].token_ids] * 3
    assert len({r.params for r in engine.requests}) == 1
    assert without_names(last.response) == without_names(plain)

    choice = answer.choices[0]
    items = {kind: [i for i in plain.output if i.type == kind] for kind in ("reasoning", "message", "function_call")}
    reasoning = "".join(item.content[0].text for item in items["reasoning"])
    assert reasoning == getattr(choice.message, "reasoning_content", "")
    assert plain.output_text == (choice.message.content or "")
    called = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert [(item.name, item.arguments) for item in items["function_call"]] == called
    is_cut = choice.finish_reason == "length"
    assert plain.status == last.type.removeprefix("response.") == ("incomplete" if is_cut else "completed")
    assert plain.output[-1].status == plain.status
    assert plain.usage.output_tokens == answer.usage.completion_tokens
    assert plain.usage.input_tokens_details.cached_tokens == answer.usage.prompt_tokens_details.cached_tokens
    num_reasoning = text.find("</think>") + len("</think>") if template is THINKING else 0
    assert plain.usage.output_tokens_details.reasoning_tokens == min(num_reasoning, plain.usage.output_tokens)
    if choice.logprobs is not None:
        scores = [entry.model_dump() for entry in items["message"][0].content[0].logprobs]
        expected = [entry.model_dump() for entry in choice.logprobs.content]
        assert scores == expected if not called else scores == expected[num_reasoning:][: len(scores)]
        assert len(scores) >= len(plain.output_text)


async def test_the_events_of_each_item():
    events = await events_of(openai_client(engine_of(ALL, 3), THINKING), input="hi", tools=TOOLS)
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]

    def part(name: str) -> list[str]:
        inside = [f"{name}.delta", f"{name}.done", "content_part.done"]
        return ["output_item.added", "content_part.added", *inside, "output_item.done"]

    call = [f"{at}" for at in ("function_call_arguments.delta", "function_call_arguments.done")]
    calls = ["output_item.added", *call, "output_item.done"] * 2
    assert once == ["created", "in_progress", *part("reasoning_text"), *part("output_text"), *calls, "completed"]
    final = events[-1].response
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in mine if hasattr(event, "item_id")} == {item.id}
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(event.delta for event in mine if event.type.endswith(".delta")) == text
        assert mine[-1].item == item


# ---- other forms of the client ---------------------------------------------------------------------------------------


class Weather(BaseModel):
    city: str
    degrees: int


async def test_parsed_answers():
    engine = engine_of('{"city": "Zürich", "degrees": 21}')
    async with openai_client(engine) as client:
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Weather)
        assert parsed.output_parsed == Weather(city="Zürich", degrees=21)
        assert parsed.text.format.name == "Weather"
        async with client.responses.stream(model=MODEL, input="hi", text_format=Weather) as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert ("".join(deltas), final.output_parsed) == (parsed.output_text, parsed.output_parsed)
        await client.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
    grammars = [request.params.grammar for request in engine.requests]
    assert None not in grammars
    assert grammars[0] == grammars[1] != grammars[2]


@pytest.mark.parametrize("template", [QWEN, PLAIN], ids=["hermes", "generic"])
async def test_the_agents_sdk(template: str):
    import agents

    agents.set_tracing_disabled(True)
    cities = []

    def get_weather(city: str) -> str:
        cities.append(city)
        return f"sunny in {city}"

    class CallsFirst(FakeEngine):
        def _outputs(self, request):
            self.script = FakeEngine(CALL if len(self.requests) % 2 else "It is sunny.").script
            return super()._outputs(request)

    for how in ("plain", "streamed", "chained"):
        engine = CallsFirst(max_model_len=4096)
        model = agents.OpenAIResponsesModel(MODEL, openai_client(engine, template))
        agent = agents.Agent(name="A", instructions="Be.", tools=[agents.function_tool(get_weather)], model=model)
        if how == "streamed":
            result: Any = agents.Runner.run_streamed(agent, "hi")
            assert "raw_response_event" in {event.type async for event in result.stream_events()}
        else:
            result = await agents.Runner.run(agent, "hi", auto_previous_response_id=how == "chained")
        assert result.final_output == "It is sunny."
        prompt = bytes(engine.requests[-1].token_ids).decode()
        assert "|hi<|assistant|>" in prompt.replace(">hi", "|hi")
        result_head = "<|tool get_weather|>" if template == QWEN else "<|user|><tool_response>\n"
        assert f"{CALL}{result_head}sunny in Zürich" in prompt
    assert cities == ["Zürich"] * 3


# ---- what becomes of the fields --------------------------------------------------------------------------------------


async def prompt(template: str = QWEN, **fields: Any) -> str:
    engine = engine_of("ok")
    async with client_of(engine, byte_tokenizer(template)) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return prompt_of(engine)


async def test_items_become_messages():
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Zürich"}'}
    answered = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "21"}]}
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    }
    items = [
        said("developer", "Think."),
        {"role": "user", "content": "hi"},
        reasoning,
        said("assistant", "I see.", "output_text"),
        call,
        answered,
        call | {"call_id": "c2"},
        said("assistant", "Well.", "output_text"),
    ]
    turn = f"<|assistant|>I see.{CALL}<|tool get_weather|>21[c1]<|assistant|>{CALL}<|assistant|>Well.<|assistant|>"
    assert await prompt(input=items, instructions="Be.") == f"<|system|>Be.\n\nThink.<|user|>hi{turn}"
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    assert await prompt(template, input=items[1:4]) == "|hi;Hm|I see.;"


async def test_tools_that_are_allowed():
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    text = await prompt(input="hi", tools=TOOLS, tool_choice=allowed)
    assert "get_weather" not in text
    assert text.endswith('{"name": "get_time", "arguments":')
    named = {"type": "function", "name": "get_weather"}
    assert (await prompt(input="hi", tools=TOOLS, tool_choice=named)).endswith('{"name": "get_weather", "arguments":')
    for choice in ("none", "auto"):
        assert await prompt(input="hi", tools=[], tool_choice=choice) == "<|user|>hi<|assistant|>"


async def test_effort_reaches_the_template():
    for name, effort, shown in (
        ("enable_thinking", "none", "False"),
        ("enable_thinking", "low", "True"),
        ("reasoning_effort", "high", "high"),
    ):
        assert await prompt("{{ " + name + " }}", input="hi", reasoning={"effort": effort}) == shown
    assert (await prompt(THINKING, input="hi", reasoning={"effort": "none"})).endswith("<think></think>")
    assert await prompt(input="hi", reasoning={"effort": "none", "summary": "auto"}) == "<|user|>hi<|assistant|>"


async def test_the_oldest_turns_make_room():
    turns = [said(role, f"{role} {i} " + "x" * 80) for i in range(9) for role in ("user", "assistant")]
    items = [said("system", "Be."), *turns, said("user", "last")]
    text = await prompt(TEMPLATE, input=items * 3, truncation="auto", max_output_tokens=50)
    assert 4096 - 50 - 200 < len(text) <= 4096 - 50
    assert text.startswith("<system>Be.<user>user")
    assert text.count("user 0") == 2
    assert text.endswith("<user>last<assistant>")
    engine = engine_of("ok")
    async with client_of(engine) as client:
        for more in ({}, {"truncation": "auto"}):
            body = {"input": "x" * 5000, "max_output_tokens": 7, **more}
            error = await client.post("/v1/responses", json=body)
            assert_error(error, 400, "input", "shorten input", "context_length_exceeded")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "text or a list"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "can read"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]}, "input.1.content.0.type", "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "missing"),
        ({"tools": [{"type": "f", "name": "f", "parameters": {}}]}, "tools.0", "function or custom"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "no tool"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "allowed_tools"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "missing"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format.schema",
            "type",
        ),
        ({"text": {"format": {"type": "text"}, "made_up": 1}}, "text.made_up", "not permitted"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"include": ["everything"]}, "include.0", "message.output_text.logprobs"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "send input"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"n": 2}, "n", "several requests"),
        ({"background": True, "store": False}, "background", "store"),
        ({"truncation": "middle"}, "truncation", "'auto'"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"previous_response_id": "resp_0_1"}, "previous_response_id", "no response"),
        ({"previous_response_id": "x"}, "previous_response_id", "no response"),
    ],
)
async def test_unsupported_fields_are_refused(fields: dict[str, Any], param: str, says: str):
    engine = engine_of("ok")
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", **fields})
    is_missing = param == "previous_response_id"
    assert_error(answer, 404 if is_missing else 400, param, says, "response_not_found" if is_missing else None)
    assert engine.requests == []


async def test_ignored_fields_are_named():
    fields = {"safety_identifier": "s", "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"]}
    async with client_of(engine_of("ok")) as client:
        body = {"input": "hi", "reasoning": {"summary": "auto"}, **fields}
        answer = await client.post("/v1/responses", json=body)
    named = "safety_identifier, include.reasoning.encrypted_content, reasoning.summary"
    assert answer.headers["x-callboard-ignored-fields"] == named


async def test_errors_before_and_within_a_stream():
    async with client_of(engine_of("ok", busy=True)) as client:
        for stream in (False, True):
            busy = await client.post("/v1/responses", json={"input": "hi", "stream": stream})
            assert_error(busy, 429, None, "queue is full", "engine_busy")
    client = openai_client(engine_of("Hello", fails_after=2))
    *_, failed = await events_of(client, input="hi")
    assert (failed.type, failed.response.status, failed.response.output_text) == ("response.failed", "failed", "He")
    assert (failed.response.error.code, failed.response.error.message) == (
        "server_error", "The model gave no finite logits."
    )  # fmt: skip
    async with client_of(engine_of("Hello", fails_after=2)) as http:
        assert_error(await http.post("/v1/responses", json={"input": "hi"}), 500, None, "no finite", "engine_error")


async def test_each_event_is_called_by_its_type():
    async with client_of(engine_of("ok")) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "stream": True})
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in data_of(answer)]
