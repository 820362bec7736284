"""Messages with calls in the form that a template reads: arguments as objects or texts, content before the calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.text.probes import Place

_Messages = Sequence[Mapping[str, Any]]


def with_objects(messages: _Messages, are_written: bool) -> list[Mapping[str, Any]]:
    """Return messages in which calls have objects as arguments, where a client sent another text.

    Args:
        are_written: the template writes arguments one by one. Such a template fails on a text, so a text that is not
            an object becomes an argument of its own."""

    def as_object(arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        if not arguments.strip():
            return {}
        return {"arguments": arguments} if are_written else arguments

    return _with_arguments(messages, as_object)


def with_texts(messages: _Messages) -> list[Mapping[str, Any]]:
    """Return messages with JSON texts as the arguments of calls."""

    def as_text(arguments: Any) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    return _with_arguments(messages, as_text)


def with_named_ids(messages: _Messages) -> list[Mapping[str, Any]]:
    """Return messages with ids of calls that name the function and count the calls, as in Kimi's prompts."""
    named: list[Mapping[str, Any]] = []
    ids: dict[Any, str] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            new = [f"functions.{call['function']['name']}:{i}" for i, call in enumerate(calls, len(ids))]
            ids |= zip((call.get("id", own) for call, own in zip(calls, new, strict=True)), new, strict=True)
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, new, strict=True)]}
        elif (result := message.get("tool_call_id")) in ids:
            message = {**message, "tool_call_id": ids[result]}
        named.append(message)
    return named


def with_content_placed(messages: _Messages, place: Place) -> list[Mapping[str, Any]]:
    """Return messages with a call's content at a place that the template writes before the calls."""
    placed: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if place == "kept" or not (message.get("tool_calls") and content and isinstance(content, str)):
            placed.append(message)
        elif place == "reasoning":
            thoughts = "\n\n".join(filter(None, (message.get("reasoning_content"), content)))
            placed.append({**message, "content": "", "reasoning_content": thoughts})
        else:
            placed.append({name: value for name, value in message.items() if name != "tool_calls"})
            placed.append({"role": "assistant", "content": "", "tool_calls": message["tool_calls"]})
    return placed


def _with_arguments(messages: _Messages, form: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": form(function["arguments"])}}

    def with_changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [changed(call) for call in calls]} if calls else message

    return [with_changed(message) for message in messages]
