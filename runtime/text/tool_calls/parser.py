"""Tool calls in a model's text, parsed while it is generated, and returned in pieces for a stream.

A call is certain when its name and the text up to its arguments are complete. From then on the arguments are returned
as they are generated, valid or not, because sent text cannot be withdrawn. Any other text after a mark, and a call
to an unknown function, is ordinary text. White space around a call is markup, up to 1,024 characters on each
side of a mark."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.written_values import json_text

MAX_HEAD_CHARS = 1024  # text between a call's mark and its arguments; bounds the text that each piece matches again
_PLAIN_NAME = re.compile(r"[a-zA-Z0-9_-]+")
SPECIAL = "\U0010ffff"  # precedes the text of a special token in some streams; no other text has it
MAX_SPACES = 1024  # white space before a mark: bounds the text that is searched again with each piece


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model family's calls: the marks for its parser, and a call's parts for its grammar."""

    parser: type[ToolCallParser]
    mark: str  # precedes a call, anywhere in the text
    marks: tuple[str, ...]  # all marks that may be special tokens
    # Matches calls without a mark at the text's start; %s is replaced by the functions' names.
    # Empty if all calls have a mark.
    bare: str = ""
    # The text around names and arguments:
    begin: str = ""  # opens the first call, up to its name
    to_arguments: str = ""
    end: str = ""
    again: str = ""  # text between a call's end and the next name; empty if there is only one call
    close: str = ""  # after the last call
    arguments: ArgumentForm | None = None  # the form of arguments; None for one JSON object
    separator: str = ""  # separates several objects after one mark
    json_form: ToolFormat | None = None  # format for required calls with arguments that this format cannot express
    has_short_ids: bool = False  # its template accepts only ids of nine letters or digits
    has_named_ids: bool = False  # its template writes a call's id as its name: functions.NAME:NUMBER
    token_hex: Callable[[int], str] = secrets.token_hex  # makes call ids
    has_metadata: bool = False  # its template writes a call as a message with the function's name as `metadata`
    ends_reasoning: bool = False  # a call within reasoning ends it
    # A regular expression for templates that describe tools for this format and write no calls; empty if none
    sign: str = ""
    is_text: bool = False  # tools, calls and results are plain text in messages
    instructions: str = ""  # about tools at its %s, for templates that write calls but no tools

    @property
    def last_mark(self) -> str:
        """The last mark before a call's name, present even if a model omits the others."""
        return (*self.parser.other_marks, self.mark)[0]

    def opening(self, name: str | None) -> str:
        """Return how a function's call begins, up to its arguments; for None, how any call begins, up to the name.

        It ends at a token boundary: in front of a space that tokens join to the next word."""
        return self.begin if name is None else self.begin + self.written(name) + self.to_arguments

    def written(self, name: str) -> str:
        """Return a function's name as it stands in a call, escaped within JSON."""
        return json_text(name) if self.begin.endswith('"') else name

    def can_name(self, name: str) -> bool:
        """Return whether a call of the function can be written, so that its parser reads it."""
        if _PLAIN_NAME.fullmatch(name):
            return True
        call = self.opening(name) + ("{}" if self.arguments is None else "") + self.end + self.close
        _, calls = self.parser(self, {name: {}}).push(call, is_last=True)
        return [delta.name for delta in calls if delta.name] == [name]

    def for_call_of(self, needs_json: bool) -> ToolFormat:
        """Return the format for a required call: this one, or `json_form` for arguments that need JSON."""
        if not (needs_json and self.arguments is not None):
            return self
        assert self.json_form is not None, "every format with this need has a JSON form"
        return self.json_form


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A required call: the prompt ends with its `opening`, and the output continues it."""

    name: str | None  # the function; None if the output chooses it


@dataclass(slots=True)
class CallDelta:
    """A piece of a call. The first one has the id and the name, without arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_custom: bool = False  # a custom tool's call: `arguments` is its input text


class Content(list[str]):
    """The pieces of an output's content."""

    def flush(self) -> None:
        """Add the text that is held back: the output ends, or a call begins."""


