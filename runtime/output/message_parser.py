"""How the text of a chat's output is read: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from runtime.text.reasoning import ReasoningSplitter
from runtime.text.tool_calls import CallDelta, ForcedCall, ToolCallParser, ToolFormat


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The parts that the text of one request's choices may hold beside content, and how its prompt has begun it."""

    thinks: bool  # it may begin with reasoning
    in_reasoning: bool  # the prompt ends within reasoning
    shows_reasoning: bool
    tools: ToolFormat | None  # None: no calls are read
    function_names: Set[str] | None  # that may be called; None: any
    most_calls: int | None
    forced: ForcedCall | None  # the prompt ends with its opening
    kept_special_ids: frozenset[int]  # tokens that mark reasoning and calls


class ParsedMessage(NamedTuple):
    """The additions of a piece of text to a message."""

    content: str
    reasoning: str
    calls: list[CallDelta]


class MessageParser:
    """Reads one choice."""

    def __init__(self, form: MessageFormat) -> None:
        self._shows_reasoning = form.shows_reasoning
        self._splitter = ReasoningSplitter(form.in_reasoning) if form.thinks else None
        self._calls = None
        if form.tools is not None:
            self._calls = ToolCallParser(form.tools, form.function_names, form.most_calls, form.forced)
        self.has_called = False
        self._ends: list[int] | None = [] if form.thinks else None  # of tokens that may be reasoning; None: none may

    def num_reasoning_tokens(self, ends: list[int], is_last: bool) -> int:
        """How many more tokens are certainly reasoning, now that text was pushed which is whole up to `ends`."""
        if self._ends is None or self._splitter is None:
            return 0
        self._ends += ends
        num_before, num_chars = len(self._ends), self._splitter.num_reasoning_chars
        if not self._splitter.is_open:
            ends, self._ends = self._ends, None
            return sum(end <= num_chars for end in ends)
        self._ends = [] if is_last else [end for end in self._ends if end > num_chars]
        return num_before - len(self._ends)

    @property
    def is_done(self) -> bool:
        """True once all calls that are allowed have been made: nothing more is read."""
        return self._calls is not None and self._calls.done

    def push(self, text: str, is_last: bool) -> ParsedMessage:
        """The parts of the message that are certain with this piece of text."""
        reasoning = ""
        calls: list[CallDelta] = []
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text, is_last)
        if self._calls is not None:
            text, calls = self._calls.push(text, is_last)
            self.has_called = self.has_called or bool(calls)
        return ParsedMessage(text, reasoning if self._shows_reasoning else "", calls)
