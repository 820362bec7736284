"""Reasoning in a model's text: the part in `<think>…</think>` before the answer, separated as it is written.

Some families have other marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from runtime.text.tool_calls.parser import MAX_SPACES, ToolCallParser, tail_that_may_begin


class Marks(NamedTuple):
    """The texts around reasoning."""

    open: str
    close: str
    open_token: str  # the part of `open` that may be a special token
    strays: tuple[str, ...] = ()  # marks that are not for the reader; the opening one begins reasoning anywhere


THINK = Marks("<think>", "</think>", "<think>")
THOUGHT = Marks("<|channel>thought", "<channel|>", "<|channel>", ("<channel|>", "<|channel>"))  # Gemma 4
_PARTS = tuple(f"<|{place}_{part}|>" for part in ("RESPONSE", "TEXT") for place in ("START", "END"))
_FAMILIES = (
    THOUGHT,
    Marks("[THINK]", "[/THINK]", "[THINK]"),  # Magistral, Ministral
    Marks("<seed:think>", "</seed:think>", "<seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>", "<|START_THINKING|>", _PARTS),  # Cohere
    Marks("<|inner_prefix|>", "<|inner_suffix|>", "<|inner_prefix|>"),  # Apertus
    Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ""),  # Apriel
    THINK,
)
TOKENS = frozenset(token for marks in _FAMILIES for token in (marks.open_token, marks.close) if token)


def marks_of(template: str) -> Marks:
    """Return the marks of a chat template."""
    return next((marks for marks in _FAMILIES if marks.close in template), THINK)


class ReasoningSplitter:
    """Splits one output into reasoning and answer. The joined results do not depend on how the input is cut.

    A text has reasoning if it begins with its mark, or if the prompt ended with it (`inside`). Reasoning without a
    closing mark extends to the end, or to a call. Line ends next to the marks belong to them, as in the models'
    templates."""

    def __init__(
        self, inside: bool, marks: Marks = THINK, new_parser: Callable[[], ToolCallParser] | None = None
    ) -> None:
        """Args:
        new_parser: makes a parser of calls that end reasoning; None if they do not."""
        self._inside, self._marks = inside, marks
        self._new_parser = new_parser
        self._ends = (marks.close, *(new_parser().all_marks if new_parser is not None else ()))
        self._parser: ToolCallParser | None = None  # parser for the call that may begin at `_from`
        self._num_parsed = 0  # characters that this parser has received
        self._num_begun = 0  # calls that it has read, ended or not
        self._from = 0  # the place in `_held` from which a mark may begin
        self._is_undecided = True  # the text may still begin with the opening mark
        self._at_start = True  # the current part loses its leading line ends
        self._num_line_ends = 0  # held line ends after reasoning: they belong to the mark if it follows
        self._held = ""  # text after them that may begin a mark
        self._num_chars = 0  # length of the text so far
        self._end = 0  # where closed reasoning ends in the text

    @property
    def is_open(self) -> bool:
        """True while more of the text may be reasoning."""
        return self._is_undecided or self._inside

    @property
    def num_reasoning_chars(self) -> int:
        """The characters of the text so far that are certainly reasoning, including marks."""
        if self._is_undecided:
            return 0
        return self._num_chars if self._inside else self._end

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return the (reasoning, answer) that are now safe to send. The last text releases incomplete marks."""
        if not (self.is_open or self._at_start or self._marks.strays):
            return "", text
        self._num_chars += len(text)
        self._held += text
        if self._is_undecided:
            begun = self._held.lstrip()
            num_spaces = len(self._held) - len(begun)
            if (
                num_spaces <= MAX_SPACES
                and self._marks.open.startswith(begun)
                and begun != self._marks.open
                and not is_last
            ):
                return "", ""
            self._decide(begun if num_spaces <= MAX_SPACES else "")
        reasoning = answer = ""
        while True:
            if self._inside:
                reasoning += self._reasoning(is_last)
            if self._inside:
                return reasoning, answer
            answer += self._answer(is_last)
            if not self._inside:
                return reasoning, answer

    def _decide(self, begun: str) -> None:
        self._is_undecided = False
        if begun.startswith(self._marks.open):
            self._inside, self._held = True, begun.removeprefix(self._marks.open)
        elif not self._inside:
            self._at_start = False  # line ends remain, since no mark follows

    def _reasoning(self, is_last: bool) -> str:
        end, mark = self._end_of_reasoning(is_last)
        written, self._held = self._held[:end], self._held[end:]
        self._from = max(0, self._from - end)
        if self._at_start:
            written = written.lstrip("\n")
            self._at_start = not written
        reasoning = written.rstrip("\n")
        num_line_ends = len(written) - len(reasoning)
        if reasoning:
            reasoning = "\n" * self._num_line_ends + reasoning
            self._num_line_ends = 0
        self._num_line_ends += num_line_ends
        if mark is not None:
            self._held = self._held.removeprefix(mark)
            self._inside, self._at_start, self._from = False, True, 0
            self._end = self._num_chars - len(self._held)
        return reasoning

    def _end_of_reasoning(self, is_last: bool) -> tuple[int, str | None]:
        """Return the end of the text that is certainly reasoning, and the mark there; None if more may follow.

        A call ends reasoning that is never closed: its own mark stays in the text, so the result is an empty mark."""
        text, close = self._held, self._marks.close
        while True:
            places = [(at, end) for end in self._ends if (at := text.find(end, self._from)) >= 0]
            if not places:
                num_waiting = 0 if is_last else max(tail_that_may_begin(end, text) for end in self._ends)
                return len(text) - num_waiting, None
            at, end = min(places)
            if end == close:
                return at, close
            if self._parser is None and self._new_parser is not None:
                self._parser, self._num_parsed, self._num_begun = self._new_parser(), 0, 0
            verdict = self._read_call(text[at:], is_last)
            if verdict is None:
                self._from = at
                return at, None
            self._parser = None
            if verdict < 0:
                return at, ""
            self._from = at + (verdict or len(end))

    def _read_call(self, text: str, is_last: bool) -> int | None:
        """Return where reasoning continues after a text that begins as a call: 0 if it is not a call.

        -1 if the output ends with it, None if that is still open. A closing mark behind a whole call shows that the
        call was quoted; within arguments it is ordinary text."""
        parser, close = self._parser, self._marks.close
        assert parser is not None, "a mark of a call was found"
        while True:
            at = text.find(close, self._num_parsed)
            end = at if at >= 0 else len(text) - (0 if is_last else tail_that_may_begin(close, text))
            while not self._num_begun and self._num_parsed < end:  # text before another call is not a call
                content, calls = parser.push(text[self._num_parsed])
                self._num_parsed, self._num_begun = self._num_parsed + 1, sum(bool(call.name) for call in calls)
                if content:
                    return 0
            if not self._num_begun and (at >= 0 or is_last):
                return 0
            self._num_begun += sum(bool(call.name) for call in parser.push(text[self._num_parsed : end])[1])
            self._num_parsed = end
            if at < 0:
                return -1 if is_last else None
            if parser.num_calls == self._num_begun:
                return at
            parser.push(close)
            self._num_parsed += len(close)

    def _answer(self, is_last: bool) -> str:
        """Return the text up to the next reasoning, without stray marks. Only families with such marks reason again."""
        opens, strays = self._marks.open, self._marks.strays
        marks = (opens, *strays) if strays else ()
        given, text = "", self._held
        while places := [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]:
            at, _, mark = min(places)
            if mark != opens and opens.startswith(text[at:]) and not is_last:
                break
            given, text = given + text[:at], text[at + len(mark) :]
            if mark == opens:
                self._inside = True
                break
        num_waiting = 0 if is_last else max((tail_that_may_begin(mark, text) for mark in marks), default=0)
        end = 0 if self._inside else len(text) - num_waiting
        given, self._held = given + text[:end], text[end:]
        given = given.lstrip("\n") if self._at_start else given
        self._at_start = self._inside or (self._at_start and not given)
        return given
