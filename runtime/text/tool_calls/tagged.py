"""Arguments between tags of their own, as plain text."""

from __future__ import annotations

import re
from typing import ClassVar

from runtime.text.tool_calls.parser import MAX_HEAD_CHARS
from runtime.text.tool_calls.plain_arguments import PlainArgumentsParser
from runtime.text.tool_calls.written_values import as_json, json_text


class TaggedParser(PlainArgumentsParser):
    """Writes the arguments as JSON: a string as it comes, any other value when it is whole."""

    key_mark: ClassVar[str]
    key: ClassVar[re.Pattern[str]]  # of an argument, from its mark to its value; the group is its name
    value_ends: ClassVar[tuple[str, ...]]
    value_end: ClassVar[re.Pattern[str]]  # one of them, in full

    _is_string = False
    _is_at_start = True
    _written = ""  # of a value that is no string

    def _key(self, final: bool) -> bool:
        text = self._held = self._held.lstrip()
        if key := self.key.match(text, 0, MAX_HEAD_CHARS):
            self._give_key(key[1])
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
            if text and "\n" not in text:  # the output was cut off here
                self._held = ""
                return False
        self._give_end()
        return self._after_arguments(final)

    def _value_text(self, final: bool) -> bool:
        if self._is_at_start and self._held:
            self._held = self._held.removeprefix("\n")
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
