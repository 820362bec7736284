"""Calls as JSON objects in a list, or after their own mark.

    GRANITE     <|tool_call|>[{"name": "f", "arguments": {…}}, …]           Granite 3
    PHI4        <|tool_call|>[…]<|/tool_call|>                              Phi-4-mini
    TOOL_CALLS  <tool_calls>[…]</tool_calls>                                Apriel, Hunyuan
    NEMOTRON    <TOOLCALL>[…]</TOOLCALL>                                    Nemotron Nano 2
    COHERE      <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]<|END_ACTION|>
    XLAM        […] at the start                                            xLAM 2
    MINIMAX_M1  <tool_calls>\\n{…}\\n{…}\\n</tool_calls>
    GIGACHAT    <|message_sep|>\\n\\nfunction call<|role_sep|>\\n{…}         GigaChat 3
    GIGACHAT31  <|function_call|>{…}                                        GigaChat 3.1

One parser reads all of them."""

from __future__ import annotations

from dataclasses import replace

from runtime.text.tool_calls.json_objects import JsonObjectParser
from runtime.text.tool_calls.parser import ToolFormat

_BEGIN = '{"name": "'


def list_after(mark: str, end: str = "", sign: str = "") -> ToolFormat:
    """Return the format of a list between two marks."""
    return ToolFormat(
        JsonObjectParser,
        mark=mark,
        marks=(mark, end) if end else (mark,),
        begin=f"{mark}[{_BEGIN}",
        to_arguments='", "arguments":',
        end="}",
        again=", " + _BEGIN,
        close="]" + end,
        separator=",",
        sign=sign,
    )


GRANITE = list_after("<|tool_call|>", sign=r"available_tools.*<\|tool_call\|>")
PHI4 = list_after("<|tool_call|>", "<|/tool_call|>", sign=r"<\|tool\|>.*<\|/tool\|>")
TOOL_CALLS = list_after("<tool_calls>", "</tool_calls>")
NEMOTRON = list_after("<TOOLCALL>", "</TOOLCALL>")
_ACTION = '{"tool_call_id": "0", "tool_name": "'
COHERE = replace(
    list_after("<|START_ACTION|>", "<|END_ACTION|>"),
    begin=f"<|START_ACTION|>[\n    {_ACTION}",
    to_arguments='", "parameters":',
    again=f",\n    {_ACTION}",
    close="\n]<|END_ACTION|>",
)
XLAM = replace(list_after(""), mark="<tool_call>", marks=(), bare=r'\s*\[\s*\{\s*"(type|id|name|arguments|parameters)"')
MINIMAX_M1 = replace(
    TOOL_CALLS, begin="<tool_calls>\n" + _BEGIN, again="\n" + _BEGIN, close="\n</tool_calls>", separator="\n"
)
GIGACHAT31 = replace(
    list_after("<|function_call|>"), begin="<|function_call|>" + _BEGIN, again="", close="", separator=""
)
GIGACHAT = replace(
    GIGACHAT31,
    mark="<|message_sep|>\n\nfunction call<|role_sep|>",
    marks=("<|message_sep|>", "<|role_sep|>"),
    begin="<|message_sep|>\n\nfunction call<|role_sep|>\n" + _BEGIN,
)
