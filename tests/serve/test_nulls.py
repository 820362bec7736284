"""Null as the value of an optional field is its absence, in every object of every request."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import serve_app.apis
from runtime.output.fields import Options
from tests.serve.test_dialects import BODIES, CHAT, COMPLETIONS, HI, MESSAGES, OLLAMA, RESPONSES, function
from tests.support.http.chats import CALL, QWEN
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, client_of

for module in pkgutil.walk_packages(serve_app.apis.__path__, "serve_app.apis."):
    importlib.import_module(module.name)


def kinds(of: type[Options] = Options) -> Iterator[type[Options]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


KINDS = sorted(dict.fromkeys(kinds()), key=lambda kind: (kind.__module__, kind.__qualname__))


def fault(kind: type[Options], name: str, value: Any) -> str | None:
    """Return the fault of a field alone; None if it is valid."""
    try:
        kind.model_validate_json(json.dumps({name: value}))
    except ValidationError as e:
        return next((found["type"] for found in e.errors() if found["loc"][:1] == (name,)), None)
    return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__qualname__)
def test_null_is_absence_in_every_object(kind: type[Options]):
    for name, field in kind.model_fields.items():
        name = field.alias or name
        if not field.is_required():
            assert fault(kind, name, None) is None, name
            continue
        if field.annotation is not Any:
            assert fault(kind, name, None) is not None, f"{name} is required, so null is a fault"


def test_the_default_takes_the_place_of_null():
    for kind in KINDS:
        optional = {name: field for name, field in kind.model_fields.items() if not field.is_required()}
        if len(optional) == len(kind.model_fields):
            given = kind.model_validate_json(json.dumps(dict.fromkeys((f.alias or n for n, f in optional.items()))))
            assert given == kind(), kind


TURN = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": None, "index": None}]}]
TURN[1]["tool_calls"][0]["function"] = {"name": "f", "arguments": "{}", "parsed_arguments": None}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1", "name": None, "tool_calls": None}
ITEMS = [
    {"type": None, "role": "user", "content": "hi", "id": None, "status": None, "phase": None},
    {"type": "reasoning", "id": None, "summary": None, "content": None, "encrypted_content": None, "status": None},
    {"type": "function_call", "id": None, "call_id": "c", "name": "f", "arguments": "{}", "status": None},
    {"type": "function_call_output", "id": None, "call_id": "c", "output": "1", "status": None},
    {"type": "message", "role": "assistant", "id": None, "status": None},
]
ITEMS[4]["content"] = [{"type": "output_text", "text": "a", "annotations": None, "logprobs": None}]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None, "citations": None}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}, "cache_control": None, "caller": None}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}]},
]
NULLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [*TURN, RESULT]}),
    (CHAT, {"tools": [function(CHAT, "f")], "stream_options": None, "thinking": None, "unknown": None}),
    (CHAT, {"response_format": {"type": "text", "json_schema": None, "schema": None}}),
    (COMPLETIONS, {"logit_bias": None, "best_of": None, "echo": None, "suffix": None}),
    (RESPONSES, {"input": ITEMS, "text": {"format": None, "verbosity": None}, "reasoning": {"effort": None}}),
    (MESSAGES, {"messages": BLOCKS, "thinking": None, "system": None, "metadata": {"user_id": None}}),
    (MESSAGES, {"tools": [function(MESSAGES, "f") | {"type": None, "strict": None, "cache_control": None}]}),
    (OLLAMA, {"messages": [*HI, {"role": "assistant", "content": None, "thinking": None, "images": None}]}),
    (OLLAMA, {"options": {"temperature": None, "stop": None, "mirostat": None}, "format": None, "think": None}),
]


@pytest.mark.parametrize(("path", "fields"), NULLS)
async def test_routes_take_the_nulls_of_their_clients(path: str, fields: dict[str, Any]):
    async with client_of(FakeEngine("Hello", max_model_len=4096), byte_tokenizer(QWEN)) as client:
        answer = await client.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
        assert "x-callboard-ignored-fields" not in answer.headers


async def test_null_arguments_of_an_ollama_call_are_empty():
    call = {"id": None, "function": {"index": None, "name": "get_weather", "arguments": None}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "1", "tool_name": "get_weather", "tool_call_id": None})
    engine = FakeEngine(CALL, max_model_len=4096)
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        body = BODIES[OLLAMA] | {"messages": messages, "tools": [function(OLLAMA, "get_weather") | {"type": None}]}
        assert (await client.post(OLLAMA, json=body)).status_code == 200
    prompt = bytes(engine.requests[0].token_ids).decode()
    assert '"arguments": {}' in prompt
    assert "null" not in prompt


async def test_the_template_does_not_see_nulls_of_functions():
    nulls = {"name": "f", "description": None, "parameters": {"type": "object", "default": None}, "strict": None}
    engines = [FakeEngine("a", max_model_len=4096) for _ in range(2)]
    for engine, own in zip(engines, (nulls, {"name": "f", "parameters": nulls["parameters"]}), strict=True):
        async with client_of(engine, byte_tokenizer(QWEN)) as client:
            await client.post(CHAT, json=BODIES[CHAT] | {"tools": [{"type": "function", "function": own}]})
    assert engines[0].requests[0].token_ids == engines[1].requests[0].token_ids
