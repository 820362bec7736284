"""Tool calls in a model's text: found as it is written, and given in the pieces that a stream sends.

A call is certain as soon as its name is there, with what comes before its arguments; from then on the arguments are
given as they are generated, valid or not, since what is sent cannot be taken back. Anything else after a mark, and a
function that the request does not have, is ordinary text and is given back as it stood. White space around a call
belongs to its markup, up to 1,024 characters on each side of a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.text.tool_calls.argument_form import ArgumentForm

MAX_HEAD_CHARS = 1024  # from a call's mark to its arguments: bounds the text that is matched again with each piece
MAX_SPACES = 1024  # of white space before a mark: bounds the text that is searched again with each piece


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls: what its parser looks for, and what the grammar of a call is made of."""

    parser: type[ToolCallParser]
    mark: str  # a call follows it, wherever it stands
    marks: tuple[str, ...]  # all that may be special tokens in a vocabulary
    # A call needs no mark at the beginning of the text: a regular expression of what may be one there, %s standing for
    # the functions' names. "": it needs one.
    bare: str = ""
    # What is around names and arguments.
    begin: str = ""  # what a first call begins with, up to its name
    to_arguments: str = ""
    end: str = ""
    again: str = ""  # between the end of a call and the name of the next one; "": there is just one
    close: str = ""  # after the last call
    arguments: ArgumentForm | None = None  # how they are written; None: as one JSON object
    separator: str = ""  # of objects that follow each other after one mark
    json_form: ToolFormat | None = None  # writes calls that a request insists on, where this one cannot
    has_short_ids: bool = False  # its template takes ids of nine letters or digits alone
    is_text: bool = False  # tools, calls and results are text of messages, and the template reads none of them

    @property
    def last_mark(self) -> str:
        """The mark that comes last before a call's name, also where a model forgets the others."""
        return (*self.parser.other_marks, self.mark)[0]

    def opening(self, name: str | None) -> str:
        """How a call of a function begins, up to its arguments; for None, how any call begins, up to the name.

        It ends where the models' own tokens do: in front of the space that they join to the next word."""
        return self.begin if name is None else self.begin + name + self.to_arguments

    def for_call_of(self, name: str | None, special_marks: Collection[str], needs_json: bool) -> ToolFormat:
        """The format in which a call of a function (None: of any) can be begun for the model: a grammar cannot write
        special tokens, which may be between a name and the arguments, or around each of these; and some arguments
        cannot be written without JSON."""
        written = "" if name is not None else self.to_arguments
        if (own := self.arguments) is not None:
            written += own.begin + own.to_value + own.end + self.end
        names_are_bound = not any(mark in written for mark in special_marks)
        if names_are_bound and not (needs_json and own is not None):
            return self
        assert self.json_form is not None, "each format that may need another one has it"
        return self.json_form


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A call whose `opening` the prompt ends with, so that the output can only go on with it."""

    name: str | None  # of the function; None: the output names one


@dataclass(slots=True)
class CallDelta:
    """A piece of a call. The first one has the id and the name, and no arguments yet."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_custom: bool = False  # of a custom tool: the arguments are its input, a text


