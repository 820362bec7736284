"""Calls that a model writes as JSON without the marks of its format."""

import json
import random

import pytest

from runtime.text.tool_calls import FORMATS
from runtime.text.tool_calls.argument_check import fits
from runtime.text.tool_calls.plain_calls import PlainCalls

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"add": ADD, "get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
A, W = '{"name": "add", "arguments": {"a": 5, "b": 3}}', '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
CALL_A, CALL_W = ("add", {"a": 5, "b": 3}), ("get_weather", {"city": "Zürich"})
UNKNOWN, UNFIT = '{"name": "other", "arguments": {}}', '{"name": "add", "arguments": {"a": "5", "b": 3}}'


def parser_of(name="hermes", most=None):
    parser = FORMATS[name].parser(FORMATS[name], FUNCTIONS, most)
    parser.content = PlainCalls(FUNCTIONS, parser.call)
    return parser


def read(text, seed, name="hermes", most=None):
    """Return the content and the calls of a text; a seed other than 0 cuts it into random pieces."""
    parser, cuts = parser_of(name, most), random.Random(seed)
    content, calls = "", []
    while True:
        num = cuts.randint(1, 7) if seed else len(text)
        new, pieces = parser.push(text[:num], num >= len(text))
        content += new
        for piece in pieces:
            if piece.name:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
        if num >= len(text):
            return content, [(called, json.loads(arguments)) for called, arguments in calls]
        text = text[num:]


CALLS = [
    (A, "", [CALL_A]),
    (f"```json\n{W}\n```", "", [CALL_W]),
    (f"```\n{W}\n```\n", "", [CALL_W]),
    (f"~~~JSON\n\n  {W}\n\n~~~  ", "", [CALL_W]),
    (f"```json\n{W}\n{A}\n```", "", [CALL_W, CALL_A]),
    (f"```json\n[\n  {W},\n  {A}\n]\n```", "", [CALL_W, CALL_A]),
    (f"[{W}, {A}]", "", [CALL_W, CALL_A]),
    (f"{W}\n{A}", "", [CALL_W, CALL_A]),
    (f"{W}, {A}; {A}", "", [CALL_W, CALL_A, CALL_A]),
    (f"```json\n{W}\n```\n\n```json\n{A}\n```", "", [CALL_W, CALL_A]),
    (f"I look.\n\n```json\n{W}\n```\n\nDone.\n", "I look.\n\nDone.\n", [CALL_W]),
    (f"I look.\n{W}\n", "I look.", [CALL_W]),
    (f"```json\n{W}", "", [CALL_W]),  # the end of the output closes the block
    (f"```python\nprint(1)\n```\n{A}", "```python\nprint(1)\n```", [CALL_A]),
    (f"```json\n{UNKNOWN}\n```\n\n{A}", f"```json\n{UNKNOWN}\n```", [CALL_A]),
    (json.dumps(json.loads(A), indent=2), "", [CALL_A]),
    ('{"function": ' + A + "}", "", [CALL_A]),
    ('{"type": "function", "function": ' + A + ', "id": "x"}', "", [CALL_A]),
    ('{"tool_calls": [' + A + "," + W + "]}", "", [CALL_A, CALL_W]),
    ('{"function": "add", "parameters": {"a": 5, "b": 3}}', "", [CALL_A]),
    ('{"arguments": {"a": 5, "b": 3}, "name": "add"}', "", [CALL_A]),
    ('{"name": "add", "arguments": "{\\"a\\": 5, \\"b\\": 3}"}', "", [CALL_A]),
    ('{"name": "now", "arguments": null}', "", [("now", {})]),
    ('{"name": "now", "arguments": ""}', "", [("now", {})]),
    (f"<tool_call>\n{A}\n</tool_call>\n```json\n{W}\n```", "", [CALL_A, CALL_W]),
    (f"```json\n{W}\n```\n<tool_call>\n{A}\n</tool_call>", "", [CALL_W, CALL_A]),
]
TEXTS = [
    f"Call it by {A} then.",
    f"{A} adds.",
    f"Use `{A}`.",
    f"> {A}",
    f"- {A}",
    f"    {A}",
    f"```json\n{UNKNOWN}\n```",
    f"```json\n{UNFIT}\n```",
    f"```json\n{A}\n{UNKNOWN}\n```",
    f"```json\n{A}\nThis adds.\n```",
    f"```json\nFor example:\n{A}\n```",
    f"```python\n{A}\n```",
    f"```python\nx = 1\n{A}\n```\n",
    f"````markdown\n```json\n{A}\n```\n````\n",
    f"[\n  {A},\n  {UNKNOWN}\n]",
    f'{{"calls": [\n{A}\n]}}',
    f"{UNKNOWN}\n{A}",
    f"```{A}```",
    '{"name": "add", "description": "Adds.", "parameters": {"a": 5, "b": 3}}',
    '{"name": "add", "arguments": {"a": 5, "b": 3}, "result": 8}',
    '{"name": "add"}',
    '{"name": "add", "arguments": {"a": NaN, "b": 3}}',
    '{"name": "add", "arguments": "{\\"a\\": NaN, \\"b\\": 3}"}',
    '{"name": "add", "arguments": "5"}',
    '{"name": "get_weather", "arguments": {"city": "Bern", "day": 1}}',
    '{"name": "add", "arguments": {"a": 5, "b": 3}',
    '{"name": "add", "arguments": [5, 3]}',
    '{"name": ["add"], "arguments": {"a": 5, "b": 3}}',
    "{}",
    "[]",
    "[link](x)\n- [ ] todo\n\n``\n`````\n",
    "\n\n a\n\n\n",
    "",
    " \n",
]


