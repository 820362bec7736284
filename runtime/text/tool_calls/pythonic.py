"""Calls as Python: `[f(a=1, b='x'), g()]`, at the beginning of the text or after a mark (Llama 3.2 and 4, Gemma 3)."""

from __future__ import annotations

import re

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import LLAMA3
from runtime.text.tool_calls.name_first import PlainArgumentsParser
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolFormat
from runtime.text.tool_calls.python_literal import PythonLiteral

_END_MARK = "<|python_end|>"
_HEAD_SO_FAR = re.compile(r"\s*(?:[\[,]\s*[\w.-]*(?:\(\s*\w*\s*)?)?\Z")
_KEY, _KEY_SO_FAR = re.compile(r"(\w+)\s*="), re.compile(r"\w*\s*\Z")


class PythonicParser(PlainArgumentsParser):
    """Gives each argument when it is whole."""

    head = re.compile(r"\s*[\[,]\s*([\w.-]+)\(\s*(?=\)|\w+\s*=)")
    next_call, ends = ",", ("]", _END_MARK)
    _literal = PythonLiteral()  # this value

    def _opening(self, final: bool) -> bool:
        begun = self._held[self._at : self._at + MAX_HEAD_CHARS]
        return super()._opening(final or not _HEAD_SO_FAR.match(begun))

    def _key(self, final: bool) -> bool:
        text = self._held = self._held.lstrip(", \t\r\n")
        if key := _KEY.match(text, 0, MAX_HEAD_CHARS):
            self._give_key(key[1])
            self._held = text[key.end() :]
            self._literal = PythonLiteral()
            self._state = self._value_text
            return True
        if (text or not final) and len(text) < MAX_HEAD_CHARS and _KEY_SO_FAR.match(text):
            self._held = "" if final else text  # the last text was cut off here
            return False
        self._give_end()
        self._held = text.removeprefix(")")
        return self._after_arguments(final)

    def _value_text(self, final: bool) -> bool:
        text = self._held
        if (end := self._literal.end(text, final)) is not None:
            self._give(self._literal.json(text[:end].strip(), self._types))
            self._held = text[end:]
            self._state = self._key
            return True
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
