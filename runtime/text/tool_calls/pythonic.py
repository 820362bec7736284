"""Calls as Python: `[f(a=1, b='x'), g()]`, at the beginning of the text or after a mark (Llama 3.2 and 4, Gemma 3)."""

from __future__ import annotations

import re

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import LLAMA3
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolFormat
from runtime.text.tool_calls.plain_arguments import PlainArgumentsParser
from runtime.text.tool_calls.written_values import json_of_literal

_END_MARK = "<|python_end|>"
_HEAD_SO_FAR = re.compile(r"\s*(?:[\[,]\s*[\w.-]*(?:\(\s*\w*\s*)?)?\Z")
_KEY, _KEY_SO_FAR = re.compile(r"(\w+)\s*="), re.compile(r"\w*\s*\Z")
_OUTSIDE_STRING = re.compile(r"""['"()\[\]{},]""")
_IN_STRING = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "'\""}


class PythonicParser(PlainArgumentsParser):
    """Gives each argument when it is whole."""

    head = re.compile(r"\s*[\[,]\s*([\w.-]+)\(\s*(?=\)|\w+\s*=)")
    next_call, ends = ",", ("]", _END_MARK)
    _depth, _quote, _scanned = 0, "", 0  # of this value: brackets open, the string's quote, how far it was read

    def _opening(self, final: bool) -> bool:
        begun = self._held[self._at : self._at + MAX_HEAD_CHARS]
        return super()._opening(final or not _HEAD_SO_FAR.match(begun))

    def _key(self, final: bool) -> bool:
        text = self._held = self._held.lstrip(", \t\r\n")
        if key := _KEY.match(text, 0, MAX_HEAD_CHARS):
            self._give_key(key[1])
            self._held = text[key.end() :]
            self._depth, self._quote, self._scanned = 0, "", 0
            self._state = self._literal
            return True
        if (text or not final) and len(text) < MAX_HEAD_CHARS and _KEY_SO_FAR.match(text):
            self._held = "" if final else text  # the last text was cut off here
            return False
        self._give_end()
        self._held = text.removeprefix(")")
        return self._after_arguments(final)

    def _literal(self, final: bool) -> bool:
        text = self._held
        while match := (_IN_STRING[self._quote] if self._quote else _OUTSIDE_STRING).search(text, self._scanned):
            char = match[0]
            if not (self._quote or self._depth) and char in ",)]}":
                self._give(json_of_literal(text[: match.start()].strip(), self._types))
                self._held = text[match.start() :]
                self._state = self._key
                return True
            self._scanned = match.end()
            if char in "'\"":
                self._quote = "" if self._quote else char
            elif not self._quote:
                self._depth += (char in "([{") - (char in ")]}")
        # A backslash at the end waits for what it escapes.
        self._scanned = max(self._scanned, len(text) - text.endswith("\\"))
        if final:
            self._give(text)
            self._held = ""
        return False


PYTHONIC = ToolFormat(
    PythonicParser,
    mark="<|python_start|>",
    marks=("<|python_start|>", _END_MARK),
    bare=r"\s*[\[,]\s*(%s)\(",
    begin="[",
    to_arguments="(",
    arguments=ArgumentForm("", "=", "", separator=", "),
    end=")",
    again=", ",
    close="]",
    json_form=LLAMA3,
)
