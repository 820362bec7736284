"""Messages as templates with channels read them: one call a message, and reasoning as `thinking`.

gpt-oss's template keeps the reasoning before a call until a final answer follows, and drops it then. It shows a system
message at the head alone, and leaves out all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def channel_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages in the form of such a template. Each call is followed by its result."""
    messages = _with_one_system_message(messages)
    written: list[Mapping[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.get("role") != "assistant":
            written.append(message)
            continue
        calls = message.get("tool_calls") or []
        first = {name: value for name, value in message.items() if name != "tool_calls"} | _thinking(message)
        if not calls:
            written.append(first)
            continue
        end = at
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        results, at = list(messages[at:end]), end
        for i, call in enumerate(calls):
            written.append(({"role": "assistant", "content": ""} if i else first) | {"tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            if i == len(calls) - 1:
                own = results  # and the results that name no call
            written += own
            results = [result for result in results if result not in own]
    return written


def _with_one_system_message(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages with all system messages as one, at the head."""
    are_system = [message.get("role") in ("system", "developer") for message in messages]
    if not any(are_system[1:]):
        return messages
    contents = (message.get("content") for message, is_system in zip(messages, are_system, strict=True) if is_system)
    text = "\n\n".join(content for content in contents if isinstance(content, str))
    others = (message for message, is_system in zip(messages, are_system, strict=True) if not is_system)
    return [{"role": "system", "content": text}, *others]


def described(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Return tools that all have a description, which gpt-oss's template requires."""
    if tools is None:
        return None
    return [
        {**tool, "function": {"description": "", **tool["function"]}} if "function" in tool else tool for tool in tools
    ]


def _thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a message's reasoning. Next to calls, the template takes either it or content."""
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if not thoughts:
        return {}
    if message.get("tool_calls") and content and isinstance(content, str):
        return {"thinking": f"{thoughts}\n\n{content}", "content": ""}
    return {"thinking": thoughts}
