"""White space behind a mark or a JSON value: the output may end after it, and may go on."""

import json
import random
import re

import pytest

from runtime.base.types import GrammarSpec
from runtime.output.call_grammar import with_calls
from runtime.output.channel_grammar import channel_grammar
from runtime.output.fields import read_options
from runtime.output.options import ChatOptions
from runtime.output.response_format import RequestedGrammar
from runtime.output.tools import Tool
from runtime.structured.grammar import compiled
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.tool_calls import FORMATS, ForcedCall, ToolCallParser
from runtime.text.tool_calls.harmony import CHANNEL_MARKS, HARMONY
from runtime.text.vocabulary import BYTES, SPECIAL_BYTES
from tests.support.structured.cases import fits

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}})
    for name in ("add", "mul")
]
SPACES = ["", "\n", "\n\n", " ", "\r\n", "\t", " \n \n", "\n" * 8]
_ENGINE = LazyEngine(SPECIAL_BYTES)
AS_TEXT = sorted(FORMATS.keys() - {"harmony"})


def arguments_of(form, values):
    if form.arguments is None:
        return json.dumps(values)
    of = form.arguments
    written = [f"{of.begin}{name}{of.to_value}{value}{of.end}" for name, value in values.items()]
    return of.separator.join(written)


def may_end(form):
    """Whether the output may end behind a call, or a white space there begins another."""
    return not form.close or form.again[:1].isspace()


def call_of(form, name, values, space):
    return f"{name}{form.to_arguments}{arguments_of(form, values)}{form.end}{space if may_end(form) else ''}"


def read(form, forced, text, seed):
    """Return the content and the calls of a text that comes in random pieces."""
    parser: ToolCallParser = form.parser(form, {tool.function.name: PARAMETERS for tool in TOOLS}, None, forced)
    cuts = random.Random(seed)
    content, calls = "", []
    while text:
        num = cuts.randint(1, 8) if seed else len(text)
        new, pieces = parser.push(text[:num], num >= len(text))
        content, text = content + new, text[num:]
        for piece in pieces:
            if piece.name:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("name", AS_TEXT)
def test_a_required_call_ends_or_goes_on_after_any_space(name, named, space):
    form, forced = FORMATS[name], ForcedCall("add" if named else None)
    grammar = compiled(with_calls(None, TOOLS, form, forced, None, {}, thinks=False).spec)
    values = {"a": 12, "b": 3}
    one = call_of(form, "add", values, space)
    one = one.removeprefix(form.opening("add")[len(form.opening(None)) :]) if named else one
    second = "add" if named else "mul"
    close = form.close + (space if form.close else "")
    texts = [(one + close, [("add", values)])]
    if form.again:
        two = one + form.again.lstrip() + call_of(form, second, {"a": 4}, space)
        texts.append((two + close, [("add", values), (second, {"a": 4})]))
    for text, calls in texts:
        assert fits(grammar, text), text
        for seed in range(6):
            assert read(form, forced, text, seed) == ("", calls), (text, seed)


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("name", ["hermes", "generic", "mistral", "mistral_v11", "deepseek_v3", "llama3_json"])
def test_a_strict_call_of_choice_ends_after_any_space(name, space):
    form = FORMATS[name]
    asked = with_calls(None, TOOLS, form, None, None, {}, thinks=False)
    text = form.begin + call_of(form, "add", {"a": 1}, space) + form.close + (space if form.close else "")
    assert fits(compiled(asked.spec), text)
    assert read(form, None, text, 1) == ("", [("add", {"a": 1})])


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_json_ends_after_any_space(space):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    of = GrammarSpec("json", json.dumps(schema))
    assert fits(compiled(of), '{"a": 1}' + space)
    assert fits(compiled(GrammarSpec("json", '{"type": "array"}')), "[1, 2]" + space)
    either = GrammarSpec("json", '{"anyOf": [{"type": "integer"}, {"const": {"a": [1]}}]}')
    assert fits(compiled(either), '{"a": [1]}' + space)
    assert not fits(compiled(of), f'{{"a": 1}}{space}x')
    after = GrammarSpec("json", of.text, after="</think>")
    assert fits(compiled(after), f'Hm.</think>{space}{{"a": 1}}{space}')
    beside = with_calls(RequestedGrammar(of, "response_format"), TOOLS, FORMATS["hermes"], None, None, {}, thinks=False)
    assert fits(compiled(beside.spec), '{"a": 1}' + space)
    assert fits(compiled(beside.spec), "<tool_call>\n" + '{"name": "add", "arguments": {"a": 1}}\n</tool_call>' + space)