@pytest.mark.parametrize(("text", "content", "calls"), CALLS, ids=[repr(case[0][:50]) for case in CALLS])
def test_plain_calls_are_calls(text, content, calls):
    for seed in range(20):
        assert read(text, seed) == (content, calls), seed


@pytest.mark.parametrize("text", TEXTS, ids=[repr(text[:50]) for text in TEXTS])
def test_quoted_json_stays_text(text):
    for seed in range(20):
        assert read(text, seed) == (text, []), seed


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"harmony"}))
def test_every_format_reads_plain_calls(name):
    for seed in range(6):
        assert read(f"Well:\n```json\n{W}\n```\nOk", seed, name) == ("Well:\nOk", [CALL_W])


def test_the_last_allowed_call_ends_the_text():
    for seed in range(6):
        assert read(f"```json\n[{W}, {A}]\n```\nmore", seed, most=1) == ("", [CALL_W])


@pytest.mark.parametrize(
    "text", ['{"name": "Par', '{"x', "```p", '```json\n{"ci', "[1", "[x", "Hello", "a\nb {", "a\n\n"]
)
def test_text_that_cannot_be_a_call_is_not_held(text):
    parser = parser_of()
    assert "".join(parser.push(char)[0] for char in text) == text.rstrip("\n")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"type": "integer", "minimum": 1, "maximum": 3}, [1, 3, 2.0], [0, 4, 1.5, True]),
        ({"type": "number"}, [1, 1.5], [True, "1"]),
        ({"enum": [1, "a", [1]]}, [1, "a", [1]], [True, "b", []]),
        ({"const": {"a": 1}}, [{"a": 1}], [{}]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [1.5]),
        ({"allOf": [{"minLength": 2}, {"maxLength": 3}]}, ["ab", "abc", 1], ["a", "abcd"]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3], ["a"]]),
        ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[1, "a"], [1]], [["a"], [1, 1]]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["b"]}, [{"b": 1, "a": {"b": 1}}], [{"b": 1, "a": {}}]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "b"}]),
        (True, [1], []),
        (False, [], [1]),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_arguments_are_checked_against_their_schema(schema, good, bad):
    assert all(fits(value, schema) for value in good)
    assert not any(fits(value, schema) for value in bad)


def test_a_hostile_schema_takes_bounded_time():
    schema = {"$ref": "#/$defs/0", "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(60)}}
    schema["$defs"]["60"] = False
    assert not fits(1, schema)
    assert not fits(1, {"$ref": "#"})
