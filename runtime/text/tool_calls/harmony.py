"""Messages in channels, as gpt-oss writes them: reasoning, content and calls are messages with headers of their own.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. A message to an unknown recipient counts as reasoning: it is not for
the user.
"""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolCallParser, ToolFormat

START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_MESSAGE, _COMMENTARY = "<|message|>", "<|channel|>commentary"
_CALL = _COMMENTARY + _MESSAGE  # for calls as JSON
_MAX_HEADER = MAX_HEAD_CHARS + len(_MESSAGE)
_ENDS = (
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|start|>",
    "<|channel|>",
)  # the end of a message, or the beginning of the next one
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"to=(?:functions\.([\w-]+))?")
_MARKS = (*_ENDS, _MESSAGE, "<|constrain|>")


class HarmonyParser(ToolCallParser):
    """Reads the messages of one turn. The state outside of calls is inside a header."""

    is_open = True  # while more of the text may be reasoning
    num_reasoning_chars = 0  # of the text so far, headers included
    _has_message = False
    _is_content = True  # the message is for the user
    _reasoning = ""

    def new_reasoning(self) -> str:
        """Return the reasoning that has become certain since the last call."""
        new, self._reasoning = self._reasoning, ""
        return new

    def _outside(self, final: bool) -> bool:
        at, may_be_header = self._held.find(_MESSAGE, 0, _MAX_HEADER), len(self._held) < _MAX_HEADER
        if at < 0 and may_be_header and (self._has_message or not final):
            return False
        self._has_message, self._state = True, self._message
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(_MESSAGE) :]
            recipient = _RECIPIENT.search(header)
            self._is_content = recipient is None and "analysis" not in header
            if recipient and self._may_call(recipient[1]):
                self._begin(recipient[1])
                self._state = self._begun_arguments
            self.is_open = self.is_open and self._state == self._message and not self._is_content
        return True

    def _message(self, final: bool) -> bool:
        text, ended = self._up_to(_END, _ENDS, final)
        if self._is_content:
            self._content.append(text)
        else:
            self._reasoning += text
            if self.is_open:
                self.num_reasoning_chars = self._num_chars - len(self._held)
        self._state = self._outside if ended else self._message
        return ended

    def _after_arguments(self, final: bool) -> bool:
        return self._end(self._outside)


HARMONY = ToolFormat(
    HarmonyParser,
    mark="",
    marks=_MARKS,
    begin=_COMMENTARY + " to=functions.",
    to_arguments=" <|constrain|>json<|message|>",
    json_form=replace(HERMES, mark=_CALL, marks=_MARKS, begin=_CALL + '{"name": "', end="}", again=""),
)
