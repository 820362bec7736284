"""The values that a request may pass to a chat template."""

import json
import re
from pathlib import Path

import pytest

from runtime.text.chat import ChatTemplate
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat, client_of

LLAMA = (Path(__file__).parents[1] / "data/chat_templates/llama3.2.jinja").read_text()


def nested(depth: int) -> dict:
    value: list = []
    for _ in range(depth):
        value = [value]
    return {"a": value}


def tool(parameters: dict) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TOO_LONG = "prompt is over 4194304 characters|messages has (more|at least 65536)"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [tool({"a": "x" * 7_000_000})]}, "messages", TOO_LONG),
        ({"tools": [tool({f"a parameter {i}": 1 for i in range(12_000)})]}, "messages", TOO_LONG),
        ({"chat_template_kwargs": {"tools": "x" * 7_000_000}}, "chat_template_kwargs.tools", "is nothing that"),
        # The template writes each level with an indent of its own.
        ({"tools": [tool({str(i): nested(50) for i in range(400)})]}, "messages", TOO_LONG),
        ({"tools": [tool({str(i): nested(170) for i in range(100)})]}, "messages", TOO_LONG),
        ({"tools": [tool(nested(500))]}, None, "is not valid JSON"),
        ({"chat_template_kwargs": nested(500)}, None, "is not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_values_too_large_for_a_template_are_refused(fields: dict, param: str | None, says: str, path: str):
    engine = FakeEngine()
    async with client_of(engine, byte_tokenizer(LLAMA)) as client:
        response = await client.post(path, json=chat(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert re.search(says, error["message"])
    assert engine.requests == []


async def test_roles_are_limited_to_names_in_the_template():
    """Llama's template compares the role with "ipython" too. A part of that word is not a role."""
    async with client_of(engine := FakeEngine(max_model_len=1 << 12), byte_tokenizer(LLAMA)) as client:
        for role, status in (("ipython", 200), ("python", 400), ("Environment", 400), ("tools", 400), (None, 400)):
            messages = [{"role": "user", "content": "1 + 1?"}, {"role": role, "content": "2"}]
            response = await client.post("/v1/chat/completions", json=chat(messages=messages))
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["param"] == "messages.1.role"
    (request,) = engine.requests
    assert b"<|start_header_id|>ipython<|end_header_id|>" in bytes(request.token_ids)
    source = """{% if m['role'] in ["critic", 'judge'] and m.role != "robot" %}{{ m['content'] }}{% endif %}"""
    assert ChatTemplate(source, {}).roles == {"critic", "judge", "robot"}


async def test_ordinary_tools_pass_the_limits():
    properties = {f"p{i}": {"type": "object", "properties": {"x": {"type": "string"}}} for i in range(20)}
    tools = [tool({"type": "object", "properties": properties})] * 20
    async with client_of(FakeEngine(max_model_len=1 << 20), byte_tokenizer(LLAMA)) as client:
        response = await client.post("/v1/chat/completions", json=chat(tools=tools))
        assert response.status_code == 200, json.dumps(response.json())