class ToolCallParser:
    """Splits one output into content and calls; how the text was cut into pushes makes no difference.

    A small machine over the text not given yet: each state is a method that takes what it can from the front of
    `_held` and returns whether another state should go on. What is here, all formats share; each has a class of its
    own for how a call begins after its mark (`_opening`) and ends (`_after_arguments`)."""

    other_marks: ClassVar[tuple[str, ...]] = ()  # that a call may follow, too

    def __init__(
        self,
        form: ToolFormat,
        functions: Mapping[str, Any] | None,
        most: int | None = None,
        forced: ForcedCall | None = None,
    ) -> None:
        """`functions` that may be called (None: any), with the JSON Schemas of their arguments. `most` calls are read,
        and then `done` is set. The text goes on from the opening of a `forced` call."""
        self.num_calls = 0
        self.done = False
        self._form, self._functions, self._most = form, functions, most
        self._held = ""
        self._num_chars = 0  # of the text so far
        self._at = 0  # where in _held the text after a mark begins
        self._value = JsonValue()
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._state: Callable[[bool], bool] = self._opening if form.bare else self._outside
        if forced is not None and forced.name is not None:
            self._begin(forced.name)
            self._state = self._begun_arguments
        elif forced is not None:
            self._held = form.opening(None)

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        """The content and the pieces of calls that are now certain; with the last text, a call that is not was none."""
        self._held += text
        self._num_chars += len(text)
        while self._state(is_last):
            pass
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, calls

    # ---- states ----------------------------------------------------------------------------------------------------

    def _outside(self, final: bool) -> bool:
        """In content."""
        text, marks = self._held, (self._form.mark, *self.other_marks)
        at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        num_waiting = 0 if final else max(tail_that_may_begin(mark, text) for mark in marks)
        before = at if at >= 0 else len(text) - num_waiting
        end = before if final and at < 0 else max(before - MAX_SPACES, len(text[:before].rstrip()))
        self._content.append(text[:end])
        if at < 0:
            self._held = text[end:]
            return False
        self._held, self._at = text[end:], at + len(mark) - end
        self._state = self._opening
        return True

    def _opening(self, final: bool) -> bool:
        """After a mark, or where a call may begin without one."""
        raise NotImplementedError

    def _begun_arguments(self, final: bool) -> bool:
        """Before arguments in JSON."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] == "<":  # there are none
            self._give("{}")
        self._value = JsonValue()
        self._state = self._arguments
        return True

    def _arguments(self, final: bool) -> bool:
        """In arguments in JSON."""
        end, ended = self._value.read(self._held, 0)
        if final and not ended:
            end = len(self._held)
        self._give(self._held[:end])
        self._held = self._held[end:]
        if ended:
            self._state = self._after_arguments
        return ended

    def _after_arguments(self, final: bool) -> bool:
        raise NotImplementedError

    def _finished(self, final: bool) -> bool:
        self._held = ""
        return False

    # ---- what they share -------------------------------------------------------------------------------------------

    def _give_back(self, num_chars: int) -> bool:
        """The next characters are content after all."""
        self._content.append(self._held[:num_chars])
        self._held = self._held[num_chars:]
        self._state = self._outside
        return True

    def _begin(self, name: str) -> None:
        short = self._form.has_short_ids
        call_id = secrets.token_hex(5)[:9] if short else "call_" + secrets.token_hex(12)
        self._calls.append(CallDelta(self.num_calls, call_id, name))

    def _give(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self.num_calls, arguments=arguments))

    def _end(self, state: Callable[[bool], bool]) -> bool:
        """A call has ended, and unless it is the last one allowed, `state` goes on."""
        self.num_calls += 1
        self.done = self.num_calls == self._most
        self._state = self._finished if self.done else state
        return True

    def _may_call(self, name: object) -> bool:
        return isinstance(name, str) and (self._functions is None or name in self._functions)

    def _up_to(self, end: re.Pattern[str], ends: Collection[str], final: bool) -> tuple[str, bool]:
        """Takes the text before an end and drops the end, or takes all but a tail that may begin one of `ends`."""
        text, found = self._held, end.search(self._held)
        num_waiting = 0 if final else max(tail_that_may_begin(mark, text) for mark in ends)
        stop = len(text) - num_waiting if found is None else found.start()
        self._held = text[stop if found is None else found.end() :]
        return text[:stop], found is not None

    def _skips(self, mark: str, final: bool) -> bool | None:
        """Drops white space and a mark after it, if it is there; None: that is not certain yet."""
        text = self._held = self._held.lstrip()
        if not final and text != mark and mark.startswith(text):
            return None
        self._held = text.removeprefix(mark)
        return text.startswith(mark)


_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'"|\\.', re.DOTALL)


class JsonValue:
    """Finds the end of one JSON value by its brackets and strings alone, as its text comes.

    No JSON has a "<" outside a string, but the marks begin with it: there, a value that was never closed ends."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # brackets open
        self._in_string = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Reads on from `at`: how far, and whether the value ends there."""
        while match := (_IN_STRING if self._in_string else _OUTSIDE_STRING).search(text, at):
            char = match[0]
            if char == "<" or (char in "}]" and not self.depth):
                return match.start(), True
            at = match.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
            if not (self.depth or self._in_string) and char in '"}]':
                return at, True
        # A backslash at the end waits for what it escapes.
        return len(text) - (self._in_string and text.endswith("\\", at)), False


def tail_that_may_begin(mark: str, text: str) -> int:
    """The length of the tail of `text` that is a beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
