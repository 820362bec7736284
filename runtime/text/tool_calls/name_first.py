"""Calls whose name stands before arguments in JSON, outside of any object."""

from __future__ import annotations

import re
from typing import ClassVar

from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolCallParser


class NameFirstParser(ToolCallParser):
    """Each format says by regular expressions and marks how it writes them."""

    head: ClassVar[re.Pattern[str]]  # from the mark to the arguments; the group is the name
    ends: ClassVar[tuple[str, ...]] = ()  # of a call, in this order; each may be forgotten
    next_call: ClassVar[str] = ""  # with which `head` begins, where the mark is not repeated
    close: ClassVar[str] = ""  # after the last call
    _num_ends = 0  # that were looked for after this call
    _name = ""  # of this call's function

    def _begin(self, name: str) -> None:
        self._name = name
        super()._begin(name)

    def _opening(self, final: bool) -> bool:
        head = self.head.match(self._held, self._at, self._at + MAX_HEAD_CHARS)
        if head and self._may_call(head[1]):
            self._begin(head[1])
            self._held = self._held[head.end() :]
            self._state = self._begun_arguments
            return True
        if head or final or len(self._held) - self._at >= MAX_HEAD_CHARS:
            return self._give_back(self._at)
        return False

    def _after_arguments(self, final: bool) -> bool:
        self._num_ends = 0
        return self._end(self._after_call)

    def _after_call(self, final: bool) -> bool:
        for end in self.ends[self._num_ends :]:
            if self._skips(end, final) is None:
                return False
            self._num_ends += 1
        text = self._held = self._held.lstrip()
        may_begin = any(mark != text and mark.startswith(text) for mark in (self.next_call, self.close))
        if not text or (may_begin and not final):
            return False
        if self.next_call and text.startswith(self.next_call):
            self._at = 0
            self._state = self._opening
        else:
            self._held = text.removeprefix(self.close)
            self._state = self._outside
        return True
