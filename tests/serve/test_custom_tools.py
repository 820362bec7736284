"""Custom tools, which are called with a text, over both of OpenAI's APIs and with its client's strict types."""

import json
import re
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta, ChoiceDeltaToolCall

from tests.serve.test_tool_call_formats import tokenizer_of
from tests.support.http.chats import CALL, LLAMA, PLAIN, QWEN, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of
from tests.support.http.grammar_engine import GrammarEngine
from tests.support.structured.cases import fits

pytestmark = pytest.mark.usefixtures("shared_compiler")
TEXT = 'a = "é\\n"\n\tb 😀 \\ }</tool_call>'
SUM = 'start: SUM\nSUM: /[0-9]/ (" + " /[0-9]/)*'
NESTED = 'start: "(" start* ")" | "\\"" /[a-c\\n]/ "\\""'
HI: Any = [{"role": "user", "content": "hi"}]


class CustomDelta(ChoiceDeltaToolCall):
    """A piece of a call. The client's own type allows only functions."""

    type: Literal["function", "custom"] | None = None  # type: ignore[assignment]
    custom: dict[str, str] | None = None


class CustomChoiceDelta(ChoiceDelta):
    tool_calls: list[CustomDelta] | None = None  # type: ignore[assignment]


class CustomChoice(Choice):
    delta: CustomChoiceDelta


class CustomChunk(ChatCompletionChunk):
    choices: list[CustomChoice]  # type: ignore[assignment]


def custom(name: str, syntax: str = "", definition: str = "", **fields: Any) -> Any:
    if syntax:
        fields["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, **fields}}


def flat(tool: dict[str, Any]) -> Any:
    fields = dict(tool["custom"])
    if "format" in fields:
        fields["format"] = {"type": "grammar", **fields["format"]["grammar"]}
    return {"type": "custom", **fields}


def client_with(engine: FakeEngine, tokenizer: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=client_of(engine, tokenizer),
        _strict_response_validation=True,
    )


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> list[tuple[str, str]]:
    """Names and inputs of the calls of a streamed chat."""
    body = {"model": MODEL, "messages": HI, "stream": True, **fields}
    stream = await client.post(
        "/chat/completions", body=body, cast_to=CustomChunk, stream=True, stream_cls=openai.AsyncStream[CustomChunk]
    )
    calls: list[list[str]] = []
    async for chunk in stream:
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.custom is not None
            if piece.id:
                assert (piece.type, piece.index, piece.custom["input"]) == ("custom", len(calls), "")
                calls.append([piece.custom["name"], ""])
            calls[piece.index][1] += piece.custom["input"]
    return [(name, text) for name, text in calls]


WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "run", "arguments": {"input": %s}}\n</tool_call>', json.dumps(TEXT)),
    "qwen3_coder": (
        "<tool_call>\n<function=run>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
        TEXT,
    ),
    "mistral": ('[TOOL_CALLS] [{"name": "run", "arguments": {"input": %s}}]', json.dumps(TEXT, ensure_ascii=False)),
}


@pytest.mark.parametrize("name", WRITTEN)
async def test_the_text_of_a_call_arrives(name: str):
    tokenizer, text = tokenizer_of(name, []), WRITTEN[name][0] % WRITTEN[name][1]
    script = [*tokenizer.encode(f"I see. {text}", add_special_tokens=False), 256]
    for group in (1, 3, 1000):
        engine = FakeEngine(group=group, max_model_len=4096)
        engine.script = script
        client = client_with(engine, tokenizer)
        plain = await client.chat.completions.create(model=MODEL, messages=HI, tools=[custom("run")])
        (call,) = plain.choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", TEXT)
        assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == ("I see.", "tool_calls")
        assert await streamed(client, tools=[custom("run")]) == [("run", TEXT)]

        tools = [flat(custom("run", description="Runs."))]
        response = await client.responses.create(model=MODEL, input="hi", tools=tools)
        item = response.output[-1]
        assert (item.type, item.name, item.input) == ("custom_tool_call", "run", TEXT)
        assert response.tools[0].format.type == "text"
        stream = await client.responses.create(model=MODEL, input="hi", tools=tools, stream=True)
        events = [event async for event in stream]
        pieces = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        assert "".join(event.delta for event in pieces) == done.input == events[-1].response.output[-1].input == TEXT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d\\ude00\\u00e9\\"\\/"}', 'a😀é"/'),
        ('{ "input" : "a\nb", "more": 1}', "a\nb"),  # models write values that JSON forbids
        ('{"input": "\\ud83d, \\uzzzzzzzzzz"}', "?, \\uzzzzzzzzzz"),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("{}", "{}"),
    ],
)
async def test_arguments_of_other_forms(arguments: str, text: str):
    answer = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
    for group in (1, 5):
        client = client_with(FakeEngine(answer, group=group, max_model_len=4096), byte_tokenizer(QWEN))
        plain = await client.chat.completions.create(model=MODEL, messages=HI, tools=[custom("run")])
        assert plain.choices[0].message.tool_calls[0].custom.input == text
        assert await streamed(client, tools=[custom("run")]) == [("run", text)]


async def test_functions_beside_them_stay_functions():
    text = f'{CALL}\n<tool_call>\n{{"name": "run", "arguments": {{"input": "x"}}}}\n</tool_call>\n{CALL}'
    client = client_with(FakeEngine(text, group=4, max_model_len=4096), byte_tokenizer(QWEN))
    tools = [*TOOLS, custom("run")]
    answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=tools)
    assert [call.type for call in answer.choices[0].message.tool_calls] == ["function", "custom", "function"]
    assert answer.choices[0].message.tool_calls[2].function.arguments == '{"city": "Zürich"}'


