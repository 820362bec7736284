"""Reasoning in a model's text: the part in `<think>…</think>` before the answer, separated as it is written.

Gemma 4 has other marks."""

from __future__ import annotations

from typing import NamedTuple

from runtime.text.tool_calls.parser import MAX_SPACES, tail_that_may_begin


class Marks(NamedTuple):
    """The texts around reasoning."""

    open: str
    close: str
    open_token: str  # the part of `open` that may be a special token of a vocabulary


THINK = Marks("<think>", "</think>", "<think>")
THOUGHT = Marks("<|channel>thought", "<channel|>", "<|channel>")  # Gemma 4
TOKENS = frozenset(token for marks in (THINK, THOUGHT) for token in (marks.open_token, marks.close))


def marks_of(template: str) -> Marks:
    """Return the marks of a chat template."""
    return THOUGHT if THOUGHT.close in template else THINK


class ReasoningSplitter:
    """Splits one output into reasoning and answer. The sum of all results does not depend on the cuts of the input.

    A text has reasoning if it begins with its mark, or if the prompt ended with it (`inside`). Reasoning without a
    closing mark extends to the end. Line ends beside the marks belong to them, as in the models' templates."""

    def __init__(self, inside: bool, marks: Marks = THINK) -> None:
        self._inside, self._marks = inside, marks
        self._is_undecided = True  # the text may still begin with the opening mark
        self._at_start = True  # of a part that loses its leading line ends
        self._num_line_ends = 0  # of the reasoning, held: they belong to the mark if it follows
        self._held = ""  # text after them that may begin a mark
        self._num_chars = 0  # of the text so far
        self._end = 0  # of closed reasoning, in the text

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
        if not (self.is_open or self._at_start):
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
        reasoning = self._reasoning(is_last) if self._inside else ""
        return reasoning, "" if self._inside else self._answer()

    def _decide(self, begun: str) -> None:
        self._is_undecided = False
        if begun.startswith(self._marks.open):
            self._inside, self._held = True, begun.removeprefix(self._marks.open)
        elif not self._inside:
            self._at_start = False  # without a mark, line ends stay

    def _reasoning(self, is_last: bool) -> str:
        close = self._marks.close
        at = self._held.find(close)
        num_waiting = 0 if is_last else tail_that_may_begin(close, self._held)
        end = len(self._held) - num_waiting if at < 0 else at
        written, self._held = self._held[:end], self._held[end:]
        if self._at_start:
            written = written.lstrip("\n")
            self._at_start = not written
        reasoning = written.rstrip("\n")
        num_line_ends = len(written) - len(reasoning)
        if reasoning:
            reasoning = "\n" * self._num_line_ends + reasoning
            self._num_line_ends = 0
        self._num_line_ends += num_line_ends
        if at >= 0:
            self._held = self._held[len(close) :]
            self._inside, self._at_start = False, True
            self._end = self._num_chars - len(self._held)
        return reasoning

    def _answer(self) -> str:
        answer, self._held = self._held.lstrip("\n") if self._at_start else self._held, ""
        self._at_start = self._at_start and not answer
        return answer
