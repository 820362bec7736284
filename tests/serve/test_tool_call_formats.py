"""Tool calls of all formats over HTTP. An engine writes forced calls from their grammar. One answer goes through each
of the three APIs."""

import json
from typing import Any

import openai
import pytest

from runtime.text.tokenizer import Tokenizer
from tests.support.http.chats import QWEN
from tests.support.http.chats import TOOLS as CHAT_TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of, events_of
from tests.support.http.grammar_engine import NAMED, TOOLS, GrammarEngine
from tests.support.structured.cases import fits

pytestmark = pytest.mark.usefixtures("shared_compiler")
HARMONY = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
MISTRAL_MARKS = ["[TOOL_CALLS]", "[ARGS]"]
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


def tokenizer_of(name: str, special: list[str]) -> Tokenizer:
    """The marks in `special` are special tokens, as in the models' own vocabularies."""
    backend = byte_tokenizer()._backend
    backend.add_special_tokens(special)
    template = HARMONY if name == "harmony" else QWEN
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=(256,), special_tokens={}, chat_template=template)
    tokenizer.tool_call_parser = name
    return tokenizer


@pytest.mark.parametrize(
    ("name", "special", "choice", "opening", "may_be_many"),
    [
        ("mistral", MISTRAL_MARKS[:1], "required", '[TOOL_CALLS] [{"name": "', True),
        ("mistral_v11", MISTRAL_MARKS, "required", "[TOOL_CALLS]", True),
        ("mistral_v11", MISTRAL_MARKS, NAMED, "[TOOL_CALLS]add[ARGS]", False),
        ("deepseek_v3", [], "required", f"{DEEPSEEK}function<｜tool▁sep｜>", True),
        ("deepseek_v31", [], NAMED, f"{DEEPSEEK}add<｜tool▁sep｜>", False),
        ("qwen3_coder", [], "required", '<tool_call>\n{"name": "', True),
        ("qwen3_coder", [], NAMED, '<tool_call>\n{"name": "add", "arguments":', False),  # "}" and 1 need quotes
        ("glm45", ["<arg_key>"], "required", '<tool_call>\n{"name": "', True),
        (
            *("harmony", HARMONY_MARKS, NAMED),
            *("<|channel|>commentary to=functions.add <|constrain|>json<|message|>", False),
        ),
        ("harmony", HARMONY_MARKS, "required", "<|channel|>commentary to=functions.", False),
    ],
)
async def test_forced_calls_arrive(name: str, special: list[str], choice: Any, opening: str, may_be_many: bool):
    tokenizer, most = tokenizer_of(name, special), 0
    tokenizer.channel_grammar = False  # of the other form, test_harmony.py has tests
    for seed in range(24):
        engine = GrammarEngine(seed)
        async with client_of(engine, tokenizer) as http:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
            messages: Any = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice
            )
        assert (
            tokenizer.decode(engine.requests[0].token_ids, skip_special_tokens=False).endswith("assistant" + opening)
            or name != "harmony"
        )
        assert tokenizer.decode(engine.requests[0].token_ids, skip_special_tokens=False).endswith(opening)
        message = answer.choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        assert len(calls) == engine.text.count('"a"')
        assert all(called in ("add", "add_all", "sub") for called, _ in calls)
        assert all(arguments in ({"a": 1}, {"a": "}"}) for _, arguments in calls)
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        most = max(most, len(calls))
    assert (most > 1) == may_be_many


POINT = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["m", "</p>"]},
        "at": {"$ref": "#/$defs/at", "type": "array"},
        "wide": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 1, "maximum": 30},
    },
    "$defs": {"at": {"type": "array", "items": {"enum": [0, "a'b"]}, "maxItems": 2}},
    "required": ["at", "count"],
}
OPENINGS = {
    "qwen3_coder": "<tool_call>\n<function=%s>\n",
    "glm45": "<tool_call>%s\n",
    "glm47": "<tool_call>%s",
    "pythonic": "[%s(",
}