async def test_templates_see_functions_of_one_string():
    engine = FakeEngine("x", max_model_len=4096)
    client = client_with(engine, byte_tokenizer(QWEN))
    tools = [custom("run", "regex", "[a-z]+", description="Runs.")]
    past = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": 'say "é"'}}
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [custom("run")]}}
    await client.chat.completions.create(model=MODEL, messages=messages, tools=[*TOOLS, *tools], tool_choice=allowed)
    items = [
        *HI,
        {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": 'say "é"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    flat_tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS] + [flat(tools[0])]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "run"}]}
    await client.responses.create(model=MODEL, input=items, tools=flat_tools, tool_choice=choice)
    prompts = [bytes(request.token_ids).decode() for request in engine.requests]
    assert prompts[0] == prompts[1]
    assert json.dumps({"input": 'say "é"'}, ensure_ascii=False) in prompts[0]
    (told,) = json.loads(prompts[0].partition("<tools>")[2].partition("</tools>")[0])
    assert (told["type"], told["function"]["name"], told["function"]["description"]) == ("function", "run", "Runs.")
    properties = told["function"]["parameters"]["properties"]
    assert properties["input"]["type"] == "string"
    assert "[a-z]+" in properties["input"]["description"]


SOME = custom("sum", "lark", SUM), custom("word", "regex", '[a-c"\\\\\\n]{2,4}'), custom("nest", "lark", NESTED)
FITS = {"sum": r"\d( \+ \d)*", "word": r'[a-c"\\\n]{2,4}', "nest": r'[()"a-c\n]+'}
NAMED = {"type": "custom", "custom": {"name": "nest"}}
REQUIRED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [custom("sum"), custom("word")]}}


@pytest.mark.parametrize("choice", ["required", NAMED, REQUIRED], ids=["required", "named", "allowed"])
@pytest.mark.parametrize("template", [QWEN, LLAMA, PLAIN], ids=["hermes", "llama3", "generic"])
async def test_forced_texts_follow_their_grammar(template: str, choice: Any):
    names = set()
    for seed in range(4):
        engine = GrammarEngine(seed, most=60)
        client = client_with(engine, byte_tokenizer(template))
        if seed % 2:
            calls = await streamed(client, tools=SOME, tool_choice=choice)
        else:
            answer = await client.chat.completions.create(model=MODEL, messages=HI, tools=SOME, tool_choice=choice)
            calls = [(call.custom.name, call.custom.input) for call in answer.choices[0].message.tool_calls]
        for name, text in calls:
            assert re.fullmatch(FITS[name], text)
            assert name != "nest" or text.count("(") == text.count(")")
            names.add(name)
    assert names
    assert names <= ({"nest"} if choice is NAMED else {"sum", "word"} if choice is REQUIRED else FITS.keys())


async def test_a_forced_grammar_holds_in_json_between_tags():
    for choice in ("required", NAMED):
        engine = GrammarEngine(1, most=60)
        client = client_with(engine, tokenizer_of("qwen3_coder", []))
        calls = await streamed(client, tools=SOME, tool_choice=choice)
        assert calls
        assert all(re.fullmatch(FITS[name], text) for name, text in calls)


async def test_a_grammar_holds_where_the_model_may_choose():
    engine = FakeEngine("x", max_model_len=4096)
    client = client_with(engine, byte_tokenizer(QWEN))
    await client.chat.completions.create(model=MODEL, messages=HI, tools=[SOME[0], custom("free")])
    grammar, call = (
        engine.requests[0].params.grammar,
        '<tool_call>\n{"name": "%s", "arguments": {"input": "%s"}}\n</tool_call>',
    )
    assert grammar is not None
    assert fits(grammar, "Hi. " + call % ("sum", "1 + 2"))
    assert fits(grammar, call % ("free", '\\"anything'))
    assert not fits(grammar, call % ("sum", "1 +2"))
    await client.chat.completions.create(model=MODEL, messages=HI, tools=[custom("free")])
    assert engine.requests[1].params.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [custom("a b")]}, "tools.0.custom.name", "pattern"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", "missing"),
        ({"tools": [custom("a", "abnf", "x")]}, "tools.0.custom.format.grammar.syntax", "'lark'"),
        ({"tools": [custom("a", format={"type": "grammar"})]}, "tools.0.custom.format", "grammar"),
        ({"tools": [custom("a", "lark", "start: b")]}, "tools", "custom tool a whose format"),
        ({"tools": [custom("a", "regex", "(?=a)")]}, "tools", "custom tool a whose format"),
        ({"tools": [custom("a")], "tool_choice": NAMED}, "tool_choice.custom.name", "no tool of the type custom"),
        (
            {"tools": [custom("a")], "tool_choice": {"type": "function", "function": {"name": "a"}}},
            *("tool_choice.function.name", "no tool of the type function"),
        ),
    ],
)  # fmt: skip
async def test_unsupported_fields_are_refused(fields: Any, param: str, says: str):
    async with client_of(FakeEngine("x", max_model_len=4096), byte_tokenizer(QWEN)) as http:
        response = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


async def test_responses_refuse_unsupported_tools():
    async with client_of(FakeEngine("x", max_model_len=4096), byte_tokenizer(QWEN)) as http:
        for form, param in (
            ({"type": "grammar", "syntax": "lark"}, "tools.0.format"),
            ({"type": "text", "syntax": "lark"}, "tools.0.format"),
            ({"type": "grammar", "syntax": "x", "definition": "y"}, "tools.0.format.syntax"),
        ):
            body = {"model": MODEL, "input": "hi", "tools": [{"type": "custom", "name": "a", "format": form}]}
            response = await http.post("/v1/responses", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
