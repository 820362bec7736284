"""Calls with a name before a JSON object.

    KIMI_K2      <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}
                 <|tool_call_end|><|tool_call_begin|>…<|tool_call_end|><|tool_calls_section_end|>
    FUNCTIONARY  <function=f>{…}</function>                                   Functionary 3.1
    APERTUS      <|tools_prefix|>[{"f": {…}}, {"g": {…}}]<|tools_suffix|>
    GLM4         f\\n{…} at the start                                         GLM 4 (0414)
    RECIPIENTS   f\\n{…}>>>g\\n{…} at the start                              Functionary 3.2

The number of a Kimi call counts the conversation's calls."""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.name_first import NameFirstParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat

_CALLS, _CALL, _ARGUMENTS = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_CALL_END, _CALLS_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"
_TO_READER = re.compile(r"\s*all\n")
_PREFIX, _SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


class KimiParser(NameFirstParser):
    other_marks = (_CALL,)  # the first one is sometimes forgotten
    head = re.compile(
        rf"(?:\s*{re.escape(_CALL)}|(?<={re.escape(_CALL)}))\s*(?:functions\.)?{name_up_to('<:')}(?::\d+)?\s*"
        rf"{re.escape(_ARGUMENTS)}"
    )
    ends = (_CALL_END,)
    next_call, close = _CALL, _CALLS_END


class FunctionaryParser(NameFirstParser):
    head = re.compile(name_up_to("<>") + ">")
    ends = ("</function>",)


class ApertusParser(NameFirstParser):
    head = re.compile(r'\s*[\[,]\s*\{\s*"' + name_up_to('"\\\\') + r'"\s*:\s*(?=\{)')
    ends = ("}", "]", _SUFFIX)
    next_call = ","


class NamedLineParser(NameFirstParser):
    """The name has the first line."""

    head = re.compile(r"\s*([\w-]+)[ \t]*\n\s*(?=\{)")
    head_so_far = re.compile(r"\s*[\w-]*[ \t]*(?:\n\s*)?\Z")


class RecipientParser(NamedLineParser):
    """The name is a recipient: `all` is the reader."""

    def _opening(self, final: bool) -> bool:
        if to_reader := _TO_READER.match(self._held, self._at):
            self._held, self._state = self._held[to_reader.end() :], self._outside
            return True
        return super()._opening(final)


KIMI_K2 = ToolFormat(
    KimiParser,
    mark=_CALLS,
    marks=(_CALLS, _CALL, _ARGUMENTS, _CALL_END, _CALLS_END),
    begin=f"{_CALLS}{_CALL}functions.",
    to_arguments=":0" + _ARGUMENTS,
    end=_CALL_END,
    again=_CALL + "functions.",
    close=_CALLS_END,
    has_named_ids=True,
    ends_reasoning=True,
)
FUNCTIONARY = ToolFormat(
    FunctionaryParser,
    mark="<function=",
    marks=(),
    begin="<function=",
    to_arguments=">",
    end="</function>",
    again="\n<function=",
)
APERTUS = ToolFormat(
    ApertusParser,
    mark=_PREFIX,
    marks=(_PREFIX, _SUFFIX),
    begin=_PREFIX + '[{"',
    to_arguments='":',
    end="}",
    again=', {"',
    close="]" + _SUFFIX,
)
GLM4 = ToolFormat(
    NamedLineParser,
    mark="<|assistant|>",
    marks=("<|assistant|>",),
    bare=r"\s*(%s)\s*\n\s*\{",
    begin="",
    to_arguments="\n",
    again="<|assistant|>",
    has_metadata=True,
    sign=r"在调用上述函数时.*metadata",
)
RECIPIENTS = replace(GLM4, parser=RecipientParser, mark=">>>", marks=(), again=">>>", has_metadata=False, sign="")
