"""Reasoning is split off at its marks, the same however the text is cut."""

import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.text.reasoning import THINK, THOUGHT, ReasoningSplitter, marks_of
from runtime.text.tool_calls import FORMATS
from runtime.text.tool_calls.parser import MAX_SPACES
from tests.support.cpu_time import reference_s

OPEN, CLOSE, *_ = THINK


def split(parts: list[str], inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    pieces = [*map(splitter.push, parts), splitter.push("", is_last=True)]
    return "".join(r for r, _ in pieces), "".join(a for _, a in pieces)


def of_whole_text(text: str, inside: bool) -> tuple[str, str]:
    """The expected result of the splitter."""
    if text.lstrip().startswith(OPEN):
        text, inside = text.lstrip().removeprefix(OPEN), True
    if not inside:
        return "", text
    reasoning, _, answer = text.partition(CLOSE)
    return reasoning.strip("\n"), answer.lstrip("\n")


def num_chars_of_reasoning(text: str, inside: bool) -> int:
    """Of the whole text, with its marks."""
    start = text.index(OPEN) + len(OPEN) if text.lstrip().startswith(OPEN) else 0
    if not (start or inside):
        return 0
    at = text.find(CLOSE, start)
    return len(text) if at < 0 else at + len(CLOSE)


def counted(parts: list[str], inside: bool) -> int:
    """The tokens of reasoning, with one token a character."""
    form = MessageFormat(True, inside, False, None, None, None, None, frozenset())
    parser, end, count = MessageParser(form), 0, 0
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        parser.push(part, is_last)
        count += parser.num_reasoning_tokens([end + k + 1 for k in range(len(part))], is_last)
        end += len(part)
    return count


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("Hm.\n\nWell.\n</think>\n\nYes.", True, "Hm.\n\nWell.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),  # opened by the template and by the model
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>Hm. </th", False, "Hm. </th", ""),  # cut off in its midst
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        (" \n<thin", False, "", " \n<thin"),
        ("a</think>b</think><think>", True, "a", "b</think><think>"),
        ("", True, "", ""),
    ],
)
def test_split(text: str, inside: bool, reasoning: str, answer: str):
    assert of_whole_text(text, inside) == (reasoning, answer)
    assert split([text], inside) == (reasoning, answer)
    assert split(list(text), inside) == (reasoning, answer)


PIECES = st.sampled_from([OPEN, CLOSE, "<", "<think", "</think", "</", ">", "\n", "\n\n", " ", "a", "é日"])


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(PIECES, st.booleans()), max_size=12), st.booleans(), st.lists(st.integers(0, 99), max_size=9))
def test_any_cut_gives_the_same_result(pieces: list, inside: bool, at: list[int]):
    text = "".join(piece for piece, _ in pieces)
    ends = sorted(i % (len(text) + 1) for i in at)
    parts = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert split(parts, inside) == split(list(text), inside) == of_whole_text(text, inside)
    assert counted(parts, inside) == counted([text], inside) == num_chars_of_reasoning(text, inside)


def test_text_that_cannot_be_a_mark_is_not_held_back():
    splitter = ReasoningSplitter(False)
    parts = ["<think>", "\nHm", ".", "\n", "So", "<", "b", "</think", ">\n", "\nYes", "."]
    assert [splitter.push(part) for part in parts] == [
        *[("", ""), ("Hm", ""), (".", ""), ("", ""), ("\nSo", ""), ("", ""), ("<b", ""), ("", ""), ("", "")],
        *[("", "Yes"), ("", ".")],
    ]


@pytest.mark.parametrize(
    ("begin", "space"), [("", " "), (OPEN, "\n"), (f"{OPEN}Hm.", "\n"), (f"{OPEN}Hm.{CLOSE}", "\n")]
)
def test_endless_white_space_takes_linear_time(begin: str, space: str):
    splitter = ReasoningSplitter(False)
    splitter.push(begin)
    started = time.thread_time()
    for _ in range(40_000):
        splitter.push(space)
    assert time.thread_time() - started < 100 * reference_s()


def test_white_space_before_the_mark_is_held_back_within_bounds():
    long = " " * (MAX_SPACES + 1)
    for text, pieces in [
        (f"{long}{OPEN}Hm.", ("", f"{long}{OPEN}Hm.")),
        (f"{long[1:]}{OPEN}Hm.", ("Hm.", "")),
    ]:
        assert split([text], False) == split(list(text), False) == pieces
    blank = "\n" * 5000
    for text, pieces in [
        (f"{OPEN}{blank}Hm.{blank}{CLOSE}{blank}Yes.", ("Hm.", "Yes.")),
        (f"{OPEN}Hm.{blank}</th{blank}", (f"Hm.{blank}</th", "")),
    ]:
        assert split([text], False) == split(list(text), False) == pieces


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_template_determines_the_marks(cut):
    """Gemma 4's marks are tokens, and the first one is followed by a word."""
    assert marks_of("{{ '<|channel>thought\\n<channel|>' }}") is THOUGHT
    assert marks_of("<think></think>") is marks_of("") is THINK
    text = "<|channel>thought\nHm.\n<channel|>Yes. <channel|>"
    splitter = ReasoningSplitter(False, THOUGHT)
    pieces = [splitter.push(text[:cut]), splitter.push(text[cut:]), splitter.push("", is_last=True)]
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == ["Hm.", "Yes. "]


CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "</think>"}}\n</tool_call>'
KIMI = '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": 1}'
LFM = "<|tool_call_start|>[now()]<|tool_call_end|>"
FOUR = "<|START_TEXT|>Four.<|END_TEXT|>"
TH = "[TOOL_CALLS]now[ARGS]{}"
IN_REASONING = [
    # format, marks of the template, output; content, reasoning and number of calls
    ("hermes", "</think>", f"I look.\n{CALL}", "", "I look.", 1),
    ("hermes", "</think>", f"{CALL}\n{CALL}\nIt is noon.", "It is noon.", "", 2),
    ("hermes", "</think>", f"<think>I look.\n{CALL}", "", "I look.", 1),
    ("hermes", "</think>", f"Shall I {CALL}? No.</think>Hi.", "Hi.", f"Shall I {CALL}? No.", 0),
    ("hermes", "</think>", f"Shall I {CALL}?\n</think>\n{CALL}", "", f"Shall I {CALL}?", 1),
    ("hermes", "</think>", "I <tool_call> and <tool_call>{}.</think>Hi.", "Hi.", "I <tool_call> and <tool_call>{}.", 0),
    ("hermes", "</think>", f"A <tool_call> first: {CALL}", "", "A <tool_call> first: ", 1),
    ("hermes", "</think>", "A <tool_call>", "", "A <tool_call>", 0),
    ("kimi_k2", "</think>", f"<think>I look.{KIMI}", "", "I look.", 1),
    ("lfm2", "</think>", f"<think>So {LFM} hm", "", f"So {LFM} hm", 0),
    ("mistral_v11", "[/THINK]", f"[THINK]Shall I {TH}?[/THINK]{TH}", "", f"Shall I {TH}?", 1),
    ("mistral_v11", "[/THINK]", f"[THINK]Shall I {TH}?", "", f"Shall I {TH}?", 0),
    ("mistral_v11", "[/THINK]", "[THINK]Two and two.[/THINK]Four.", "Four.", "Two and two.", 0),
    ("seed_oss", "</seed:think>", "<seed:think>Two and two.</seed:think>\nFour.", "Four.", "Two and two.", 0),
    ("gemma4", "<channel|>", "<|channel>thought\n<channel|>Four.<|channel>thought\n<channel|>", "Four.", "", 0),
    ("gemma4", "<channel|>", "<|channel>thought\n<channel|>Four.<channel|>", "Four.", "", 0),
    ("gemma4", "<channel|>", "<|channel><|channel>thought\n<channel|>Four.", "Four.", "", 0),
    ("gemma4", "<channel|>", "Four.<|channel>thought\nSure?<channel|> Yes.", "Four. Yes.", "Sure?", 0),
    ("cohere", "<|END_THINKING|>", f"<|START_THINKING|>Hm.<|END_THINKING|>{FOUR}", "Four.", "Hm.", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "close", "text", "content", "reasoning", "num_calls"), IN_REASONING)
def test_reasoning_ends_where_its_format_says(
    name: str, close: str, text: str, content: str, reasoning: str, num_calls: int
):
    marks = marks_of(close)
    opened = marks is THINK and not text.startswith("<think>")

    def parsed(parts: list[str]) -> tuple[str, str, int]:
        form = MessageFormat(
            True, opened, True, FORMATS[name], {"now": {}}, None, None, frozenset(), reasoning_marks=marks
        )
        parser = MessageParser(form)
        messages = [parser.push(part, i == len(parts)) for i, part in enumerate([*parts, ""])]
        num = sum(bool(call.name) for message in messages for call in message.calls)
        return "".join(m.content for m in messages), "".join(m.reasoning for m in messages), num

    assert parsed([text]) == (content, reasoning, num_calls)
    assert parsed([*text]) == (content, reasoning, num_calls)
    for at in range(1, len(text)):
        assert parsed([text[:at], text[at:]]) == (content, reasoning, num_calls)


PIECES = [CALL, KIMI, "<think>", "</think>", "<tool_call>", "a", "\n", '{"name": "now"']


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([CALL, KIMI, "<think>", "</think>", "<tool_call>", "a", "\n", '{"name": "now"']), max_size=8
    ),
    st.integers(1, 9),
)
def test_no_cut_moves_a_call_in_reasoning(parts: list[str], step: int):
    text = "".join(parts)

    def parsed(pieces: list[str]) -> list[str]:
        splitter = ReasoningSplitter(True, THINK, partial(FORMATS["hermes"].parser, FORMATS["hermes"], {"now": {}}))
        found = [*map(splitter.push, pieces), splitter.push("", is_last=True)]
        return ["".join(each) for each in zip(*found, strict=True)]

    whole = parsed([text])
    assert parsed([text[at : at + step] for at in range(0, len(text), step)]) == whole
    assert parsed([*text]) == whole
