"""Calls of strict functions where the model may choose to call: no text that their grammar allows has another call."""

import json
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import Grammar
from runtime.output.call_grammar import with_calls
from runtime.output.tools import Tool
from runtime.structured.grammar import compiled
from runtime.text.tool_calls import FORMATS, ForcedCall
from tests.support.structured.cases import fits

A_CALL = {  # in pieces, and other pieces
    "qwen3_coder": (
        [
            "<tool_call>",
            "\n",
            "<function=",
            "add>\n",
            "<parameter=a>\n",
            "1",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
        ],
        ["x", "mul>\n", "<parameter=b>\n", "</function>", " ", "</tool_call>"],
    ),
    "glm45": (
        ["<tool_call>", "add\n", "<arg_key>a</arg_key>\n", "<arg_value>", "1", "</arg_value>\n", "</tool_call>"],
        ["x", "mul\n", "add", "<arg_key>b</arg_key>\n", "\n", " "],
    ),
    "glm47": (
        ["<tool_call>", "add", "<arg_key>a</arg_key>", "<arg_value>", "1", "</arg_value>", "</tool_call>"],
        ["x", "mul", "add\n", "<arg_key>b</arg_key>", "\n", " "],
    ),
    "pythonic": (
        ["[", "add(", "a=", "1", ")", "]"],
        ["x", "'x'", "<|python_start|>", "mul(", "add (", "b=", ", ", " ", "\n"],
    ),
    "gemma4": (
        ["<|tool_call>", "call:", "add", "{", "a:", "1", "}", "<tool_call|>"],
        ["x", '<|"|>', "call:mul", "b:", ",", " ", "\n", "{"],
    ),
    "llama3_json": (
        ["{", '"name": "', "add", '", "parameters":', '{"a": ', "1", "}", "}"],
        ['"x"', '"parameters": {"a": "x"}, ', "mul", "<|python_tag|>", '{"b": ', "; ", "[", " ", "\n"],
    ),
}
_ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@cache
def grammar_where_it_may_choose(name: str) -> Grammar:
    tool = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": _ONE, "strict": True}})
    asked = with_calls(None, [tool], FORMATS[name], None, None, {}, thinks=False)
    assert asked is not None
    return compiled(asked.spec)


@pytest.mark.parametrize("name", A_CALL)
@settings(max_examples=80)
@given(st.data())
def test_no_text_has_a_call_that_is_not_strict(name: str, data: st.DataObject):
    right, wrong = A_CALL[name]
    pieces, others = right * data.draw(st.integers(1, 2)), st.sampled_from(["", *right, *wrong])
    for at, is_new, piece in data.draw(
        st.lists(st.tuples(st.integers(0, len(pieces)), st.booleans(), others), max_size=2)
    ):
        pieces[at : at + (not is_new)] = [piece]
    text = "".join(pieces)
    if not fits(grammar_where_it_may_choose(name), text):
        return
    form = FORMATS[name]
    _, deltas = form.parser(form, {"add": _ONE}).push(text, is_last=True)
    calls = defaultdict(str)
    for delta in deltas:
        calls[delta.index] += delta.arguments
    for arguments in calls.values():
        assert isinstance(json.loads(arguments).pop("a"), int)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4", "pythonic", "hermes"])
def test_a_boolean_may_be_either(name: str, value: bool):
    of = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}
    schema = {**of, "properties": {"a": of, "c": {"type": "array", "items": of["properties"]["b"]}, **of["properties"]}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}})
    form = FORMATS[name]
    asked = with_calls(None, [tool], form, ForcedCall("f"), None, {}, thinks=False)
    assert asked is not None
    written = json.dumps(value)
    values = {"a": f'{{"b": {written}}}', "c": f"[{written}]", "b": written}
    if name == "gemma4":
        values = {"a": f"{{b:{written}}}", "b": written, "c": f"[{written}]"}
    if (args := form.arguments) is None:
        text = "{" + ", ".join(f'"{key}": {each}' for key, each in values.items()) + "}"
    else:
        text = args.separator.join(f"{args.begin}{key}{args.to_value}{each}{args.end}" for key, each in values.items())
    assert fits(compiled(asked.spec), text + form.end + form.close)
