"""Tool calls for chat templates without their own format: the tools, the calls and their results are plain text.

The calls have Hermes's format. It is the most frequent in training data: Qwen's templates and function-call data sets
use it. The tools stand first, so all turns share their prefix-cache blocks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.parser import ToolFormat

GENERIC = replace(HERMES, is_text=True)

_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a JSON object with the function's name and arguments within <tool_call></tool_call> XML \
tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, has_system: bool
) -> list[Mapping[str, Any]]:
    """Rewrite a conversation for a template without tools and calls.

    The tools go to the head of the system message or, without that role, the first user message. Call results
    become user text, in one turn with the user's own adjacent text."""
    turns: list[tuple[Mapping[str, Any], list[str | list[Any]]]] = []  # a message, and all contents of its turn
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
        elif message.get("tool_calls"):
            message = _with_calls_as_text(message, GENERIC)
        if (is_result or was_result) and turns and turns[-1][0].get("role") == message.get("role") == "user":
            turns[-1][1].append(message.get("content") or "")
        else:
            turns.append((message, [message.get("content") or ""]))
        was_result = is_result
    plain = [
        message if len(contents) == 1 else {**message, "content": _joined("\n", contents)}
        for message, contents in turns
    ]
    return with_tools(plain, tools, has_system, _INSTRUCTIONS) if tools else plain


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], has_system: bool, instructions: str
) -> list[Mapping[str, Any]]:
    """Return messages with a text about the tools: `instructions`, with the tools at its %s."""
    text = instructions % "\n".join(_json(tool) for tool in tools)
    role = "system" if has_system else "user"
    # Only a first message can be the system message: other positions are not valid in all templates.
    candidates = messages if role == "user" else messages[:1]
    at = next((i for i, message in enumerate(candidates) if message.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    content = messages[at].get("content")
    first = {**messages[at], "content": _joined("\n\n", [text, content]) if content else text}
    return [*messages[:at], first, *messages[at + 1 :]]


def with_written_calls(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat, roles: Collection[str]
) -> list[Mapping[str, Any]]:
    """Rewrite a conversation for a template that writes no calls: a call becomes text of its message.

    `roles` are the role names in the template. A result has one of them."""
    role = next((role for role in ("tool", "observation", "environment") if role in roles), "tool")
    rewritten: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            rewritten.append({**message, "role": role})
        elif message.get("tool_calls") and form.has_metadata:  # a message for each call
            rewritten += [{"role": "assistant", "content": message["content"]}] if message.get("content") else []
            calls = (call["function"] for call in message["tool_calls"])
            rewritten += (
                {"role": "assistant", "metadata": call["name"], "content": _json(call["arguments"])} for call in calls
            )
        else:
            rewritten.append(_with_calls_as_text(message, form) if message.get("tool_calls") else message)
    return rewritten


def with_tools_of_system(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages with the tools as a field of the system message, where a template looks for them."""
    is_first = bool(messages) and messages[0].get("role") == "system"
    system = messages[0] if is_first else {"role": "system", "content": ""}
    return [{**system, "tools": _json([tool["function"] for tool in tools])}, *messages[is_first:]]


def _with_calls_as_text(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    text = ""
    for call in (call["function"] for call in message["tool_calls"]):
        text += (form.again if text else form.begin) + call["name"] + form.to_arguments
        text += _arguments(call["arguments"], form) + form.end
    content = _text(message)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{content}\n{text}{form.close}" if content else text + form.close}


def _arguments(arguments: Any, form: ToolFormat) -> str:
    if form.arguments is None or not isinstance(arguments, Mapping):
        return " " * form.to_arguments.endswith(":") + _json(arguments)
    of = form.arguments
    return of.separator.join(of.begin + key + of.to_value + _json(value) + of.end for key, value in arguments.items())


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _joined(between: str, contents: Sequence[str | list[Any]]) -> str | list[Any]:
    """Join contents, each a text or a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return between.join(str(content) for content in contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": between}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