@pytest.mark.parametrize(
    ("kind", "of", "text"),
    [("regex", "a+", "aa"), ("choice", '["a", "b"]', "b"), ("json", '{"enum": [7, "x"]}', "7")],
)
def test_texts_without_brackets_end_exactly(kind, of, text):
    grammar = compiled(GrammarSpec(kind, of))
    assert fits(grammar, text)
    assert not fits(grammar, text + "\n")


A_TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": "</a>",
}


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("separator", ["\n", "\n\n", ", ", "", "\n---\n"], ids=repr)
def test_tags_end_or_go_on_after_any_space(separator, space):
    form = {"type": "tags_with_separator", "tags": [A_TAG], "separator": separator, "at_least_one": True}
    grammar = compiled(GrammarSpec("tags", json.dumps(form)))
    one = f"<a>1{space}</a>{space}"  # behind the JSON value, and behind the tag
    assert fits(grammar, one)
    assert fits(grammar, one + separator + one)
    inner = {"type": "tag", "begin": "<b>", "content": form, "end": "\n</b>"}
    assert fits(compiled(GrammarSpec("tags", json.dumps(inner))), f"<b>{one}{separator}{one}\n</b>")
    last = {"type": "sequence", "elements": [{"type": "const_string", "value": "\n"}, A_TAG["content"]]}
    assert fits(compiled(GrammarSpec("tags", json.dumps(last))), f"\n12{space}")
    first = {"type": "sequence", "elements": [A_TAG["content"], {"type": "const_string", "value": "\n-"}]}
    assert fits(compiled(GrammarSpec("tags", json.dumps(first))), "12\n-")


@pytest.mark.parametrize("end", ["\n</a>", " </a>", "</a>"], ids=repr)
def test_the_end_of_a_tag_stays_as_it_is(end):
    grammar = compiled(GrammarSpec("tags", json.dumps({**A_TAG, "end": end})))
    assert fits(grammar, f"<a>1{end}")
    assert fits(grammar, f"<a>1\n\n{end}")
    assert fits(grammar, "<a>1</a>") == (end == "</a>")


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_message_in_a_channel_ends_after_any_space(space):
    marks = {mark: len(BYTES.tokens) + i for i, mark in enumerate(CHANNEL_MARKS)}
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    sent = {"tools": [tool.model_dump(exclude_none=True) for tool in TOOLS], "response_format": answer}
    options = read_options(ChatOptions, sent)
    grammar = compiled(channel_grammar(options, marks, "header", False, None).spec)
    call = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>" + '{"a": 1}' + space
    final = "<|channel|>final<|message|>" + '{"a": 1}' + space
    for text in (f"{call}<|call|>", f"{call}<|end|><|start|>assistant{call}<|call|>", f"{final}<|return|>"):
        matcher = _ENGINE.matcher(grammar.lark)
        for piece in re.split("(" + "|".join(map(re.escape, CHANNEL_MARKS)) + ")", text):
            matcher.advance([marks[piece]] if piece in marks else list(piece.encode()))
        assert matcher.is_accepting
        parser = HARMONY.parser(HARMONY, {"add": PARAMETERS})
        parser.needs_header = True
        content, calls = parser.push(text, True)
        assert (content.strip(), "".join(call.arguments for call in calls)) in (
            ("", '{"a": 1}'),
            ("", '{"a": 1}' * 2),
            ('{"a": 1}', ""),
        )
