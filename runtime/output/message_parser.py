"""Parses the text of a chat's output into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from runtime.base.types import ThinkingBudget
from runtime.text.reasoning import THINK, Marks, ReasoningSplitter
from runtime.text.tool_calls import CallDelta, ForcedCall, ToolFormat
from runtime.text.tool_calls.custom_input import CustomInputs
from runtime.text.tool_calls.harmony import HarmonyParser
from runtime.text.tool_calls.plain_calls import PlainCalls


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The parts that a request's output may have besides content, and the part that its prompt has begun."""

    thinks: bool  # it may begin with reasoning
    in_reasoning: bool  # the prompt ends within reasoning
    shows_reasoning: bool
    tools: ToolFormat | None  # None if calls are not parsed
    functions: Mapping[str, Any]  # callable functions, with their arguments' JSON Schemas
    most_calls: int | None
    forced: ForcedCall | None  # the prompt ends with its opening
    kept_special_ids: frozenset[int]  # tokens that mark reasoning and calls
    before_special: str = ""  # precedes each of these tokens in the text
    reasoning_marks: Marks = THINK
    begun: str = ""  # the part of a turn in channels that the prompt ends with
    budget: ThinkingBudget | None = None  # limit for reasoning
    is_held: bool = False  # a grammar holds the channels
    may_open: bool = False  # the output may begin with reasoning's opening mark
    custom_tools: frozenset[str] = frozenset()  # functions with one argument, a text
    reads_plain_calls: bool = False  # calls in the content, without the format's marks, are calls


class ParsedMessage(NamedTuple):
    """What a piece of text adds to a message."""

    content: str
    reasoning: str
    calls: list[CallDelta]


class MessageParser:
    """Parses one choice."""

    def __init__(self, form: MessageFormat) -> None:
        self._shows_reasoning = form.shows_reasoning
        self._splitter = _splitter_of(form) if form.thinks else None
        self._calls, self._inputs = None, CustomInputs(form.custom_tools)
        if form.tools is not None:
            self._calls = form.tools.parser(form.tools, form.functions, form.most_calls, form.forced)
            if form.reads_plain_calls:
                self._calls.content = PlainCalls(form.functions, self._calls.call)
        self._channels = self._calls if isinstance(self._calls, HarmonyParser) else None
        self._num_begun = len(form.begun)  # characters in the prompt
        if self._channels is not None:
            self._channels.needs_header = form.is_held
        if self._channels is not None and form.begun:
            self._channels.push(form.begun)
            self._channels.new_reasoning()
        self._reasoning = self._channels or self._splitter  # the reasoning parser
        self.has_called = False
        # Ends of tokens that may be reasoning; None if none may.
        self._ends: list[int] | None = None if self._reasoning is None else []

    def num_reasoning_tokens(self, ends: list[int], is_last: bool) -> int:
        """Return how many further tokens are certainly reasoning. `ends` are the pushed tokens' ends."""
        if self._ends is None or self._reasoning is None:
            return 0
        self._ends += ends
        num_before, num_chars = len(self._ends), self._reasoning.num_reasoning_chars - self._num_begun
        if not self._reasoning.is_open:
            ends, self._ends = self._ends, None
            return sum(end <= num_chars for end in ends)
        self._ends = [] if is_last else [end for end in self._ends if end > num_chars]
        return num_before - len(self._ends)

    @property
    def is_done(self) -> bool:
        """True after the last allowed call: later text is ignored."""
        return self._calls is not None and self._calls.done

    def push(self, text: str, is_last: bool) -> ParsedMessage:
        """Add text, and return the parts of the message that are now certain."""
        reasoning = ""
        calls: list[CallDelta] = []
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text, is_last)
        if self._calls is not None:
            text, calls = self._calls.push(text, is_last)
            calls = self._inputs.push(calls)
            self.has_called = self.has_called or bool(calls)
        if self._channels is not None:
            reasoning = self._channels.new_reasoning()
        return ParsedMessage(text, reasoning if self._shows_reasoning else "", calls)


def _splitter_of(form: MessageFormat) -> ReasoningSplitter:
    tools, new_parser = form.tools, None
    if tools is not None and tools.ends_reasoning:
        new_parser = partial(tools.parser, tools, form.functions)
    return ReasoningSplitter(form.in_reasoning, form.reasoning_marks, new_parser)
