"""Sessions of 20 turns with tools, as agent programs send them: every turn sends the whole conversation again.

Each turn echoes the answer before it, and adds what the program sends now and then. Each prompt begins with the one
before it, so the prefix cache serves that part."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support.http.chats import QWEN
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, client_of
from tests.support.http.responses import said

pytestmark = pytest.mark.usefixtures("shared_compiler")
TURNS = 20
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ANSWER = 'I read it.<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
PNG = "data:image/png;base64,aaaa"


def pair(kind: str, turn: int, output: Any = "done", **fields: Any) -> list[dict[str, Any]]:
    call_id = f"call_{kind}_{turn}"
    result = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output",
              "local_shell_call": "function_call_output", "tool_search_call": "tool_search_output"}[kind]  # fmt: skip
    item = {"type": result, "call_id": call_id}
    item |= {"tools": output, "execution": "client"} if kind == "tool_search_call" else {"output": output}
    return [{"type": kind, "call_id": call_id, "status": "completed", **fields}, item]


FUNCTION = {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": SCHEMA}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [FUNCTION | {"name": "spawn"}]}
REASONING = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None}
IMAGE = [{"type": "input_image", "image_url": PNG, "detail": "high"}]
CODEX: list[Callable[[int], list[dict[str, Any]]]] = [
    lambda turn: [REASONING | {"id": f"rs_{turn}"}, *pair("function_call", turn, name="read", arguments="{}")],
    lambda turn: pair("function_call", turn, IMAGE, name="read", arguments="{}"),
    lambda turn: pair("function_call", turn, name="spawn", namespace="agents", arguments="{}"),
    lambda turn: pair("function_call", turn, [{"type": "input_text", "text": "x"}], name="gone", arguments="{"),
    lambda turn: pair("custom_tool_call", turn, name="apply_patch", input="*** Begin Patch"),
    lambda turn: pair("local_shell_call", turn, action={"type": "exec", "command": ["ls"], "env": None}),
    lambda turn: pair("tool_search_call", turn, [NAMESPACE], execution="client", arguments={"query": "mail"}),
    lambda turn: [{"type": "web_search_call", "id": f"ws_{turn}", "status": "completed",
                   "action": {"type": "search", "query": "q"}}],
    lambda turn: [{"type": "compaction", "encrypted_content": "x"}],
    lambda turn: [said("developer", "The sandbox has changed."), said("user", "Go on.")],
]  # fmt: skip


def codex_turn(messages: list[Any], turn: int) -> dict[str, Any]:
    messages += CODEX[turn % len(CODEX)](turn)
    return {
        "model": "fake", "instructions": "You are an agent.", "stream": True, "store": False, "input": messages,
        "tools": [FUNCTION, NAMESPACE, {"type": "custom", "name": "apply_patch", "description": "Patches."},
                  {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "client_metadata": {"turn_id": str(turn)},
    }  # fmt: skip


def codex_echo(messages: list[Any], events: list[dict[str, Any]]) -> None:
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    calls = [item for item in done if item["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["read"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
    messages += [*done, *outputs]


USED = {"type": "tool_use", "name": "read", "input": {"path": "b"}, "caller": {"type": "direct"}}
RESULT = {"type": "tool_result"}
MARK = {"type": "ephemeral"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
RESULTS: list[Any] = [
    "x",
    [],
    [{"type": "text", "text": "x"}],
    [{"type": "image", "source": SOURCE}],
    [{"type": "document", "source": SOURCE | {"media_type": "application/pdf"}}],
    [{"type": "tool_reference", "tool_name": "read"}],
]
SEARCHED = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "So."}]  # fmt: skip
CLAUDE: list[Callable[[int], list[dict[str, Any]]]] = [
    lambda turn: [{"role": "system", "content": "The date is known."}],
    lambda turn: [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                                    *[USED | {"id": f"u{turn}_{i}"} for i in range(6)]]},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"u{turn}_{i}", "content": each,
                                                "is_error": i == 0} for i, each in enumerate(RESULTS)]}],
    lambda turn: [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *SEARCHED]},
                  {"role": "user", "content": "Go on."}],
    lambda turn: [{"role": "assistant", "content": [{"type": "compaction", "content": "So far."}]},
                  {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Be brief."}]}],
]  # fmt: skip


def claude_turn(messages: list[Any], turn: int) -> dict[str, Any]:
    messages += CLAUDE[turn % len(CLAUDE)](turn)
    last = messages[-1]
    if isinstance(last["content"], list):  # the mark moves on with every turn
        last = last | {"content": [*last["content"][:-1], last["content"][-1] | {"cache_control": MARK}]}
    return {
        "model": "fake", "max_tokens": 64, "stream": True, "messages": [*messages[:-1], last],
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": MARK}],
        "tools": [{"name": "read", "description": "Reads.", "input_schema": SCHEMA, "eager_input_streaming": True}],
        "thinking": {"type": "adaptive"}, "metadata": {"user_id": str(turn)}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip


def claude_echo(messages: list[Any], events: list[dict[str, Any]]) -> None:
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    (call,) = [block for block in blocks if block["type"] == "tool_use"]
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    used = USED | {"id": call["id"], "input": {"path": "a"}}
    messages += [{"role": "assistant", "content": [{"type": "text", "text": text}, used]},
                 {"role": "user", "content": [RESULT | {"tool_use_id": call["id"], "content": "x"}]}]  # fmt: skip


def asked(turn: int, content: Any, *outputs: Any, **fields: Any) -> list[dict[str, Any]]:
    calls = [{"id": f"c{turn}_{i}", "type": "function", "function": {"name": "read", "arguments": '{"path": "b"}'}}
             for i in range(len(outputs))]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": f"c{turn}_{i}", "content": each} for i, each in enumerate(outputs)]
    return [{"role": "assistant", "content": content, "tool_calls": calls, **fields}, *results]


def parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


CHAT: dict[str, list[Callable[[int], list[dict[str, Any]]]]] = {
    "opencode": [
        lambda turn: asked(turn, "", "x", "Error: no such file", reasoning_content="Hm."),
        lambda turn: asked(turn, None, [*parts("x"), {"type": "image_url", "image_url": {"url": PNG}}]),
        lambda turn: [{"role": "assistant", "content": "Done."}, {"role": "user", "content": parts("Go on.")}],
        lambda turn: [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    ],
    "qwen-code": [
        lambda turn: asked(turn, None, parts("x"), parts("y"), reasoning_content="Hm."),
        lambda turn: [*asked(turn, "", ""), {"role": "user", "content": parts("Go on.")}],
        lambda turn: [{"role": "assistant", "content": parts("Done.")}, {"role": "user", "content": parts("Next.")}],
        lambda turn: asked(turn, None, [{"type": "image_url", "image_url": {"url": PNG}}]),
    ],
}


def chat_turn(program: str) -> Callable[[list[Any], int], dict[str, Any]]:
    def turn_of(messages: list[Any], turn: int) -> dict[str, Any]:
        messages += CHAT[program][turn % len(CHAT[program])](turn)
        function = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
        own = {"top_p": 0.95, "metadata": {"promptId": str(turn)}} if program == "qwen-code" else {"temperature": 0.55}
        system = {"role": "system", "content": "You are an agent."}
        return {
            "model": "fake", "max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}, **own,
            "messages": [system, *messages], "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto",
        }  # fmt: skip

    return turn_of


def chat_echo(messages: list[Any], events: list[dict[str, Any]]) -> None:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    (call_id,) = [call["id"] for call in calls if call.get("id")]
    call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    text = "".join(delta.get("content") or "" for delta in deltas)
    messages += [{"role": "assistant", "content": text, "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": call_id, "content": "x"}]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "first", "turn_of", "echo"),
    [
        ("/v1/responses", said("user", "Look."), codex_turn, codex_echo),
        ("/v1/messages?beta=true", {"role": "user", "content": "Look."}, claude_turn, claude_echo),
        ("/v1/chat/completions", {"role": "user", "content": "Look."}, chat_turn("opencode"), chat_echo),
        ("/v1/chat/completions", {"role": "user", "content": "Look."}, chat_turn("qwen-code"), chat_echo),
    ],
    ids=["codex", "claude-code", "opencode", "qwen-code"],
)
async def test_a_session_of_20_turns(path: str, first: Any, turn_of: Any, echo: Any):
    engine = FakeEngine(ANSWER, max_model_len=1 << 16)
    messages = [first]
    async with client_of(engine, byte_tokenizer(QWEN)) as client:
        for turn in range(TURNS):
            answer = await client.post(path, json=turn_of(messages, turn))
            assert answer.status_code == 200, (turn, answer.text)
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            echo(messages, [json.loads(line.removeprefix("data: ")) for line in lines])
    prompts = [bytes(request.token_ids).decode() for request in engine.requests]
    for turn, (prompt, after) in enumerate(pairwise(prompts)):
        assert after.startswith(prompt + ANSWER), (turn, prompt[-200:], after[len(prompt) - 100 : len(prompt) + 100])
