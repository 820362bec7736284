"""What clients learn about the model's context: before a request, and from the error of a prompt that is too long."""

import json
import re
from typing import Any

import pytest

from tests.support.http.chats import QWEN, TOOLS
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, client_of

SYSTEM, LIMIT = "s" * 300, 4096
FLAT = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
ANTHROPIC = [{"name": f["name"], "description": "", "input_schema": f["parameters"]} for f in FLAT]
CHAT = {"messages": [{"role": "system", "content": SYSTEM}], "tools": TOOLS}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"messages": [], "system": SYSTEM, "tools": ANTHROPIC, "max_tokens": 5},
    "/v1/responses": {"input": [], "instructions": SYSTEM, "tools": FLAT},
    "/api/chat": CHAT,
}


def body_of(path: str, num_chars: int, **more: Any) -> dict[str, Any]:
    body = {**BODIES[path], **more}
    turns = "input" if path == "/v1/responses" else "messages"
    return body | {turns: [*body[turns], {"role": "user", "content": "u" * num_chars}]}


async def refusal(path: str, body: dict[str, Any]) -> tuple[str, str | None]:
    """Return the text and the code of the 400 for a request."""
    engine = FakeEngine(max_model_len=LIMIT)
    async with client_of(engine, tokenizer=byte_tokenizer(QWEN)) as client:
        response = await client.post(path, json={"model": MODEL, **body})
    error = response.json()["error"]
    assert (response.status_code, engine.requests) == (400, []), error
    return (error, None) if isinstance(error, str) else (error["message"], error.get("code"))


@pytest.mark.parametrize("path", BODIES)
async def test_too_long_a_prompt_names_its_parts(path: str):
    text, code = await refusal(path, body_of(path, LIMIT))
    parts = r"(?:has|long:) (\d+) tokens[^(]*\((\d+) in tools, (\d+) in system, (\d+) in messages\)"
    total, tools, system, messages = map(int, re.search(parts, text).groups())
    assert (total, system) == (tools + system + messages, 300)
    assert abs(tools - len(json.dumps(TOOLS))) < 200
    assert LIMIT < messages < LIMIT + 1000
    assert code == (None if path in ("/v1/messages", "/api/chat") else "context_length_exceeded")


@pytest.mark.parametrize("path", BODIES)
async def test_words_that_clients_match_stay(path: str):
    """opencode and others match the first form, Claude Code the second."""
    text, _ = await refusal(path, body_of(path, LIMIT))
    if path == "/v1/messages":
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+) maximum", text)
        assert int(found[1]) > int(found[2]) == LIMIT
    else:
        assert re.match(r"This model's maximum context length is 4096 tokens, but (messages|input) has", text)


async def test_claude_code_learns_how_much_output_fits():
    """It sends the request again with fewer tokens of output if it can read these three numbers."""
    text, _ = await refusal("/v1/messages", body_of("/v1/messages", 10, max_tokens=32_000))
    found = re.search(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", text)
    prompt, output, limit = map(int, found.groups())
    assert (output, limit) == (32_000, LIMIT)
    assert 300 < prompt < LIMIT


@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_far_above_the_context_has_at_least_so_many(path: str):
    text, _ = await refusal(path, body_of(path, 1 << 20))
    assert re.search(r"at least \d+ tokens", text)
    assert "in system" in text


async def test_a_prompt_without_parts_names_none():
    chat = {"messages": [{"role": "user", "content": "u" * LIMIT}]}
    text, _ = await refusal("/v1/chat/completions", chat)
    assert "(" not in text
    text, _ = await refusal("/v1/completions", {"prompt": "u" * (LIMIT - 4), "max_tokens": 5})
    assert text.endswith("and 5 tokens of output must fit too; shorten prompt or lower max_tokens.")


async def test_counts_of_input_are_the_prompts_lengths():
    engine = FakeEngine("x", max_model_len=LIMIT)
    async with client_of(engine, tokenizer=byte_tokenizer(QWEN)) as client:
        for path, count in (("/v1/messages", "/count_tokens"), ("/v1/responses", "/input_tokens")):
            body = body_of(path, 10)
            counted = (await client.post(path + count, json=body)).json()
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            expected = {"input_tokens": len(engine.requests[-1].token_ids), "max_model_len": LIMIT}
            named = {"object": "response.input_tokens"} if path == "/v1/responses" else {}
            assert counted == named | expected


async def test_counted_input_includes_the_stored_conversation():
    engine = FakeEngine("x", max_model_len=LIMIT)
    async with client_of(engine, tokenizer=byte_tokenizer(QWEN)) as client:
        first = (await client.post("/v1/responses", json={"input": "a" * 100, "store": True})).json()
        body = {"input": "b", "previous_response_id": first["id"]}
        counted = (await client.post("/v1/responses/input_tokens", json=body)).json()
        assert counted["input_tokens"] > 100
        await client.post("/v1/responses", json=body)
        assert counted["input_tokens"] == len(engine.requests[-1].token_ids)
        missing = await client.post("/v1/responses/input_tokens", json=body | {"previous_response_id": "resp_0_1-2"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "previous_response_id")


async def test_models_tell_the_context_in_names_that_clients_read():
    async with client_of(FakeEngine(max_model_len=LIMIT)) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    names = "max_model_len", "context_length", "context_window", "max_input_tokens"
    assert [card[name] for name in names] == [LIMIT] * 4
