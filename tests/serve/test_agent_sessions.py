"""Sessions of agent programs: namespaces of tools, items that only another server can read, and threads."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.apis.responses.tools import flat_name
from tests.support.http.chats import QWEN, prompt_of
from tests.support.http.fake_engine import FakeEngine, assert_error, byte_tokenizer, client_of
from tests.support.http.responses import data_of

pytestmark = pytest.mark.usefixtures("shared_compiler")
RECORDED = Path(__file__).parents[1] / "data" / "agent_requests.jsonl"
REQUESTS = [json.loads(line) for line in RECORDED.read_text().splitlines()]
IGNORED = "x-callboard-ignored-fields"
IMAGE = "[image: this model cannot see it]"
SCHEMA = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
SPAWN = {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": SCHEMA, "strict": False}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [SPAWN]}
CALL = '<tool_call>\n{"name": "agents__spawn", "arguments": {"task": "a"}}\n</tool_call>'
HI = {"role": "user", "content": "hi"}


def engine_of(text: str = "ok") -> FakeEngine:
    return FakeEngine(text, max_model_len=1 << 16)


async def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async with client_of(engine or engine_of(), byte_tokenizer(QWEN)) as client:
        return await client.post(path, json=body)


# ---- namespaces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_bear_the_namespace_of_their_tool(stream: bool):
    engine = engine_of(CALL)
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        body = {"input": "hi", "tools": [NAMESPACE], "stream": stream}
        answer = await client.post("/v1/responses", json=body)
        response = data_of(answer)[-1]["response"] if stream else answer.json()
        if stream:
            added = next(event for event in data_of(answer) if event["type"] == "response.output_item.added")
            assert (added["item"]["namespace"], added["item"]["name"]) == ("agents", "spawn")
        (call,) = response["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "spawn")
        assert response["tools"] == [NAMESPACE]
        assert IGNORED not in answer.headers
        outcome = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        for again in (
            {"previous_response_id": response["id"], "input": [outcome]},
            {"input": [HI, call, outcome]},
        ):
            await client.post("/v1/responses", json={"tools": [NAMESPACE], **again})
    prompts = [bytes(request.token_ids).decode() for request in engine.requests]
    assert prompts[1] == prompts[2]
    assert CALL in prompts[1]


async def test_two_namespaces_may_share_a_name():
    other = NAMESPACE | {"name": "others"}
    answer = await post("/v1/responses", {"input": "hi", "tools": [other, NAMESPACE, SPAWN]}, engine_of(CALL))
    assert answer.json()["output"][0]["namespace"] == "agents"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "spawn", "namespace": "agents"},
        {"type": "function", "name": "spawn"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "spawn"}]},
    ],
)
async def test_a_choice_may_name_a_tool_of_a_namespace(choice: dict[str, Any]):
    engine = engine_of(CALL)
    answer = await post("/v1/responses", {"input": "hi", "tools": [NAMESPACE], "tool_choice": choice}, engine)
    assert answer.json()["output"][0]["namespace"] == "agents", answer.text
    assert "agents__spawn" in prompt_of(engine)


def test_the_end_of_a_long_name_survives():
    assert flat_name("a" * 200, "read").endswith("a__read")
    assert len(flat_name("a" * 200, "read")) == 128


# ---- items that end a session ----------------------------------------------------------------------------------------

CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
SEEN = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": "data:x"}]}
SHELL = {"type": "local_shell_call", "call_id": "b", "status": "completed", "action": {"command": ["ls", "-l"]}}
ADDED = {"type": "additional_tools", "role": "developer", "tools": [SPAWN]}


@pytest.mark.parametrize(
    ("items", "ignored", "has", "has_not"),
    [
        ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}, HI], "input.web_search_call", "hi", "ws_1"),
        ([{"type": "compaction", "encrypted_content": "xyz"}, HI], "input.compaction", "hi", "xyz"),
        ([{"type": "item_reference", "id": "msg_1"}, HI], "input.item_reference", "hi", "msg_1"),
        ([HI, CALLED, SEEN], "input.input_image", IMAGE, "data:x"),
        (
            [HI, CALLED, SEEN, {"role": "user", "content": [{"type": "input_image", "image_url": "data:y"}]}],
            "input.input_image",
            IMAGE,
            "data:y",
        ),
        (
            [HI, SHELL, {"type": "function_call_output", "call_id": "b", "output": "a.py"}],
            None,
            '["ls", "-l"]',
            "status",
        ),
        ([HI, SHELL, {"type": "local_shell_call_output", "id": "b", "output": "a.py"}], None, "a.py", "output"),
        ([HI, SHELL, {"type": "local_shell_call_output", "id": "b", "output": [{"type": "text"}]}], None, "text", "id"),
        ([HI, SHELL, {"type": "shell_call_output", "call_id": "b", "output": [{"stdout": "a"}]}], None, "stdout", "id"),
        ([ADDED, HI], None, "Starts one.", "additional"),
        (
            [
                HI,
                {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "agents"}},
                {"type": "tool_search_output", "call_id": "c", "tools": [NAMESPACE]},
            ],
            None,
            "Starts one.",
            "execution",
        ),
        (
            [
                HI,
                {"type": "computer_call", "call_id": "d", "action": {"type": "screenshot"}},
                {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot"}},
            ],
            "input.computer_screenshot",
            IMAGE,
            "computer_screenshot",
        ),
    ],
)
async def test_items_do_not_end_a_session(items: list[Any], ignored: str | None, has: str, has_not: str):
    engine = engine_of()
    answer = await post("/v1/responses", {"input": items}, engine)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED) == ignored
    assert has in prompt_of(engine)
    assert has_not not in prompt_of(engine)


async def test_a_new_image_is_refused():
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    before = [HI, CALLED, SEEN, {"role": "assistant", "content": "I see."}]
    assert_error(await post("/v1/responses", {"input": before + image}), 400, "input.4.content.0.type", "input_image")
    assert_error(await post("/v1/responses", {"input": [{"type": "mesage"}]}), 400, "input.0", "item of the type")


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "Read", "input": {}}]}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "bbbb"}}


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(content)}


@pytest.mark.parametrize(
    ("messages", "ignored", "has", "has_not"),
    [
        ([HI, USE, {"role": "user", "content": [result(PNG)]}], "messages.image", IMAGE, "aaaa"),
        ([HI, USE, {"role": "user", "content": [result(), PDF]}], "messages.document", "[document: this model", "bbbb"),
        (
            [{"role": "user", "content": [PNG]}, {"role": "assistant", "content": "No."}, HI],
            "messages.image",
            IMAGE,
            "aaaa",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "the plan"}}]}],
            None,
            "the plan",
            "document",
        ),
        (
            [HI, USE, {"role": "user", "content": [result({"type": "tool_reference", "tool_name": "Write"})]}],
            None,
            "The tool Write is available.",
            "tool_reference",
        ),
        (
            [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                        {"type": "text", "text": "Found."},
                    ],
                },
                HI,
            ],
            "messages.server_tool_use,messages.web_search_tool_result",
            "Found.",
            "web_search",
        ),
        ([{"role": "assistant", "content": [{"type": "compaction", "content": "so far"}]}, HI], None, "so far", "["),
    ],
)
async def test_blocks_do_not_end_a_session(messages: list[Any], ignored: str | None, has: str, has_not: str):
    engine = engine_of()
    answer = await post("/v1/messages", {"max_tokens": 5, "messages": messages}, engine)
    assert answer.status_code == 200, answer.text
    assert (answer.headers.get(IGNORED) or "").replace(" ", "") == (ignored or "")
    assert has in prompt_of(engine)
    assert has_not not in prompt_of(engine).split("<|user|>", 1)[1]


async def test_images_within_a_chats_history_are_notes():
    engine = engine_of()
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    answer = await post(
        "/v1/chat/completions", {"messages": [image, {"role": "assistant", "content": "No."}, HI]}, engine
    )
    assert answer.headers[IGNORED] == "messages.image_url"
    assert IMAGE in prompt_of(engine)


# ---- threads, and results without a call -----------------------------------------------------------------------------


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_threads_are_refused_as_the_sdk_reads_it(thread: dict[str, Any]):
    answer = await post("/v1/messages", {"max_tokens": 5, "messages": [HI], "thread": thread})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_result_needs_a_call_before_it(path: str):
    for messages in ([{"role": "user", "content": [result()]}], [{"role": "user", "content": [result()]}, USE, HI]):
        answer = await post(path, {"max_tokens": 5, "messages": messages})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks")


# ---- recorded bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", REQUESTS, ids=lambda recorded: recorded["program"])
async def test_each_field_of_a_recorded_body_is_taken(recorded: dict[str, Any]):
    path, body = recorded["path"], recorded["body"]
    answer = await post(path, body)
    assert answer.status_code == 200, answer.text
    needed = {"messages", "input", "prompt", "max_tokens", "model", "system"}
    options = {"tool_choice", "stream_options", "top_logprobs"}  # each needs another field
    for name in body.keys() - needed:
        alone = {key: value for key, value in body.items() if key in needed or key == name}
        answer = await post(path, alone)
        assert answer.status_code == 200 or name in options, (name, answer.text)
