"""Calls of DeepSeek's models. Their marks have fullwidth bars, and U+2581 for spaces.

DEEPSEEK_V3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```
              <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>        (V3, R1)
DEEPSEEK_V31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
              <｜tool▁call▁begin｜>…<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""

from __future__ import annotations

import re
from typing import ClassVar

from runtime.text.tool_calls.name_first import NameFirstParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat

_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_MARKS = (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END)


class DeepSeekV31Parser(NameFirstParser):
    head = re.compile(rf"\s*{_CALL}{name_up_to('<')}{_SEP}")
    ends: ClassVar[tuple[str, ...]] = (_CALL_END,)
    next_call, close = _CALL, _CALLS_END


class DeepSeekV3Parser(DeepSeekV31Parser):
    head = re.compile(rf"\s*{_CALL}[a-z]*{_SEP}{name_up_to('<{`')}\s*(?:```(?:json)?\s*)?(?=[{{<])")
    ends = ("```", _CALL_END)


_INSTRUCTIONS = f"""\
## Tools

You may call these functions, each a JSON object with the schema of its arguments:

%s

Write a call in exactly this form, with the arguments as JSON that fits the schema:
{_CALLS}{_CALL}name{_SEP}arguments{_CALL_END}{_CALLS_END}

Several calls follow each other without spaces:
{_CALLS}{_CALL}name{_SEP}arguments{_CALL_END}{_CALL}name{_SEP}arguments{_CALL_END}{_CALLS_END}"""
DEEPSEEK_V31 = ToolFormat(
    DeepSeekV31Parser,
    mark=_CALLS,
    marks=_MARKS,
    begin=_CALLS + _CALL,
    to_arguments=_SEP,
    end=_CALL_END,
    again=_CALL,
    close=_CALLS_END,
    instructions=_INSTRUCTIONS,
)
DEEPSEEK_V3 = ToolFormat(
    DeepSeekV3Parser,
    mark=_CALLS,
    marks=_MARKS,
    begin=f"{_CALLS}{_CALL}function{_SEP}",
    to_arguments="\n```json\n",
    end="\n```" + _CALL_END,
    again=f"\n{_CALL}function{_SEP}",
    close=_CALLS_END,
)
