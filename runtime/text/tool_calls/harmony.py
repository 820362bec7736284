"""Messages in channels, as gpt-oss writes them: reasoning, content and calls are messages with headers of their own.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. A message to what is no function of the request counts as reasoning:
it is not for the user.
"""

from __future__ import annotations

import re

from runtime.text.reasoning import tail_that_may_begin
from runtime.text.tool_calls.json_objects import JsonObjectParser
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, CallDelta, ToolCallParser, ToolFormat

START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_MESSAGE, _COMMENTARY = "<|message|>", "<|channel|>commentary"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")  # of a message, or begins the next one
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"to=(?:functions\.([\w-]+))?")
_MARKS = (*_ENDS, _MESSAGE, "<|constrain|>")


class HarmonyParser(ToolCallParser):
    """Reads the messages of one turn; the state outside of calls is within a header."""

    is_open = True  # while more of the text may be reasoning
    num_reasoning_chars = 0  # of the text so far, headers included
    _num_chars = 0
    _has_message = False
    _is_content = True  # the message is for the user
    _reasoning = ""

    def read_prompt(self, turn: str) -> None:
        """Reads on from the part of the turn that the prompt ends with."""
        self.push(turn)
        self._reasoning, self._num_chars, self.num_reasoning_chars = "", len(self._held), 0

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        self._num_chars += len(text)
        return super().push(text, is_last)

    def new_reasoning(self) -> str:
        """The reasoning that has become certain since it was asked for."""
        new, self._reasoning = self._reasoning, ""
        return new

    def _outside(self, final: bool) -> bool:
        at = self._held.find(_MESSAGE)
        if at > MAX_HEAD_CHARS or (at < 0 and len(self._held) >= MAX_HEAD_CHARS + len(_MESSAGE)):
            self._state = self._message  # it is no header
            return True
        if at < 0:
            if final and not self._has_message:
                self._state = self._message
            return final and not self._has_message
        header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        self._has_message, self._state = True, self._message
        self._is_content = recipient is None and "analysis" not in header
        if recipient and self._may_call(recipient[1]):
            self._begin(recipient[1])
            self._state = self._begun_arguments
        self.is_open = self.is_open and self._state == self._message and not self._is_content
        return True

    def _message(self, final: bool) -> bool:
        text, end = self._held, _END.search(self._held)
        num_waiting = 0 if final else max(tail_that_may_begin(mark, text) for mark in _ENDS)
        stop = len(text) - num_waiting if end is None else end.start()
        self._held = text[stop if end is None else end.end() :]
        if self._is_content:
            self._content.append(text[:stop])
        else:
            self._reasoning += text[:stop]
        if self.is_open and not self._is_content:
            self.num_reasoning_chars = self._num_chars - len(self._held)
        self._has_message = True
        if end is not None:
            self._state = self._outside
        return end is not None

    def _after_arguments(self, final: bool) -> bool:
        return self._end(self._outside)


HARMONY = ToolFormat(
    HarmonyParser,
    mark="",
    marks=_MARKS,
    begin=_COMMENTARY + " to=functions.",
    to_arguments=" <|constrain|>json<|message|>",
    json_form=ToolFormat(
        JsonObjectParser,
        mark=_COMMENTARY + _MESSAGE,
        marks=_MARKS,
        begin=_COMMENTARY + _MESSAGE + '{"name": "',
        to_arguments='", "arguments":',
        end="}",
    ),
)
