"""Calls as XML elements, with an element for each argument.

    MINIMAX_M2  <minimax:tool_call>\\n<invoke name="f">\\n<parameter name="a">1</parameter>\\n</invoke>\\n…
    DSML        <｜DSML｜function_calls>\\n<｜DSML｜invoke name="f">\\n
                <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\\n…   DeepSeek V3.2
    DSML_V4     the same with <｜DSML｜tool_calls>                                   DeepSeek V4
    MINICPM5    <function name="f"><param name="a">1</param></function>

The first ones have a common parser."""

from __future__ import annotations

import re
from collections.abc import Collection

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.name_first import TaggedParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat

_CDATA, _SECTION_END = "<![CDATA[", re.compile("]]></param>")


def _parser_of(prefix: str, calls: str) -> type[TaggedParser]:
    """Return a parser for elements with a prefix in their names, within an element `calls`."""

    class Parser(TaggedParser):
        head = re.compile(rf'\s*<{prefix}invoke name="' + name_up_to('<>"') + '">')
        key_mark = f"<{prefix}parameter name="
        key = re.compile(rf'<{prefix}parameter name="([^"\n]+)"(?: string="(true|false)")?>')
        value_ends = (f"</{prefix}parameter>",)
        value_end = re.compile(value_ends[0])
        ends = (f"</{prefix}invoke>",)
        next_call, close = f"<{prefix}invoke", f"</{calls}>"
        has_lines = False

    return Parser


class MiniCpm5Parser(TaggedParser):
    """A value may be a CDATA section."""

    head = re.compile(name_up_to('<>"') + r'"\s*>')
    key_mark, key = "<param name=", re.compile(r'<param name="([^"\n]+)">')
    value_ends = ("</param>", "]]></param>")
    value_end = re.compile(r"</param>")
    ends = ("</function>",)
    has_lines = False
    _is_section = False

    def _value_text(self, final: bool) -> bool:
        if self._is_at_start:
            if not final and self._held != _CDATA and _CDATA.startswith(self._held):
                return False
            self._is_section = self._held.startswith(_CDATA)
            self._held, self._is_at_start = self._held.removeprefix(_CDATA), False
        return super()._value_text(final)

    def _up_to(self, end: re.Pattern[str], ends: Collection[str], final: bool) -> tuple[str, bool]:
        return super()._up_to(_SECTION_END if self._is_section else end, ends, final)


def _format_of(prefix: str, calls: str, before: str, to_value: str = '">', to_text: str = "") -> ToolFormat:
    return ToolFormat(
        _parser_of(prefix, calls),
        mark=f"<{calls}>",
        marks=(f"<{calls}>", f"</{calls}>"),
        begin=f'{before}<{calls}>\n<{prefix}invoke name="',
        to_arguments='">\n',
        arguments=ArgumentForm(
            f'<{prefix}parameter name="',
            to_value,
            f"</{prefix}parameter>\n",
            stops=(f"</{prefix}parameter>",),
            to_text=to_text,
        ),
        end=f"</{prefix}invoke>\n",
        again=f'<{prefix}invoke name="',
        close=f"</{calls}>",
        json_form=HERMES,
        ends_reasoning=True,
    )


_TYPED = '" string="false">', '" string="true">'
MINIMAX_M2 = _format_of("", "minimax:tool_call", "")
DSML = _format_of("｜DSML｜", "｜DSML｜function_calls", "\n\n", *_TYPED)
DSML_V4 = _format_of("｜DSML｜", "｜DSML｜tool_calls", "\n\n", *_TYPED)
MINICPM5 = ToolFormat(
    MiniCpm5Parser,
    mark='<function name="',
    marks=("<function", "</function>", "<param", "</param>"),
    begin='<function name="',
    to_arguments='">',
    arguments=ArgumentForm('<param name="', '">', "</param>", stops=("</param>",)),
    end="</function>",
    again='\n<function name="',
    json_form=HERMES,
    ends_reasoning=True,
)
