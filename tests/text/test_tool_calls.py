"""Tool calls in text: which texts are calls, and the same result however the text is cut."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.tool_formats import TOOL_FORMATS
from runtime.text.tool_calls import FORMATS, HERMES, LLAMA3, ForcedCall, ToolCallParser, ToolFormat
from runtime.text.tool_calls.parser import MAX_SPACES
from tests.support.cpu_time import reference_s

NAMES = {"f": {}, "get_weather": {}}

CALL = '{"name": "f", "arguments": {"a": [1, "}<tool_call>\\""]}}'
ARGUMENTS = '{"a": [1, "}<tool_call>\\""]}'


def parser_of(form: ToolFormat, functions: dict | None, *options, **more_options) -> ToolCallParser:
    return form.parser(form, functions, *options, **more_options)


def read(form: ToolFormat, parts: list[str], **options) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of the calls; checks that the pieces are a valid stream."""
    parser = parser_of(form, **{"functions": NAMES, **options})
    content, calls = "", []
    for new_content, pieces in [*map(parser.push, parts), parser.push("", is_last=True)]:
        content += new_content
        for piece in pieces:
            if piece.name:
                assert piece.index == len(calls)
                assert len(piece.id) == 9 if form.has_short_ids else piece.id.startswith("call_")
                assert piece.arguments == ""
                calls.append((piece.name, ""))
            else:
                assert piece.index == len(calls) - 1
                assert piece.arguments
                assert not piece.id
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
        (f"Sure. \n<tool_call>{CALL}</tool_call>\n", "Sure.", [("f", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [("f", ARGUMENTS)] * 2),
        (f"<tool_call>{CALL}<tool_call>{CALL}", "", [("f", ARGUMENTS)] * 2),  # end marks forgotten
        (f"<tool_call>{CALL}</tool_call> There.", "There.", [("f", ARGUMENTS)]),
        # Hermes' own order of keys, and variants of models
        ('<tool_call>\n{ "arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}',
            "",
            [("f", '{"a": "\\ud800"}')],
        ),  # half a character
        ('<tool_call>{"arguments": "\\ud800", "name": "f"}', "", [("f", "?")]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),  # a brace forgotten
        # begun, but not valid or not ended: the arguments as generated
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "", [("f", '{"a": oops}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\', "", [("f", '{"a": "\\')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>', "", [("f", '{"a": [1')]),
        # not calls: returned unchanged
        ("a < b <tool", "a < b <tool", []),
        ("The mark \n<tool_call> is one. ", "The mark \n<tool_call> is one. ", []),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ("<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
        ('<tool_call>{"name": "g", "arguments": {}}', '<tool_call>{"name": "g", "arguments": {}}', []),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ('<tool_call>{"name": ["f"]}', '<tool_call>{"name": ["f"]}', []),
        ('<tool_call>{"name": "f", "arguments": <', '<tool_call>{"name": "f", "arguments": <', []),
        (f'<tool_call>{{"id": <tool_call>{CALL}', '<tool_call>{"id": ', [("f", ARGUMENTS)]),
        ("<tool_call>{" + " " * 1100 + CALL, "<tool_call>{" + " " * 1100 + CALL, []),
        (
            '<tool_call>{"name": ' + "[" * 2000 + "]" * 2000 + "}",
            '<tool_call>{"name": ' + "[" * 2000 + "]" * 2000 + "}",
            [],
        ),
        (CALL, CALL, []),
    ],
)
def test_hermes(text: str, content: str, calls: list):
    assert read(HERMES, [text]) == (content, calls)
    assert read(HERMES, list(text)) == (content, calls)


LLAMA_CALL = '{"name": "f", "parameters": {"a": {}}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (LLAMA_CALL, "", [("f", '{"a": {}}')]),
        (f"\n<|python_tag|>{LLAMA_CALL}", "", [("f", '{"a": {}}')]),
        (f"Let me see. <|python_tag|>{LLAMA_CALL}", "Let me see.", [("f", '{"a": {}}')]),
        (f"{LLAMA_CALL}; {LLAMA_CALL};\n{LLAMA_CALL};", "", [("f", '{"a": {}}')] * 3),
        (f"{LLAMA_CALL}\n{LLAMA_CALL}", "", [("f", '{"a": {}}')] * 2),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {}, "type": "function"}', "", [("f", "{}")]),
        (f"{LLAMA_CALL}; done", "; done", [("f", '{"a": {}}')]),
        # an answer in JSON, code for the interpreter, a call that is not at the beginning
        ('{"answer": {"name": "f", "parameters": {}}}', '{"answer": {"name": "f", "parameters": {}}}', []),
        ('{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (f"Say {LLAMA_CALL}", f"Say {LLAMA_CALL}", []),
        ("{ const x = 1; }", "{ const x = 1; }", []),
        ("", "", []),
    ],
)
def test_llama3(text: str, content: str, calls: list):
    assert read(LLAMA3, [text]) == (content, calls)
    assert read(LLAMA3, list(text)) == (content, calls)


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "_call>",
            "<",
            "<|python_tag|>",
            "<|",
            ";",
            " ",
            "\n",
            "{",
            "}",
            "[",
            "]",
        ),
        *(
            '"',
            '"name"',
            '"f"',
            '"arguments"',
            '"parameters"',
            '"type": "function"',
            ":",
            ",",
            "\\",
            "1",
            "é日",
            "text",
        ),
        *(
            CALL,
            LLAMA_CALL,
            '{"name": "f", "arguments": {',
            '{"name": "',
            '": {"a": "',
            '{"arguments": {}, "name": "f"}',
        ),
        " " * 1100,
    ]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def cut(text: str, at: list[int]) -> list[str]:
    ends = sorted(i % (len(text) + 1) for i in at)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@settings(max_examples=250, deadline=None)
