"""Reasoning in a model's text: what stands in `<think>…</think>` before the answer, separated as it is written."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Splits one output into reasoning and answer; what `push` and then `finish` return adds up, however it was cut.

    A text has reasoning if it begins with `<think>`, or if the prompt ended with it (`inside`); reasoning that is never
    closed goes to the end. Line ends beside the marks belong to them, as they do for the models' own templates."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._is_undecided = True  # the text may still begin with the opening mark
        self._at_start = True  # of a part whose leading line ends are dropped
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are now safe to send."""
        if not (self._is_undecided or self._inside or self._at_start):
            return "", text
        self._held += text
        if self._is_undecided:
            begun = self._held.lstrip()
            if OPEN.startswith(begun) and begun != OPEN:
                return "", ""
            self._decide(begun)
        reasoning = self._reasoning() if self._inside else ""
        return reasoning, "" if self._inside else self._answer()

    def finish(self) -> tuple[str, str]:
        """The rest, when no more text comes: what looked like the beginning of a mark was none."""
        if self._is_undecided:
            self._decide(self._held.lstrip())
        rest, self._held = self._held, ""
        return (rest.strip("\n") if self._at_start else rest.rstrip("\n"), "") if self._inside else ("", rest)

    def _decide(self, begun: str) -> None:
        self._is_undecided = False
        if begun.startswith(OPEN):
            self._inside, self._held = True, begun.removeprefix(OPEN)
        elif not self._inside:
            self._at_start = False  # there is no mark whose line ends could be dropped

    def _reasoning(self) -> str:
        if self._at_start:
            self._held = self._held.lstrip("\n")
        at = self._held.find(CLOSE)
        end = len(self._held) - tail_that_may_begin(CLOSE, self._held, "\n") if at < 0 else at
        reasoning = self._held[:end]
        self._at_start = self._at_start and not reasoning
        if at < 0:
            self._held = self._held[end:]
            return reasoning
        self._held = self._held[at + len(CLOSE) :]
        self._inside, self._at_start = False, True
        return reasoning.rstrip("\n")

    def _answer(self) -> str:
        answer, self._held = self._held.lstrip("\n") if self._at_start else self._held, ""
        self._at_start = self._at_start and not answer
        return answer


def tail_that_may_begin(mark: str, text: str, spaces: str | None = None) -> int:
    """The length of the tail of `text` that is a beginning of `mark`, with the characters of `spaces` before it."""
    num = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return len(text) - len(text[: len(text) - num].rstrip(spaces))