class ToolCallParser:
    """Splits one output into content and calls. The result does not depend on the grouping into pushes.

    A state machine over the text that has not been returned. Each state is a method that consumes text from the front
    of `_held`, and returns True if the next state should continue. A format has a subclass for the text before
    arguments (`_opening`) and after them (`_after_arguments`)."""

    other_marks: ClassVar[tuple[str, ...]] = ()  # other marks before a call

    def __init__(
        self,
        form: ToolFormat,
        functions: Mapping[str, Any] | None,
        most: int | None = None,
        forced: ForcedCall | None = None,
    ) -> None:
        """Args:
        functions: the callable functions with the JSON Schemas of their arguments; None for any function.
        most: the number of calls after which `done` is set; None if unlimited.
        forced: a call that the prompt has opened; the text continues it."""
        self.num_calls = 0
        self.done = False
        self._form, self._functions, self._most = form, functions, most
        self._held = ""
        self._num_chars = 0  # length of the text so far
        self._at = 0  # where the text after a mark starts in _held
        self._value = JsonValue()
        self.content = Content()
        self._calls: list[CallDelta] = []
        self._state: Callable[[bool], bool] = self._opening if form.bare else self._outside
        if forced is not None and forced.name is not None:
            self._begin(forced.name)
            self._state = self._begun_arguments
        elif forced is not None:
            self._held = form.opening(None)

    @property
    def all_marks(self) -> tuple[str, ...]:
        """The marks that may precede a call."""
        return self._form.mark, *self.other_marks

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        """Add text. Returns the content and the pieces of calls that are now certain.

        The last text turns an uncertain call into content."""
        self._held += text
        self._num_chars += len(text)
        while not self.done and self._state(is_last):
            pass
        if self.done:  # the rest of the text is ignored
            self._held = ""
        if is_last:
            self.content.flush()
        content = "".join(self.content)
        self.content.clear()
        calls, self._calls = self._calls, []
        return content, calls

    # ---- states ----------------------------------------------------------------------------------------------------

    def _outside(self, final: bool) -> bool:
        """In content."""
        text, marks = self._held, self.all_marks
        at, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
        num_waiting = 0 if final else max(tail_that_may_begin(mark, text) for mark in marks)
        before = at if at >= 0 else len(text) - num_waiting
        end = before if final and at < 0 else max(before - MAX_SPACES, len(text[:before].rstrip()))
        self.content.append(text[:end])
        if at < 0:
            self._held = text[end:]
            return False
        self._held, self._at = text[end:], at + len(mark) - end
        self._state = self._opening
        return True

    def _opening(self, final: bool) -> bool:
        """After a mark, or at a place where a call may begin without one."""
        raise NotImplementedError

    def _begun_arguments(self, final: bool) -> bool:
        """Before arguments in JSON."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] in ("<", SPECIAL):  # a call without arguments
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

    def _after_calls(self, final: bool) -> bool:
        """Before the text behind calls, which loses its leading white space."""
        self._held = self._held.lstrip()
        self._state = self._outside if self._held else self._after_calls
        return bool(self._held)

    # ---- shared by the states ---------------------------------------------------------------------------------------

    def _give_back(self, num_chars: int) -> bool:
        """Return the next characters as content."""
        self.content.append(self._held[:num_chars])
        self._held = self._held[num_chars:]
        self._state = self._outside
        return True

    def call(self, name: str, arguments: str) -> bool:
        """Return a call that stands in the content. Returns False if it is the last allowed one."""
        self._new_call(name)
        self._give(arguments)
        self._end(self._state)
        return not self.done

    def _begin(self, name: str) -> None:
        self.content.flush()
        self._new_call(name)

    def _new_call(self, name: str) -> None:
        short = self._form.has_short_ids
        call_id = self._form.token_hex(5)[:9] if short else "call_" + self._form.token_hex(12)
        self._calls.append(CallDelta(self.num_calls, call_id, name))

    def _give(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self.num_calls, arguments=arguments))

    def _end(self, state: Callable[[bool], bool]) -> bool:
        """End a call. Unless it is the last allowed one, `state` continues."""
        self.num_calls += 1
        self.done = self.num_calls == self._most
        self._state = state
        return True

    def _may_call(self, name: object) -> bool:
        return isinstance(name, str) and (self._functions is None or name in self._functions)

    def _up_to(self, end: re.Pattern[str], ends: Collection[str], final: bool) -> tuple[str, bool]:
        """Take the text before an end and drop the end; without an end, keep a tail that may begin one of `ends`."""
        text, found = self._held, end.search(self._held)
        num_waiting = 0 if final else max(tail_that_may_begin(mark, text) for mark in ends)
        stop = len(text) - num_waiting if found is None else found.start()
        self._held = text[stop if found is None else found.end() :]
        return text[:stop], found is not None

    def _skips(self, mark: str, final: bool) -> bool | None:
        """Drop white space and a mark after it. Returns whether the mark was there; None if that is still open."""
        text = self._held = self._held.lstrip()
        if not final and text != mark and mark.startswith(text):
            return None
        self._held = text.removeprefix(mark)
        return text.startswith(mark)


_OUTSIDE_STRING = re.compile(r'["{}\[\]<\U0010ffff]')
_IN_STRING = re.compile(r'["\U0010ffff]|\\[^\U0010ffff]', re.DOTALL)


class JsonValue:
    """Finds the end of one JSON value by brackets and strings, as its text arrives.

    A "<" outside a string is not JSON, but begins a mark: it ends a value that was never closed. So does a special
    token anywhere."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth  # brackets open
        self._in_string = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Read from `at`. Returns the position reached, and whether the value ends there."""
        while match := (_IN_STRING if self._in_string else _OUTSIDE_STRING).search(text, at):
            char = match[0]
            if char in ("<", SPECIAL) or (char in "}]" and not self.depth):
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
        # A backslash at the end waits for the escaped character.
        return len(text) - (self._in_string and text.endswith("\\", at)), False


def tail_that_may_begin(mark: str, text: str) -> int:
    """Return the length of the longest tail in `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
