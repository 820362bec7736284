"""Call results as templates with `tool_responses` read them: in the message with the calls (Gemma 4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_tool_responses(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the results of tools in the message before them."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool" or not written or written[-1].get("role") != "assistant":
            written.append(dict(message))
            continue
        calls = {call.get("id"): call["function"]["name"] for call in written[-1].get("tool_calls") or []}
        name = message.get("name") or calls.get(message.get("tool_call_id")) or next(iter(calls.values()), "unknown")
        response = {"name": name, "response": _response(message.get("content"))}
        written[-1]["tool_responses"] = [*written[-1].get("tool_responses", ()), response]
    return list(written)


def _response(content: object) -> object:
    """Return a JSON object that a result is the text of; other results stay texts."""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    try:
        value = json.loads(str(content))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else content
