"""Calls that a model writes in a plain form, without its format's marks.

    ```json
    {"name": "f", "arguments": {…}}
    ```

A block begins a line: a Markdown code block without a language or with `json`, a bare object, or a list of objects.
It is one or several calls if it holds nothing else, and each calls an offered function with arguments that fit.
Anything else is text, unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from runtime.text.tool_calls.argument_check import fits
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, MAX_SPACES, Content, JsonValue

_LANGUAGES = ("", "json", "tool_call", "tool_calls", "tool_code", "tool")
_ARGUMENTS = ("arguments", "parameters")
_INNER = ("function", "function_call", "tool_call")  # keys with the function's name, or with an object that is the call
_KEYS = {"type", "id", "name", *_ARGUMENTS}
_MAX_INDENT = 3  # spaces before a block; more make a Markdown code block, which is text
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([^\n`]*)")
_BETWEEN, _BETWEEN_IN_LINE = re.compile(r"[\s,;]*"), re.compile(r"[ \t\r,;]*")
_values = msgspec.json.Decoder(list[msgspec.Raw])
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])

Call = tuple[str, str]  # name and arguments


class PlainCalls(Content):
    """A parser's content without the plain calls in it.

    It holds back text only while that may still be a call, and white space that may be before one."""

    def __init__(self, functions: Mapping[str, Any], call: Callable[[str, str], bool]) -> None:
        """`call` takes each call, and returns False if the rest of the text is not wanted."""
        super().__init__()
        self._functions, self._call = _Functions(functions), call
        self._held = ""
        self._begins_line = True  # the held text does
        self._fence = ""  # fence of the code block around the held text
        self._begun_fence = ""  # the same, if the line that begins it ends without another one
        self._is_json = False  # the paragraph holds JSON that is text
        self._has_text = False  # text was returned
        self._has_called = False  # a call ends before the held text
        self._block: _Block | None = None  # the block that begins the held text

    def append(self, text: str) -> None:
        self._held += text
        while self._held and self._step(False):
            pass

    def flush(self) -> None:
        while self._held and self._step(True):
            pass
        self._begins_line, self._fence = True, ""  # a call with marks follows, if any text does

    def _step(self, final: bool) -> bool:
        """Take text from the front. Returns False if that needs more text."""
        if not self._begins_line:
            end = self._held.find("\n")
            line = self._held if end < 0 else self._held[:end]
            self._begun_fence = "" if "`" in line else self._begun_fence
            self._give(len(line))
            if end >= 0:
                self._begins_line = True
                self._fence, self._begun_fence = self._fence or self._begun_fence, ""
            return end >= 0
        line = self._held.lstrip()
        num_spaces = len(self._held) - len(line)
        before, _, indent = self._held[:num_spaces].rpartition("\n")
        self._is_json = self._is_json and "\n" not in before
        if not line and num_spaces <= MAX_SPACES and not final:
            return False
        if not line:
            self._held = "" if self._has_called else self._held
            self._give(num_spaces)
            return False
        if self._fence:
            return self._in_fence(line, num_spaces, final)
        if self._block is None and len(indent) <= _MAX_INDENT and num_spaces <= MAX_SPACES:
            self._block, is_open = self._begun(line)
            if is_open and not final:
                return False
        if self._block is None:
            run = _FENCE.match(line)
            self._begun_fence = run[1] if run and len(indent) <= _MAX_INDENT else ""
            return self._begin_text(num_spaces + (len(run[1]) if run else 1))
        calls = self._block.read(line, final)
        if calls is None:
            return False
        fence, end, self._block = self._block.fence, self._block.at, None
        if not calls:
            self._fence, self._is_json = fence, not fence and line[1:].lstrip()[:1] in ("", "{", "[", '"')
            return self._begin_text(num_spaces + (line.index("\n") if fence else 1))
        self._held = (self._held[:num_spaces] if self._has_text else "") + line[end:].lstrip()
        self._has_called = True
        if not all(self._call(*call) for call in calls):
            self._held = ""
        return True

    def _in_fence(self, line: str, num_spaces: int, final: bool) -> bool:
        """At the beginning of a line in a code block that is text."""
        end = line.find("\n")
        run = (line if end < 0 else line[:end]).rstrip()
        is_run = not run.strip(self._fence[0])
        if is_run and end < 0 and not final:
            return False
        if is_run and len(run) >= len(self._fence):
            self._fence = ""
            return self._begin_text(num_spaces + len(run))
        return self._begin_text(num_spaces)

    def _begun(self, line: str) -> tuple[_Block | None, bool]:
        """Return the block that a line begins, or None, and whether more of the line may begin one."""
        if line[0] in "{[":
            return None if self._is_json else _Block(self._functions, "", 0), False
        first, ended, _ = line.partition("\n")
        if not (fence := _FENCE.fullmatch(first)):
            return None, not ended and first in ("`", "``", "~", "~~")
        language = fence[2].strip().lower()
        if ended and language in _LANGUAGES:
            return _Block(self._functions, fence[1], len(first) + 1), False
        return None, not ended and any(each.startswith(language) for each in _LANGUAGES)

    def _begin_text(self, num_chars: int) -> bool:
        self._begins_line = False
        self._give(num_chars)
        return True

    def _give(self, num_chars: int) -> None:
        if num_chars and self._held:
            super().append(self._held[:num_chars])
            self._held = self._held[num_chars:]
            self._has_text, self._has_called = True, False


class _Functions:
    """The offered functions, and how a call of one may begin."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        inner, names = "|".join(_INNER), "|".join(map(re.escape, schemas))
        self._head = re.compile(
            rf'[\[\s]*(?:\{{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*|"(?:name|{inner})"\s*:\s*"(?:{names})"\s*,\s*'
            rf'|"(?:{inner})"\s*:\s*\{{\s*|"tool_calls"\s*:[\[\s]*(?:\{{\s*)?)*)?'
        )
        self._next = ['"type":"', '"id":"', '"tool_calls":[', *(f'"{key}":{{' for key in _INNER)]
        self._next += [f'"{key}":{char}' for key in _ARGUMENTS for char in '{"n']
        self._next += [f'"{key}":"{name}"' for key in ("name", *_INNER) for name in schemas]

    def may_begin(self, head: str) -> bool:
        """Return False if a text certainly does not begin with a call."""
        known = self._head.match(head)
        assert known is not None, "it matches the empty text"
        rest = "".join(head[known.end() :].split())
        return any(rest.startswith(each) or each.startswith(rest) for each in self._next)

    def calls(self, text: str) -> list[Call]:
        """Return a JSON value's calls; none unless it consists of calls."""
        try:
            values = _values.decode(text) if text[0] == "[" else [msgspec.Raw(text.encode())]
            found = [self._calls_of(_members.decode(value)) for value in values]
        except (ValueError, RecursionError):
            return []
        return [call for some in found for call in some] if all(found) else []

    def _calls_of(self, members: dict[str, msgspec.Raw]) -> list[Call]:
        """Return the calls of an object; none if it is not one. Raises ValueError."""
        given = {key: bytes(value).decode() for key, value in members.items()}
        if given.keys() == {"tool_calls"}:
            return self.calls(given["tool_calls"])
        for key in _INNER:
            if given.get(key, "").startswith("{") and given.keys() <= {key, "type", "id"}:
                return self._calls_of(_members.decode(given[key]))
            given["name"] = given.pop(key, given.get("name", "null"))
        name, arguments = json.loads(given["name"]), [given[key] for key in _ARGUMENTS if key in given]
        if len(arguments) != 1 or given.keys() - _KEYS or not isinstance(name, str) or name not in self._schemas:
            return []
        text, value = arguments[0], json.loads(arguments[0])
        if isinstance(value, str):  # JSON in a string, possibly with a lone surrogate
            text = value.encode("utf-8", "replace").decode() or "{}"
            value = msgspec.json.decode(text)
        if value is None:
            text, value = "{}", {}
        return [(name, text)] if isinstance(value, dict) and fits(value, self._schemas[name]) else []