@given(
    form=st.sampled_from([HERMES, LLAMA3]),
    text=TEXTS,
    at=st.lists(st.integers(0, 10_000), max_size=20),
    options=st.sampled_from(
        [
            {},
            {"most": 1},
            {"forced": ForcedCall("f"), "functions": None},
            {"forced": ForcedCall(None), "functions": None},
        ]
    ),
)
def test_any_cut_gives_the_same_result(form: ToolFormat, text: str, at: list[int], options: dict):
    whole = read(form, [text], **options)
    assert read(form, cut(text, at), **options) == whole
    assert read(form, list(text), **options) == whole
    if not whole[1]:  # then the whole text is kept
        assert whole[0] == (form.opening(None) if options.get("forced") == ForcedCall(None) else "") + text


TEXT = st.text(max_size=9)
JSON = st.none() | st.booleans() | st.integers() | TEXT | st.lists(TEXT, max_size=3)
ARGS = st.dictionaries(TEXT, JSON | st.dictionaries(TEXT, JSON, max_size=2), max_size=3)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([form for form in FORMATS.values() if form.again and form.arguments is None]),
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGS, st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_any_calls_are_read_back(form: ToolFormat, calls: list, at: list[int]):
    written = [(name, json.dumps(arguments, ensure_ascii=ascii)) for name, arguments, ascii in calls]
    texts = [f"{name}{form.to_arguments} {arguments}{form.end}" for name, arguments in written]
    text = form.begin + form.again.join(texts) + form.close
    assert read(form, cut(text, at)) == ("", written)


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
def test_arguments_stream_as_they_arrive(form: ToolFormat):
    parser = parser_of(form, NAMES)
    parser.push(form.opening("f"))
    (begin, first) = parser.push(' {"city"')[1]
    assert (begin.name, first.arguments) == ("f", '{"city"')
    assert [p.arguments for p in parser.push(': "Pa')[1]] == [': "Pa']
    assert [p.arguments for p in parser.push('ris"}}')[1]] == ['ris"}']