def tools_with(parameters: dict[str, Any]) -> Any:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("add", "sub")]


@pytest.mark.parametrize("name", OPENINGS)
async def test_forced_calls_without_json_objects(name: str):
    tokenizer, seen, most = tokenizer_of(name, []), set(), 0
    for seed in range(24):
        engine, choice = GrammarEngine(seed, most=600), NAMED if seed % 3 == 0 else "required"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tool_choice": choice}
        async with client_of(engine, tokenizer) as client:
            answer = (await client.post("/v1/chat/completions", json=body | {"tools": tools_with(POINT)})).json()
        message, prompt = answer["choices"][0]["message"], bytes(engine.requests[0].token_ids).decode()
        assert prompt.endswith(OPENINGS[name] % "add" if choice is NAMED else OPENINGS[name].partition("%")[0])
        assert message["content"] is None
        calls = [call["function"] for call in message["tool_calls"]]
        written = prompt.rpartition("<|assistant|>")[2] + engine.text
        assert len(calls) == written.count("count")
        for call in calls:
            arguments = json.loads(call["arguments"])
            seen |= arguments.keys()
            assert {"at", "count"} <= arguments.keys() <= POINT["properties"].keys()
            assert arguments["count"] in range(1, 31)
            assert all(item in (0, "a'b") for item in arguments["at"])
            assert arguments.get("unit", "m") in ("m", "</p>")
            assert arguments.get("wide", True) in (True, False)
        most = max(most, len(calls))
    assert most > 1
    assert seen == POINT["properties"].keys()


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize(
    ("of", "is_native"),
    [
        ({"type": "integer", "$ref": "#/$defs/none"}, True),  # any integer, as the function is not strict
        ({"type": "string", "enum": [1]}, False),
        ({"type": "string", "minLength": 2}, False),
        ({"type": ["string", "null"]}, False),
        ({}, False),
    ],
)
async def test_schemas_that_need_json_arguments(name: str, of: dict[str, Any], is_native: bool):
    tokenizer, engine = tokenizer_of(name, []), FakeEngine("x", max_model_len=4096)
    tools = tools_with({"type": "object", "properties": {"a": of}, "required": ["a"]})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tool_choice": NAMED, "tools": tools}
    async with client_of(engine, tokenizer) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200 or (of.get("enum"), response.status_code) == ([1], 400)
        if engine.requests:
            prompt = bytes(engine.requests[0].token_ids).decode()
            assert prompt.endswith(OPENINGS[name] % "add") == (is_native or name == "pythonic")
        body["tools"] = tools_with({"type": "object", "properties": {}, "required": [[1]]})
        assert (await client.post("/v1/chat/completions", json=body)).status_code in (200, 400)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        (
            "qwen3_coder",
            "<parameter=text>\n\nA <b>\n\n</parameter>\n</function>\n</tool_call>",
            "</parameter> \n</parameter>",
        ),
        ("glm45", "<arg_key>text</arg_key>\n<arg_value>A <b>\n</arg_value>\n</tool_call>", "</arg_value></arg_value>"),
        ("pythonic", 'text="A <b>\\n")]', '"'),
    ],
)
async def test_free_text_ends_where_the_parser_ends_it(name: str, text: str, wrong: str):
    tokenizer, engine = tokenizer_of(name, []), FakeEngine(text, group=7, max_model_len=4096)
    tools = tools_with({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tool_choice": NAMED, "tools": tools}
    async with client_of(engine, tokenizer) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": "\nA <b>\n" if name == "qwen3_coder" else "A <b>\n"}
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    assert fits(grammar, text)
    assert not fits(grammar, text.replace("<b>", wrong))
    assert not fits(grammar, text + "x")


CITY = {"city": "Zürich"}
ANSWERS = {
    "qwen3_coder": (
        "I see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}}]',
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I see.<|end|>"
        "<|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich"}'
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_three_apis_read_the_same(name: str):
    content, thoughts = "I see." if "I see." in ANSWERS[name] else None, "Hm." if name == "harmony" else None
    marks = {"harmony": HARMONY_MARKS, "mistral": MISTRAL_MARKS}
    tokenizer = tokenizer_of(name, marks.get(name, []))
    script = tokenizer.encode(ANSWERS[name], add_special_tokens=False)
    functions = [tool["function"] for tool in CHAT_TOOLS]

    async def post(path: str, group: int, **fields: Any) -> Any:
        engine = FakeEngine(group=group, max_model_len=4096)
        engine.script = [*script, 256]
        async with client_of(engine, tokenizer) as client:
            return await client.post(path, json={"model": MODEL, **fields})

    hi = [{"role": "user", "content": "hi"}]
    plain = (await post("/v1/chat/completions", 1, messages=hi, tools=CHAT_TOOLS)).json()
    message = plain["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thoughts)
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [CITY]
    assert (len(message["tool_calls"][0]["id"]) == 9) == (name == "mistral")
    for group in (1, 3):
        response = await post("/v1/chat/completions", group, messages=hi, tools=CHAT_TOOLS, stream=True)
        deltas = [choice["delta"] for event in events_of(response) for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert json.loads("".join(call["arguments"] for call in calls)) == CITY

    tools = [{"type": "function", "strict": False, **function} for function in functions]
    output = (await post("/v1/responses", 1, input="hi", tools=tools)).json()["output"]
    assert [item["type"] for item in output] == [
        *(["reasoning"] if thoughts else []), *(["message"] if content else []), "function_call",
    ]  # fmt: skip
    assert json.loads(output[-1]["arguments"]) == CITY
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    blocks = (await post("/v1/messages", 1, max_tokens=400, messages=hi, tools=tools)).json()["content"]
    assert [block["type"] for block in blocks] == [
        *(["thinking"] if thoughts else []), *(["text"] if content else []), "tool_use",
    ]  # fmt: skip
    assert blocks[-1]["input"] == CITY


async def test_channels_are_read_without_tools():
    tokenizer = tokenizer_of("harmony", HARMONY_MARKS)
    engine = FakeEngine(max_model_len=4096)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    engine.script = [*tokenizer.encode(text, add_special_tokens=False), 256]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with client_of(engine, tokenizer) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hi!", "Hm.")
        answer = (await client.post("/v1/responses", json={"model": MODEL, "input": "hi"})).json()
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("analysisHm.") + 3
        engine.script = [*tokenizer.encode(ANSWERS["harmony"], add_special_tokens=False), 256]
        fields = {"tools": CHAT_TOOLS, "tool_choice": "none"}  # then a call is neither a call nor text for the user
        answer = (await client.post("/v1/chat/completions", json=body | fields)).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("I see.", 'Hm.{"city": "Zürich"}')
        assert "tool_calls" not in message
        engine.script = [*b'{"a":1}', 256]  # a grammar binds a final message, which the prompt has begun
        fields = {"response_format": {"type": "json_object"}, "channel_grammar": False}
        answer = (await client.post("/v1/chat/completions", json=body | fields)).json()
    assert answer["choices"][0]["message"]["content"] == '{"a":1}'
    prompt = tokenizer.decode(engine.requests[-1].token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")


async def test_channels_without_tools_refuse_tools():
    tokenizer = tokenizer_of("auto", HARMONY_MARKS)
    tokenizer.chat_template = HARMONY.replace("tools | tojson", "''")
    async with client_of(FakeEngine(), tokenizer) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS}
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "tools"
    assert "--chat-template" in error["message"]


WRITTEN = {
    "qwen3_coder": (
        "<tool_call>\n<function={}>\n<parameter=at>\n[0]\n</parameter>\n<parameter=count>\n{}\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm45": (
        "<tool_call>{}\n<arg_key>at</arg_key>\n<arg_value>[0]</arg_value>\n<arg_key>count</arg_key>\n<arg_value>{}"
        "</arg_value>\n</tool_call>"
    ),
}


def with_strict(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Two tools; only the first is strict."""
    functions = {"name": "add", "parameters": first, "strict": True}, {"name": "sub", "parameters": second}
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize("name", WRITTEN)
async def test_strict_functions_bind_optional_calls(name: str):
    closed, engine = POINT | {"additionalProperties": False}, FakeEngine("x", max_model_len=4096)
    free = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2}}}  # tags cannot enforce this
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": with_strict(closed, free)}
    tokenizer = tokenizer_of(name, [])
    async with client_of(engine, tokenizer) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        one = await client.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False})
        assert one.status_code == 200
        body["tools"] = with_strict(free, closed)
        refused = (await client.post("/v1/chat/completions", json=body)).json()
    several, single = (request.params.grammar for request in engine.requests)
    assert several is not None
    assert single is not None
    call = WRITTEN[name].format("add", 2)
    other = WRITTEN[name].format("sub", "\n{any} </thing>")
    for text in ("", "a <b> c", "<tool_cal", call, other, f"Now.\n{call}\n{other}\n{call}"):
        assert fits(several, text), text
    for text in ("99", "x", "1.5"):
        assert not fits(several, WRITTEN[name].format("add", text)), text
    for text in (
        f"{call} and more",
        call.replace("at", "it"),
        call.replace("add", "mul"),
        call.replace("[0]", "[0, 1]"),
    ):
        assert not fits(several, text), text
    assert fits(single, call)
    assert not fits(single, f"{call}\n{call}")
    assert refused["error"]["param"] == "tools.0.function.strict"
    assert "schema" in refused["error"]["message"]


async def test_a_missing_mark_does_not_free_a_strict_call():
    """Qwen3-Coder often omits the first mark."""
    tools = with_strict(POINT | {"additionalProperties": False}, POINT)
    call = WRITTEN["qwen3_coder"].format("add", 2).removeprefix("<tool_call>\n")
    engine = FakeEngine(f"Now. {call}", group=5, max_model_len=4096)
    async with client_of(engine, tokenizer_of("qwen3_coder", [])) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"at": [0], "count": 2}
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    assert fits(grammar, call)
    assert not fits(grammar, call.replace("2", "99"))
    assert fits(grammar, "<tool_call>\nadd>")  # read as text


async def test_strict_functions_bind_calls_in_python():
    closed = POINT | {"additionalProperties": False}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": with_strict(closed, {"a": {}})}
    engine = FakeEngine("x", max_model_len=4096)
    async with client_of(engine, tokenizer_of("pythonic", [])) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    call, other = 'add(unit="m", at=[0], count=2)', """sub(a={'b': ["(", ')']}, c=True)"""
    for text in (
        "",
        "[1] says",
        "See [add](x).",
        "[mul(a=1)]",
        f"[{call}]",
        f"\n[{other}]",
        f"[{call}, {other}, sub()]",
    ):
        assert fits(grammar, text), text
    for text in (call.replace("2", "31"), call.replace("unit", "units"), f"{call} ", f"{other}, mul(a=1)", "sub(a=1"):
        assert not fits(grammar, f"[{text}]"), text
    for text in ("[ add( at=1", "<|python_start|>[add(at=1", f"[{call}] and more"):
        assert not fits(grammar, text), text


@pytest.mark.parametrize("name", WRITTEN)
async def test_an_answer_in_json_beside_calls_between_tags(name: str):
    tools = [{"type": "function", "function": {"name": "add", "parameters": POINT | {"additionalProperties": False}}}]
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    engine = FakeEngine(WRITTEN[name].format("add", 2), group=3, max_model_len=4096)
    async with client_of(engine, tokenizer_of(name, [])) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": [0], "count": 2}
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    for text in ('{"sum": 3}', WRITTEN[name].format("add", 2)):
        assert fits(grammar, text), text
    for text in ("", "Three.", '{"sum": "3"}', WRITTEN[name].format("add", 99), WRITTEN[name].format("mul", 2)):
        assert not fits(grammar, text), text