class _Block:
    """JSON objects in a code block, or bare in a line, as they arrive."""

    def __init__(self, functions: _Functions, fence: str, at: int) -> None:
        self.fence = fence  # "" for bare objects
        self.at = at  # read so far
        self._functions = functions
        self._start: int | None = None  # where an open value starts
        self._value = JsonValue()
        self._calls: list[Call] = []

    def read(self, text: str, final: bool) -> list[Call] | None:
        """Return the calls; none if the block is text, and None if it needs more text. `at` is then its end."""
        while True:
            if self._start is None:
                calls = self._between(text, final)
                if self._start is None:
                    return calls
            if not self._functions.may_begin(text[self._start : self._start + MAX_HEAD_CHARS]):
                return []
            self.at, ended = self._value.read(text, self.at)
            if not ended:
                return [] if final else None
            found = self._functions.calls(text[self._start : self.at])
            if not found:
                return []
            self._calls += found
            self._start = None

    def _between(self, text: str, final: bool) -> list[Call] | None:
        """Go to the next value if there is one. Otherwise return what `read` returns."""
        spaces = (_BETWEEN if self.fence else _BETWEEN_IN_LINE).match(text, self.at)
        assert spaces is not None, "it matches the empty text"
        rest = text[spaces.end() :]
        if rest[:1] and rest[0] in "{[":
            self._start = self.at = spaces.end()
            self._value = JsonValue()
            return None
        if not self.fence:
            if not rest and not final:
                return None
            self.at = spaces.end()
            return self._calls if not rest or rest[0] == "\n" else []
        line, ended, _ = rest.partition("\n")
        run = line.rstrip()
        if run.strip(self.fence[0]) or (rest and not self._calls):
            return []
        if not ended and not final:
            return None
        self.at = spaces.end() + len(run)
        return self._calls if not run or len(run) >= len(self.fence) else []
