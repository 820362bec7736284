"""Calls with a tag for each argument.

    QWEN3_CODER  <tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
    SEED_OSS     <seed:tool_call>\\n<function=f>\\n<parameter=a>1</parameter>\\n</function>\\n</seed:tool_call>

Values of Seed-OSS stand between their tags without line ends."""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.name_first import TaggedParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat


class Qwen3CoderParser(TaggedParser):
    other_marks = ("<function=",)  # the first one is often forgotten
    head = re.compile(rf"(?:\s*<function=|(?<=<function=))\s*{name_up_to('<>')}>")
    key_mark, key = "<parameter=", re.compile(r"<parameter=([^>\n]+)>")
    # A value has its own lines. Its end mark may be forgotten.
    value_ends = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
    value_end = re.compile(r"\n?</parameter>|(?=\n<parameter=)|(?=\n</function>)")
    ends = ("</function>", "</tool_call>")


class SeedOssParser(TaggedParser):
    head = re.compile(rf"\s*<function={name_up_to('<>')}>")
    key_mark, key = Qwen3CoderParser.key_mark, Qwen3CoderParser.key
    value_ends = ("</parameter>", "\n</function>")
    value_end = re.compile(r"</parameter>|(?=\n</function>)")
    ends = ("</function>", "</seed:tool_call>")
    has_lines = False


QWEN3_CODER = ToolFormat(
    Qwen3CoderParser,
    mark="<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    begin="<tool_call>\n<function=",
    to_arguments=">\n",
    arguments=ArgumentForm(
        "<parameter=", ">\n", "\n</parameter>\n", stops=("</parameter>", "\n<parameter=", "\n</function>")
    ),
    end="</function>\n</tool_call>",
    again="\n<tool_call>\n<function=",
    json_form=HERMES,
    ends_reasoning=True,
)
SEED_OSS = replace(
    QWEN3_CODER,
    parser=SeedOssParser,
    mark="<seed:tool_call>",
    marks=("<seed:tool_call>", "</seed:tool_call>"),
    begin="<seed:tool_call>\n<function=",
    arguments=ArgumentForm("<parameter=", ">", "</parameter>\n", stops=("</parameter>", "\n</function>")),
    end="</function>\n</seed:tool_call>",
    again="\n<seed:tool_call>\n<function=",
)
