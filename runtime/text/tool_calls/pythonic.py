"""Calls as Python.

    PYTHONIC  [f(a=1, b='x'), g()] at the start, or after a mark           Llama 3.2 and 4, Gemma 3
    LFM2      <|tool_call_start|>[f(a=1, b='x'), g()]<|tool_call_end|>
    OLMO3     <function_calls>f(a=1)\\ng()</function_calls>

Each argument is returned when it is complete."""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import LLAMA3
from runtime.text.tool_calls.name_first import PlainArgumentsParser
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolFormat
from runtime.text.tool_calls.python_literal import PythonLiteral

_END_MARK, _LFM_END = "<|python_end|>", "<|tool_call_end|>"
_KEY, _KEY_SO_FAR = re.compile(r"(\w+)\s*="), re.compile(r"\w*\s*\Z")


class PythonicParser(PlainArgumentsParser):
    """Gives each argument when it is whole."""

    head = re.compile(r"\s*[\[,]\s*([\w.-]+)\(\s*(?=\)|\w+\s*=)")
    head_so_far = re.compile(r"\s*(?:[\[,]\s*[\w.-]*(?:\(\s*\w*\s*)?)?\Z")
    next_call, ends = ",", ("]", _END_MARK, _LFM_END)
    _literal = PythonLiteral()  # this value

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


class Olmo3Parser(PythonicParser):
    """Each call has a line of its own."""

    head = re.compile(r"\s*([\w.-]+)\(\s*(?=\)|\w+\s*=)")
    head_so_far = re.compile(r"\s*[\w.-]*(?:\(\s*\w*\s*)?\Z")

    def _after_call(self, final: bool) -> bool:
        if self._skips("</function_calls>", final):
            return self._after_calls(final)
        if not self._held or (not final and "</function_calls>".startswith(self._held)):
            return False
        self._at, self._state = 0, self._opening
        return True


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
LFM2 = replace(
    PYTHONIC,
    mark="<|tool_call_start|>",
    marks=("<|tool_call_start|>", _LFM_END),
    bare="",
    begin="<|tool_call_start|>[",
    close="]" + _LFM_END,
    sign=r"<\|tool_list_start\|>|List of tools: \[",
)
OLMO3 = replace(
    PYTHONIC,
    parser=Olmo3Parser,
    mark="<function_calls>",
    marks=("<function_calls>", "</function_calls>"),
    bare="",
    begin="<function_calls>",
    again="\n",
    close="</function_calls>",
    sign="<functions>.*<function_calls>",
)
