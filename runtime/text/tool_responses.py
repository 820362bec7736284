"""Call results as templates read them: in the message with the calls (Gemma 4), with pictures in a user's message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NOTE = {"type": "text", "text": "[image: see the next message]"}


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


def has_images(message: Mapping[str, Any]) -> bool:
    """Return whether a message has pictures."""
    content = message.get("content")
    return isinstance(content, list) and any(_is_image(part) for part in content)


def with_images_after_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with the pictures of results in the user's message after them, in their order."""
    moved: list[Mapping[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        if message.get("role") == "tool":
            if has_images(message):
                images += [part for part in message["content"] if _is_image(part)]
                message = {**message, "content": [_NOTE if _is_image(part) else part for part in message["content"]]}
        elif images and message.get("role") == "user":
            content = message.get("content") or ""
            own = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message, images = {**message, "content": [*images, *own]}, []
        elif images:
            moved.append({"role": "user", "content": images})
            images = []
        moved.append(message)
    return [*moved, {"role": "user", "content": images}] if images else moved


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"
