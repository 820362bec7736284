"""Calls of Mistral's models. Their template and tokenizer have the same version.

MISTRAL      [TOOL_CALLS] [{"name": "f", "arguments": {…}}, {…}]        up to v7
MISTRAL_V11  [TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g[CALL_ID]…[ARGS]{…}     from v11 on: Small 3.2, Devstral, Magistral"""

from __future__ import annotations

import re
from dataclasses import replace

from runtime.text.tool_calls.json_lists import list_after
from runtime.text.tool_calls.name_first import NameFirstParser, name_up_to
from runtime.text.tool_calls.parser import ToolFormat

_MARK = "[TOOL_CALLS]"


class MistralV11Parser(NameFirstParser):
    """Each call begins with the mark."""

    head = re.compile(rf"\s*{name_up_to('{[')}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)")


MISTRAL = replace(list_after(_MARK), begin=f'{_MARK} [{{"name": "', has_short_ids=True)
MISTRAL_V11 = ToolFormat(
    MistralV11Parser,
    mark=_MARK,
    marks=(_MARK, "[CALL_ID]", "[ARGS]"),
    begin=_MARK,
    to_arguments="[ARGS]",
    again=_MARK,
    has_short_ids=True,
)
