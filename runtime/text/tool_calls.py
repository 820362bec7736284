"""Tool calls in a model's text: found as it is written, and given in the pieces that a stream sends.

    HERMES   <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>   any number, anywhere       (Hermes, Qwen)
    LLAMA3   {"name": "f", "parameters": {…}}; {…}                      the text begins so, or after <|python_tag|>

A call is certain as soon as its name and the brace of its arguments are there; from then on the arguments are given as
they are generated, valid or not, since what is sent cannot be taken back. Anything else between the marks, and a
function that the request does not have, is ordinary text and is given back as it stood. White space around a call
belongs to its markup, up to 1,024 characters on each side of a mark.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Set
from dataclasses import dataclass

from runtime.text.reasoning import MAX_SPACES, tail_that_may_begin


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call, beside the JSON object that all have."""

    mark: str  # a call follows it, wherever it stands
    end_mark: str  # follows a call; may be forgotten
    is_bare: bool  # a call needs no mark at the beginning of the text, nor after another call and a ";"
    arguments: str  # the key of the arguments, when the call is begun for the model

    def opening(self, name: str | None) -> str:
        """How a call of a function begins, up to its arguments; for None, how any call begins, up to the name.

        It ends where the models' own tokens do: in front of the space that they join to the next word."""
        opening = ("" if self.is_bare else self.mark + "\n") + '{"name": "'
        return opening if name is None else f'{opening}{name}", "{self.arguments}":'


HERMES = ToolFormat("<tool_call>", "</tool_call>", False, "arguments")
LLAMA3 = ToolFormat("<|python_tag|>", "", True, "parameters")


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


# Decides about an object within its first characters, so that no text is matched again and again.
_HEAD_CHARS = 1024
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*(?:"([a-z]*)([^a-z])|[^"\s])')
_KEYS = {"name", "type", "id", "arguments", "parameters"}


class ToolCallParser:
    """Splits one output into content and calls; how the text was cut into pushes makes no difference.

    A small machine over the text not given yet: each state is a method that takes what it can from the front of
    `_held` and returns whether another state should go on."""

    def __init__(
        self, form: ToolFormat, names: Set[str] | None, most: int | None = None, forced: ForcedCall | None = None
    ) -> None:
        """`names` of the functions that may be called (None: any). `most` calls are read, and then `done` is set. The
        text goes on from the opening of a `forced` call."""
        self.num_calls = 0
        self.done = False
        self._form, self._names, self._most = form, names, most
        self._held = ""
        self._object_at = 0  # where in _held a call's object begins, or is expected
        self._value = _Value()
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._state: Callable[[bool], bool] = self._opening if form.is_bare else self._outside
        if forced is not None and forced.name is not None:
            self._begin(forced.name)
            self._state = self._begun_arguments
        elif forced is not None:
            self._held = form.opening(None)

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        """The content and the pieces of calls that are now certain; with the last text, a call that is not was none."""
        self._held += text
        while self._state(is_last):
            pass
        content, self._content = "".join(self._content), []
        calls, self._calls = self._calls, []
        return content, calls

    # ---- states -----------------------------------------------------------------------------------------------------

    def _outside(self, final: bool) -> bool:
        """In content."""
        text, mark = self._held, self._form.mark
        at = text.find(mark)
        before = at if at >= 0 else len(text) - (0 if final else tail_that_may_begin(mark, text))
        end = before if final and at < 0 else max(before - MAX_SPACES, len(text[:before].rstrip()))
        self._content.append(text[:end])
        if at < 0:
            self._held = text[end:]
            return False
        self._held, self._object_at = text[end:], at + len(mark) - end
        self._state = self._opening
        return True

    def _opening(self, final: bool) -> bool:
        """Where an object must begin for the text to be a call."""
        rest = self._held[self._object_at :]
        spaces = len(rest) - len(rest.lstrip())
        if spaces <= MAX_SPACES and rest[spaces : spaces + 1] == "{":
            self._object_at += spaces
            self._value = _Value()
            self._scanned = self._object_at
            self._state = self._object
            return True
        if final and self.num_calls and self._held.strip() == ";":
            self._held = ""
        if final or spaces < len(rest) or spaces > MAX_SPACES:
            return self._give_back(self._object_at)
        return False

    def _object(self, final: bool) -> bool:
        """In an object that may be a call."""
        text, start = self._held, self._object_at
        head_end = start + _HEAD_CHARS
        if (head := _HEAD.match(text, start, head_end)) and self._may_call(head[1]):
            self._begin(head[1])
            self._held = text[head.end() :]
            self._value = _Value()
            self._state = self._arguments
            return True
        key = _FIRST_KEY.match(text, start, head_end)
        if (len(text) >= head_end) if key is None else (key[1] not in _KEYS or key[2] != '"'):
            return self._give_back(start + 1)
        self._scanned, ended = self._value.read(text, self._scanned)
        if not ended:
            return self._give_back(len(text)) if final else False
        if self._value.depth or (call := self._whole(text[start : self._scanned])) is None:
            return self._give_back(self._scanned)
        self._begin(call[0])
        self._calls.append(CallDelta(self.num_calls, arguments=call[1]))
        self._held = text[self._scanned :]
        return self._end()

    def _begun_arguments(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = self._arguments
        return True

    def _arguments(self, final: bool) -> bool:
        """In the arguments of a call."""
        end, ended = self._value.read(self._held, 0)
        if final and not ended:
            end = len(self._held)
        if end:
            self._calls.append(CallDelta(self.num_calls, arguments=self._held[:end]))
        self._held = self._held[end:]
        if ended:
            self._state = self._after_arguments
        return ended

    def _after_arguments(self, final: bool) -> bool:
        text = self._held = self._held.lstrip()
        if not text:
            return False
        if text[0] == ",":
            self._value = _Value(depth=1)
            self._state = self._other_keys
            return True
        self._held = text.removeprefix("}")
        return self._end()

    def _other_keys(self, final: bool) -> bool:
        """In what an object has after a call's arguments (a `"type"` or an `"id"`): nobody asks for it."""
        end, ended = self._value.read(self._held, 0)
        self._held = self._held[end:]
        return self._end() if ended else False

    def _after_object(self, final: bool) -> bool:
        """Where the end mark is expected, but not required."""
        text, mark = self._held.lstrip(), self._form.end_mark
        self._held = text
        if not final and mark.startswith(text) and text != mark:
            return False
        self._held = text.removeprefix(mark)
        self._state = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._state = self._outside
        if self._form.is_bare and self._held[0] in ";{":
            self._object_at = int(self._held[0] == ";")
            self._state = self._opening
        return True

    def _finished(self, final: bool) -> bool:
        self._held = ""
        return False

    # ---- what they share --------------------------------------------------------------------------------------------

    def _give_back(self, num_chars: int) -> bool:
        """The next characters are content after all."""
        self._content.append(self._held[:num_chars])
        self._held = self._held[num_chars:]
        self._state = self._outside
        return True

    def _begin(self, name: str) -> None:
        self._calls.append(CallDelta(self.num_calls, "call_" + secrets.token_hex(12), name))

    def _end(self) -> bool:
        self.num_calls += 1
        self.done = self.num_calls == self._most
        self._state = self._finished if self.done else self._after_object
        return True

    def _may_call(self, name: object) -> bool:
        return isinstance(name, str) and (self._names is None or name in self._names)

    def _whole(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call whose keys came in another order than the usual one; None if it is no call."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        arguments = call.get("arguments", call.get("parameters")) or {}
        if not self._may_call(call.get("name")):
            return None
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'"|\\.', re.DOTALL)


class _Value:
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
