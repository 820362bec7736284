"""Structured output in the HTTP API: every form becomes one grammar, and an unenforceable one is a 400."""

import asyncio
import json
import re

import httpx
import pytest

from actors.wire.link_messages import Submit, decode_from_front, encode
from runtime.base.types import Grammar
from runtime.structured.compiler import GrammarCompiler
from serve_app.application import build_http_app
from serve_app.service.service import Service
from tests.support.http.chats import LLAMA, QWEN, THINKING, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat
from tests.support.structured.cases import fits

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY = '{"city": "Zürich"}'
PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": chat()}


def client_of(engine: FakeEngine, template: str = QWEN) -> httpx.AsyncClient:
    app = build_http_app(Service(engine, byte_tokenizer(template), MODEL))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def send(
    body: dict, path: str = "/v1/chat/completions", template: str = QWEN
) -> tuple[FakeEngine, httpx.Response]:
    engine = FakeEngine(CITY, max_model_len=4096)
    async with client_of(engine, template) as client:
        return engine, await client.post(path, json={**PATHS[path], **body})


async def grammar_of(body: dict, path: str = "/v1/chat/completions", template: str = QWEN) -> Grammar:
    engine, response = await send(body, path, template)
    assert response.status_code == 200, response.text
    (grammar,) = {request.params.grammar for request in engine.requests}
    assert grammar is not None
    return grammar


pytestmark = pytest.mark.usefixtures("shared_compiler")
NESTED_GRAMMAR = 'root ::= "(" root ")" | "x"'
TAG = {"type": "structural_tag"}
REGION = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
REGION_AS_TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
FORMS = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        CITY,
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, CITY),
    ({"response_format": {"type": "json_object"}}, '{"a":[1,{}]}'),
    ({"response_format": {"type": "regex", "regex": "a{2}|é"}}, "é"),
    ({"structured_outputs": {"json": SCHEMA}}, CITY),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, CITY),
    ({"structured_outputs": {"regex": "a{2}"}}, "aa"),
    ({"structured_outputs": {"choice": ["yes", "no\n"]}}, "no\n"),
    ({"structured_outputs": {"json_object": True, "regex": None}}, "{}"),
    ({"structured_outputs": {"grammar": NESTED_GRAMMAR}}, "((x))"),
    *(({name: NESTED_GRAMMAR}, "((x))") for name in ("guided_grammar", "ebnf", "grammar")),
    ({"regex": "a{2}", "grammar": ""}, "aa"),
    ({"response_format": {**TAG, "structures": [REGION], "triggers": ["<f"]}}, f"so <f>{CITY}</f>"),
    ({"response_format": {**TAG, "format": {"type": "tag", **REGION_AS_TAG}}}, f"<f>{CITY}</f>"),
    ({"structured_outputs": {"structural_tag": {**TAG, "format": {"type": "tag", **REGION_AS_TAG}}}}, f"<f>{CITY}</f>"),
    ({"structured_outputs": {"structural_tag": json.dumps({**TAG, "structures": [REGION], "triggers": ["<f"]})}}, "<"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "answer"), FORMS)
async def test_every_form_reaches_the_engine_as_a_grammar(path: str, fields: dict, answer: str):
    grammar = await grammar_of({**fields, "n": 2}, path)
    assert fits(grammar, answer)
    has_free_text = "triggers" in str(fields)
    assert not fits(grammar, answer + ("<f>" if has_free_text else "x"))
    assert has_free_text or not fits(grammar, "[1]")


async def test_type_text_is_free_and_grammars_reach_the_engine():
    engine, response = await send({"response_format": {"type": "text"}})
    assert response.status_code == 200
    request = engine.requests[0]
    assert request.params.grammar is None
    sent = decode_from_front(encode(Submit(1, request, resumed=False)))
    assert isinstance(sent, Submit)
    assert sent.request == request


