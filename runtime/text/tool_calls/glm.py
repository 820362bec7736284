"""GLM's calls.

GLM45, 4.5 and 4.6: `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`.
GLM47, 4.7 and later: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.
One parser reads both."""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.name_first import TaggedParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat


class GlmParser(TaggedParser):
    head = re.compile(rf"\s*{name_up_to('<>')}\s*(?=<)")
    key_mark, key = "<arg_key>", re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    value_ends = ("</arg_value>",)
    value_end = re.compile(r"</arg_value>")
    ends = ("</tool_call>",)


GLM45 = ToolFormat(
    GlmParser,
    mark="<tool_call>",
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    begin="<tool_call>",
    to_arguments="\n",
    arguments=ArgumentForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", stops=("</arg_value>",)),
    end="</tool_call>",
    again="\n<tool_call>",
    json_form=HERMES,
    ends_reasoning=True,
)
GLM47 = replace(
    GLM45,
    to_arguments="",
    arguments=ArgumentForm("<arg_key>", "</arg_key><arg_value>", "</arg_value>", stops=("</arg_value>",)),
    again="<tool_call>",
)
