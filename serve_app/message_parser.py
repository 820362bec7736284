"""How the text of a chat's output is read: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from runtime.text.reasoning import ReasoningSplitter
from runtime.text.tool_calls import ToolCallParser, ToolFormat
from serve_app.responses import Delta, ParsedMessage


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What the text of one request's choices may hold beside content, and with what its prompt has begun it."""

    thinks: bool  # it may begin with reasoning
    in_reasoning: bool  # the prompt ends within reasoning
    shows_reasoning: bool
    tools: ToolFormat | None  # None: no calls are read
    function_names: Set[str] | None  # that may be called; None: any
    most_calls: int | None
    begun: str | None  # the function of a call that the prompt ends with the opening of; "": not named yet
    kept_special_ids: frozenset[int]  # tokens that mark reasoning and calls


class MessageParser:
    """Reads one choice."""

    def __init__(self, form: MessageFormat) -> None:
        self._shows_reasoning = form.shows_reasoning
        self._splitter = ReasoningSplitter(form.in_reasoning) if form.thinks else None
        self._calls = None
        if form.tools is not None:
            self._calls = ToolCallParser(form.tools, form.function_names, form.most_calls, form.begun)
        self._has_called = False

    def read(self, delta: Delta) -> None:
        """Leaves content alone in the text of a choice's next delta; the rest becomes its `message`."""
        text, reasoning, message = delta.text, "", ParsedMessage()
        finished = delta.finish_reason is not None
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if finished:
                rest = self._splitter.finish()
                reasoning, text = reasoning + rest[0], text + rest[1]
        if self._calls is not None:
            text, message.calls = self._calls.push(text)
            if finished:
                rest_text, rest_calls = self._calls.finish()
                text, message.calls = text + rest_text, message.calls + rest_calls
            self._has_called = self._has_called or bool(message.calls)
            if self._calls.done or (self._has_called and delta.finish_reason == "stop"):
                delta.finish_reason, delta.stop_reason = "tool_calls", None
        delta.text = text
        if self._shows_reasoning:
            message.reasoning = reasoning
        if message.reasoning or message.calls:
            delta.message = message
