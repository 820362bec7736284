"""Reasoning is split off at its marks, the same however the text is cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.output.message_parser import MessageFormat, MessageParser
from runtime.text.reasoning import THINK, THOUGHT, ReasoningSplitter, marks_of
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
