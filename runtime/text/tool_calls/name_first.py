"""Calls with the name before the arguments, outside of any object: arguments in JSON, plain, or between tags."""

from __future__ import annotations

import re
from typing import ClassVar

from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolCallParser
from runtime.text.tool_calls.written_values import as_json, json_text, types_of


def name_up_to(ends: str) -> str:
    """Return the group of a name without these characters, line ends and spaces around it."""
    return rf"([^\s{ends}](?:[^\n{ends}]*[^\s{ends}])?)"


class NameFirstParser(ToolCallParser):
    """Arguments in JSON. A format is defined by regular expressions and marks."""

    head: ClassVar[re.Pattern[str]]  # the text from the mark to the arguments; the group is the name
    ends: ClassVar[tuple[str, ...]] = ()  # end marks in this order; each is optional
    next_call: ClassVar[str] = ""  # begins `head` if the mark is not repeated
    close: ClassVar[str] = ""  # after the last call
    # Matches a text that may become `head`, where a call may begin without a mark; None if it always has one.
    head_so_far: ClassVar[re.Pattern[str] | None] = None
    _num_ends = 0  # ends searched after this call
    _name = ""  # this call's function

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
        begun = self._held[self._at : self._at + MAX_HEAD_CHARS]
        final = final or (self.head_so_far is not None and not self.head_so_far.match(begun))
        if head or final or len(begun) >= MAX_HEAD_CHARS:
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
        elif self.close and text.startswith(self.close):
            self._held = text.removeprefix(self.close)
        else:
            self._state = self._outside
        return True


class PlainArgumentsParser(NameFirstParser):
    """Arguments that are written one by one and returned as a JSON object. A format parses its keys and values."""

    _before_key = "{"
    _types: frozenset[str] = frozenset()  # this argument's types; empty if unknown

    def _begun_arguments(self, final: bool) -> bool:
        self._before_key = "{"
        self._state = self._key
        return True

    def _key(self, final: bool) -> bool:
        """Before an argument, or before the end of the call."""
        raise NotImplementedError

    def _give_key(self, key: str) -> None:
        self._give(f'{self._before_key}"{json_text(key)}": ')
        self._before_key = ", "
        self._types = types_of((self._functions or {}).get(self._name), key)

    def _give_end(self) -> None:
        self._give("{}" if self._before_key == "{" else "}")


class TaggedParser(PlainArgumentsParser):
    """Arguments between tags. A string is returned as it arrives, any other value when it is complete."""

    key_mark: ClassVar[str]
    # From an argument's mark to its value. The groups are its name and, in some formats, "true" if it is a text.
    key: ClassVar[re.Pattern[str]]
    value_ends: ClassVar[tuple[str, ...]]
    value_end: ClassVar[re.Pattern[str]]  # matches one of them
    has_lines: ClassVar[bool] = True  # a line end before a value belongs to its tag

    _is_string = False
    _is_at_start = True
    _written = ""  # a value that is not a string, so far

    def _key(self, final: bool) -> bool:
        text = self._held = self._held.lstrip()
        if key := self.key.match(text, 0, MAX_HEAD_CHARS):
            self._give_key(key[1])
            if key.re.groups > 1 and key[2]:
                self._types = frozenset(["string"]) if key[2] == "true" else self._types - {"string"}
            self._is_string = self._types == {"string"}
            self._give('"' if self._is_string else "")
            self._written, self._is_at_start = "", True
            self._held = text[key.end() :]
            self._state = self._value_text
            return True
        is_begun = text.startswith(self.key_mark) and len(text) < MAX_HEAD_CHARS
        if is_begun or self.key_mark.startswith(text):
            if not final:
                return False
            if text and "\n" not in text:  # the output is cut off here
                self._held = ""
                return False
        self._give_end()
        return self._after_arguments(final)

    def _value_text(self, final: bool) -> bool:
        if self._is_at_start and self._held:
            self._held = self._held.removeprefix("\n" if self.has_lines else "")
            self._is_at_start = False
        text, ended = self._up_to(self.value_end, self.value_ends, final)
        if self._is_string:
            self._give(json_text(text))
        else:
            self._written += text
        if ended:
            self._give('"' if self._is_string else as_json(self._written, self._types))
            self._state = self._key
        elif final:
            self._give(self._written)
        return ended
