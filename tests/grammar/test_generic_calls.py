"""Calls of the generic format that a request insists on: what their grammar allows is read back as the same calls."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.output.call_grammar import with_calls
from runtime.output.tools import Tool
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError
from runtime.text.tool_calls import GENERIC, ForcedCall
from tests.grammar.test_structured_walks import SCHEMAS, matchers_of, objects, scalars, walk

NAMES = st.from_regex(r"\A[a-zA-Z0-9_-]{1,64}\Z")
FUNCTIONS = st.dictionaries(NAMES, st.none() | objects(scalars()) | objects(SCHEMAS), min_size=1, max_size=3)


def written(text: str) -> list[tuple[str, Any]]:
    """The calls of a text, read by Python's decoder of JSON, and nothing beside them."""
    calls, begin, end = list[tuple[str, Any]](), "<tool_call>\n", "\n</tool_call>"
    while text:
        assert text.startswith(begin)
        call, at = json.JSONDecoder().raw_decode(text, len(begin))
        assert text.startswith(end, at) or not text[at:].strip()  # the last mark is optional
        assert call.keys() == {"name", "arguments"}
        calls.append((call["name"], call["arguments"]))
        text = text[at + len(end) :].lstrip()
    return calls


def read(text: str, forced: ForcedCall, functions: dict[str, Any], cuts: list[int]) -> list[tuple[str, Any]]:
    """The calls that the parser finds in an answer which comes in pieces."""
    parser, calls = GENERIC.parser(GENERIC, functions, None, forced), list[list[str]]()
    for start, stop in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        content, deltas = parser.push(text[start:stop])
        assert content == ""
        for delta in deltas:
            calls += [[delta.name, ""]] if delta.name else []
            calls[-1][1] += delta.arguments
    assert parser.push("", is_last=True) == ("", [])
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("strict", [None, True])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(FUNCTIONS, st.booleans(), st.integers(0, 1 << 30), st.lists(st.integers(0, 400), max_size=5))
def test_allowed_calls_are_read_back(
    strict: bool | None, functions: dict[str, Any], is_named: bool, seed: int, cuts: list[int]
):
    forced = ForcedCall(next(iter(functions)) if is_named or len(functions) == 1 else None)
    made = [{"name": name, "parameters": schema, "strict": strict} for name, schema in functions.items()]
    tools: list[Any] = [Tool.model_validate({"type": "function", "function": function}) for function in made]
    asked = with_calls(None, tools, GENERIC, forced, None, {}, thinks=False)
    assert asked is not None
    try:
        text = walk(matchers_of(compiled(asked.spec)), seed)
    except GrammarError:  # nothing fits, or options of oneOf overlap
        return
    if text is None:
        return
    calls = read(text, forced, functions, cuts)
    assert calls == written(GENERIC.opening(forced.name) + text)
    assert {name for name, _ in calls} <= ({forced.name} if forced.name else set(functions))
