"""Messages in channels, as gpt-oss writes them: reasoning, content and calls are messages with headers of their own.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. A message to an unknown recipient counts as reasoning: it is not for
the user."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, SPECIAL, ToolCallParser, ToolFormat

START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
END_MARKS = "<|end|>", "<|return|>", "<|call|>"  # each ends a message
CHANNEL_MARKS = (*END_MARKS, "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
_MESSAGE, _COMMENTARY = "<|message|>", "<|channel|>commentary"
_NOT_PLAIN = re.compile(r"[^\w-]")
_RECIPIENT = re.compile(r"to=(?:functions\.([^\s<\U0010ffff]+)|([\w-]+)(?![\w.-]))?")  # "functions." may be missing


class _Marks:
    """The marks that the parser looks for, each with the same text before it."""

    def __init__(self, before: str) -> None:
        self.message = before + _MESSAGE
        # A message's end, or the next one's beginning.
        self.ends = tuple(before + mark for mark in (*END_MARKS, "<|start|>", "<|channel|>"))
        self.end = re.compile("|".join(map(re.escape, self.ends)))
        self.max_header = MAX_HEAD_CHARS + len(self.message)


class HarmonyParser(ToolCallParser):
    """Reads one turn's messages. The state outside calls is inside a header."""

    marks: ClassVar = _Marks("")
    is_open = True  # while more of the text may be reasoning
    num_reasoning_chars = 0  # length of the reasoning so far, headers included
    needs_header = False  # a text without a header begins one; it is not content
    _has_message = False
    _is_content = True  # the message is for the user
    _reasoning = ""

    def new_reasoning(self) -> str:
        """Return the reasoning that has become certain since the last call."""
        new, self._reasoning = self._reasoning, ""
        return new

    def _outside(self, final: bool) -> bool:
        mark, most = self.marks.message, self.marks.max_header
        at, may_be_header = self._held.find(mark, 0, most), len(self._held) < most
        if at < 0 and may_be_header and (self._has_message or self.needs_header or not final):
            return False
        self._has_message, self._state = True, self._message
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(mark) :]
            # A header that begins again replaces the one before it.
            header = header[header.rfind("<|channel|>") :] if header.count("<|channel|>") > 1 else header
            recipient = _RECIPIENT.search(header)
            self._is_content = recipient is None and "analysis" not in header
            name = (recipient[1] or recipient[2]) if recipient else None
            if name and not self._may_call(name):  # models write other text behind a name
                name = _NOT_PLAIN.split(name)[0]
            if name and self._may_call(name):
                self._begin(name)
                self._state = self._begun_arguments
            self.is_open = self.is_open and self._state == self._message and not self._is_content
        return True

    def _message(self, final: bool) -> bool:
        text, ended = self._up_to(self.marks.end, self.marks.ends, final)
        if self._is_content:
            self.content.append(text)
        else:
            self._reasoning += text
            if self.is_open:
                self.num_reasoning_chars = self._num_chars - len(self._held)
        self._state = self._outside if ended else self._message
        return ended

    def _after_arguments(self, final: bool) -> bool:
        return self._end(self._outside)


class HarmonyTokenParser(HarmonyParser):
    """Reads a text in which `SPECIAL` precedes each special token. A mark that is spelled out is ordinary text."""

    marks = _Marks(SPECIAL)


def with_special(text: str) -> str:
    """Return a text of the prompt as `HarmonyTokenParser` reads it."""
    return _ANY_MARK.sub(lambda mark: SPECIAL + mark[0], text)


_ANY_MARK = re.compile("|".join(map(re.escape, CHANNEL_MARKS)))
HARMONY = ToolFormat(
    HarmonyParser,
    mark="",
    marks=CHANNEL_MARKS,
    begin=_COMMENTARY + " to=functions.",
    to_arguments=" <|constrain|>json<|message|>",
)
HARMONY_TOKENS = replace(HARMONY, parser=HarmonyTokenParser)