def test_text_that_cannot_be_a_mark_is_not_held_back():
    parser = parser_of(HERMES, NAMES)
    assert [parser.push(part)[0] for part in ("Hello", " ", "<", "b>", "{", "<tool_", "x")] == [
        *("Hello", "", "", " <b>", "{", "", "<tool_x"),
    ]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (HERMES, ' {"a": 1}}\n</tool_call>', '{"a": 1}'),
        (LLAMA3, '{"a": "}"}}', '{"a": "}"}'),
        (HERMES, ' "a"}</tool_call>', '"a"'),
        (HERMES, " I do not know that.", "I do not know that."),
        (HERMES, "", ""),
    ],
)
def test_a_call_started_in_the_prompt(form: ToolFormat, text: str, arguments: str):
    assert read(form, list(text), forced=ForcedCall("f"), functions=None, most=1) == ("", [("f", arguments)])


def test_a_call_started_in_the_prompt_without_a_name():
    text = 'any", "arguments": {"a": 1}}</tool_call>'
    assert read(HERMES, list(text), forced=ForcedCall(None), functions=None) == ("", [("any", '{"a": 1}')])
    assert read(HERMES, ["any"], forced=ForcedCall(None), functions=None) == ('<tool_call>\n{"name": "any', [])


def test_nothing_is_read_after_the_last_allowed_call():
    parser = parser_of(HERMES, NAMES, most=1)
    parser.push(f"<tool_call>{CALL[:-1]}")
    assert not parser.done
    parser.push("}")
    assert parser.done
    assert parser.push(f"</tool_call><tool_call>{CALL} and more") == ("", [])


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        (HERMES, "Sure."),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}'),
        (HERMES, f"<tool_call>{CALL}"),
        (LLAMA3, ""),
        (LLAMA3, f"{LLAMA_CALL};"),
    ],
)
def test_endless_white_space_takes_linear_time(form: ToolFormat, begin: str):
    parser = parser_of(form, NAMES)
    parser.push(begin)
    started = time.thread_time()
    for _ in range(60_000):
        parser.push("\n")
    assert time.thread_time() - started < 100 * reference_s()


@pytest.mark.parametrize("cut", [lambda text: [text], list])
def test_white_space_around_a_mark_is_bounded(cut):
    spaces = " " * MAX_SPACES
    assert read(HERMES, cut(f"Sure.{spaces}<tool_call>{spaces}{CALL}")) == ("Sure.", [("f", ARGUMENTS)])
    assert read(HERMES, cut(f"Sure. {spaces}<tool_call>{CALL}")) == ("Sure. ", [("f", ARGUMENTS)])
    too_much = f"Sure.<tool_call>{spaces} {CALL}"
    assert read(HERMES, cut(too_much)) == (too_much, [])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("hermes", "<tool_call>", "</tool_call>"), ("llama3_json", "", ""), ("mistral", "[TOOL_CALLS] [", "]")],
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", '"\\ud800", "b": NaN', "1e999", "9" * 5000])
def test_number_without_a_value_in_a_call(name: str, before: str, after: str, number: str):
    """The keys come in another order, so the object is read as a whole. Text that JSON forbids is content."""
    arguments = f'{{"a": {number}}}'
    text = f'{before}{{"arguments": {arguments}, "name": "f"}}{after}'
    expected = (text, []) if "N" in number or "I" in number else ("", [("f", arguments)])
    for parts in ([text], list(text)):
        assert read(FORMATS[name], parts) == expected


@pytest.mark.parametrize("none", ["null", '""', "[]", "0", "false", "{}"])
def test_calls_without_arguments(none: str):
    text = f'<tool_call>{{"arguments": {none}, "name": "f"}}</tool_call>'
    assert read(HERMES, [text]) == ("", [("f", "{}")])


def test_the_settings_list_every_format():
    assert tuple(FORMATS) == TOOL_FORMATS