NESTED = {"type": "json_schema", "json_schema": {"name": "x"}}
# Each of its values is 33 times in its grammar, once for each possible order.
PERMUTED = {"type": "array", "uniqueItems": True, "items": {"enum": [f"{i}" * 2000 for i in range(6)]}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        ({"response_format": NESTED}, "response_format.json_schema.schema", "missing"),
        ({"response_format": {"type": "regex"}}, "response_format.regex", "missing"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.pattern", "not permitted"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "json_object"),
        ({"response_format": {**NESTED, "schema": {}}}, "response_format.schema", "twice"),
        ({"structured_outputs": {}}, "structured_outputs", "just one"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "just one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        (
            {"structured_outputs": {"grammar": "root ::= a"}},
            "structured_outputs.grammar",
            "not defined, at line 1, column 10",
        ),
        ({"ebnf": "root ::= ("}, "ebnf", "line 1, column 11"),
        ({"grammar": "a: b", "regex": "a"}, "regex", "as grammar does; send one"),
        ({"response_format": TAG}, "response_format.structures", "missing"),
        ({"response_format": {**TAG, "structures": [{"begin": ""}]}}, "response_format.structures.0.schema", "missing"),
        ({"response_format": {**TAG, "format": {"type": "q"}}}, "response_format", "Invalid value"),
        (
            {"structured_outputs": {"structural_tag": {"type": "text"}}},
            "structured_outputs.structural_tag.type",
            "should be",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "JSON"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "looks ahead"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", '"not"'),
        ({"structured_outputs": {"json": PERMUTED}}, "structured_outputs.json", "the limit is 262144 bytes; make it"),
        ({**FORMS[0][0], "structured_outputs": {"regex": "a"}}, "structured_outputs", "one of them"),
        ({**FORMS[0][0], "ignore_eos": True}, "ignore_eos", "ends"),
        ({**FORMS[0][0], "min_tokens": 1}, "min_tokens", "ends"),
        ({**FORMS[3][0], "tools": TOOLS}, "response_format.regex", "only JSON"),
    ],
)
async def test_bad_structure(fields: dict, param: str, says: str):
    engine, response = await send(fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert error["message"].endswith(".")
    assert engine.requests == []


def tools_of(**more) -> list[dict]:
    return [{**tool, "function": {**tool["function"], **more}} for tool in TOOLS]


NAME = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("strict", [None, True])
async def test_requested_calls_are_enforced(strict: bool | None):
    named = await grammar_of({"tools": tools_of(strict=strict), "tool_choice": NAME})
    assert fits(named, f" {CITY}}}\n</tool_call>")
    assert not fits(
        named, f'{CITY}}}\n</tool_call>\n<tool_call>\n{{"name": "get_time", "arguments":{CITY}}}\n</tool_call>'
    )
    assert not fits(named, "{}}\n</tool_call>")
    one = f'get_weather", "arguments": {CITY}}}\n</tool_call>'
    any_of = {"tools": tools_of(strict=strict), "tool_choice": "required"}
    grammar = await grammar_of(any_of)
    assert fits(grammar, one)
    assert fits(grammar, f'{one}\n<tool_call>\n{{"name": "get_time", "arguments":{CITY}}}\n</tool_call>')
    assert not fits(grammar, one.replace("weather", "rain"))
    assert not fits(await grammar_of({**any_of, "parallel_tool_calls": False}), f"{one}\n{one}")
    llama = await grammar_of(any_of, template=LLAMA)
    assert fits(llama, f'get_weather", "parameters": {CITY}}}; {{"name": "get_time", "parameters": {CITY}}}')


@pytest.mark.parametrize("stream", [False, True])
async def test_unenforced_keywords_are_named_or_refused(stream: bool):
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": ""}}, "tags": tags}}

    async def ask(schema: dict, **more: object) -> httpx.Response:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
        _, response = await send({"response_format": form, "stream": stream})
        return response

    response = await ask(schema, strict=False)
    assert response.status_code == 200
    path = "response_format.json_schema.schema#/properties"
    assert response.headers["x-callboard-ignored-fields"] == f"{path}/city/not, {path}/tags/uniqueItems"
    response = await ask(schema)
    assert response.status_code == 400
    assert "#/properties/city" in response.json()["error"]["message"]
    del schema["properties"]["city"]["not"]  # a set's items may repeat, and it is still a set
    response = await ask(schema)
    assert response.headers["x-callboard-ignored-fields"] == f"{path}/tags/uniqueItems"
    response = await ask(schema, strict=True)
    assert response.status_code == 400
    assert "uniqueItems" in response.json()["error"]["message"]
    response = await ask({"type": "object", "x-order": 1, "example": {}}, strict=True)
    assert response.status_code == 200
    assert "x-callboard-ignored-fields" not in response.headers


async def test_only_strict_functions_enforce_their_schema():
    odd = {"type": "object", "not": {"required": ["a"]}}
    body = {"tools": tools_of(parameters=odd), "tool_choice": NAME}
    engine, response = await send(body)
    assert fits(engine.requests[0].params.grammar, '{"b":1}}\n</tool_call>')
    assert response.headers["x-callboard-ignored-fields"] == "tools.get_time#/not"
    _, response = await send({**body, "tools": tools_of(parameters=odd, strict=True)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "get_time" in response.json()["error"]["message"]
    assert '"not"' in response.json()["error"]["message"]
    none = await grammar_of({"tools": tools_of(parameters=None), "tool_choice": NAME})
    assert fits(none, "{}}\n</tool_call>")
    assert not fits(none, '{"a":1}}\n</tool_call>')


async def test_strict_functions_bind_calls_of_tool_choice_auto():
    call = f'<tool_call>\n{{"name": "get_time", "arguments": {CITY}}}\n</tool_call>'
    for choice in ({}, {"tool_choice": "auto"}):
        grammar = await grammar_of({"tools": tools_of(strict=True), **choice})
        for text in ("", "It rains. {", "a < b, <tool_cal", call, f"Let me see.\n{call}", f"{call}\n{call}"):
            assert fits(grammar, text), text
        for text in ("<tool_call>", f"{call} and so on", call.replace("city", "town"), f"<tool_call> \n now: {call}"):
            assert not fits(grammar, text), text
    one = await grammar_of({"tools": tools_of(strict=True), "parallel_tool_calls": False})
    assert fits(one, call)
    assert not fits(one, f"{call}\n{call}")
    _, free = await send({"tools": tools_of()})
    assert free.status_code == 200
    bare = await grammar_of({"tools": tools_of(strict=True)}, template=LLAMA)  # calls do not need a mark there
    call = f'{{"name": "get_time", "parameters": {CITY}}}'
    for text in ("", "It rains. {", call, f"\n{call}; {call}", '{"weather": "rain"}', f"See: {call}"):
        assert fits(bare, text), text
    for text in (
        f"{call} and so on",
        call.replace("city", "town"),
        f" {call.replace('time', 'date')}",
        '{ "parameters": 1',
    ):
        assert not fits(bare, text), text


async def test_an_answer_in_json_or_calls():
    call = f'<tool_call>\n{{"name": "get_time", "arguments": {CITY}}}\n</tool_call>'
    for form in FORMS[:3]:
        grammar = await grammar_of({**form[0], "tools": TOOLS})
        for text in (form[1], call, f"{call}\n{call}"):
            assert fits(grammar, text), text
        for text in ("", "It rains.", f"{form[1]}\n{call}", call.replace("city", "town"), f"{call}{form[1]}"):
            assert not fits(grammar, text), text
    thinking = await grammar_of({**FORMS[1][0], "tools": TOOLS}, template=THINKING)
    assert fits(thinking, f"Well.\n</think>\n\n{call}")
    assert fits(thinking, f"Well.\n</think>\n\n{CITY}")
    assert not fits(thinking, call)
    required = await grammar_of({**FORMS[1][0], "tools": TOOLS, "tool_choice": NAME})
    assert fits(required, f" {CITY}}}\n</tool_call>")
    assert not fits(required, CITY)
    none = await grammar_of({**FORMS[1][0], "tools": TOOLS, "tool_choice": "none"})
    assert not fits(none, call)
    _, response = await send({**FORMS[1][0], "tools": TOOLS}, template=LLAMA)  # calls do not need a mark there
    assert response.json()["error"]["param"] == "response_format.schema"


async def test_a_structure_begins_after_the_reasoning():
    grammar = await grammar_of(FORMS[1][0], template=THINKING)
    assert fits(grammar, f"I {{think}} </thin\n</think>\n\n{CITY}")
    assert not fits(grammar, CITY)
    plain = await grammar_of({**FORMS[1][0], "chat_template_kwargs": {"thinking": False}}, template=THINKING)
    assert fits(plain, CITY)


GRAMMAR_WAITS = "callboard:grammar_waits_total", "callboard:grammar_seconds_count"


@pytest.mark.long
async def test_a_bomb_is_a_400_and_delays_no_request(shared_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_compiler, "_deadline_s", 1.0)
    names = {f"^a{i}.*(x|y){{1,50}}z": {"type": "string"} for i in range(250)}
    bomb = {"response_format": {"type": "json_schema", "schema": {"type": "object", "patternProperties": names}}}
    engine = FakeEngine(CITY, max_model_len=4096)
    async with client_of(engine) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json={**chat(), **bomb}))
        await asyncio.sleep(0.2)
        other = await client.post("/v1/chat/completions", json={**chat(), **FORMS[0][0]})
        assert other.status_code == 200
        assert not waiting.done()
        text = (await client.get("/metrics")).text
        begun, ended = (re.search(rf"^{name}{{.*}} (.*)$", text, re.M)[1] for name in GRAMMAR_WAITS)
        assert float(begun) == float(ended) + 1, "the one that waits for its grammar can be seen"
        response = await waiting
        assert response.status_code == 400
        assert "over 1 s" in response.json()["error"]["message"]
        assert loop.time() - began < 100, "its deadline is a second"
        again = await client.post("/v1/chat/completions", json={**chat(), **bomb})  # refused from memory
        assert again.json() == response.json()
