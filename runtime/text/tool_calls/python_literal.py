"""Literals of Python and JSON, parsed as their text arrives, at constant cost per character."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.text.tool_calls.written_values import as_json, dumped, json_text

_MARK = re.compile(r"""['"()\[\]{},:]""")
_IN_STRING = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in ("'", '"', "'''", '"""')}
_PREFIXES = {"", "r", "R", "u", "U"}  # prefixes of text strings
_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NUMBER = re.compile(r"([+-]?)\s*([0-9.][0-9A-Za-z_.+-]*)", re.ASCII)
_CLOSES = {")": "(", "]": "[", "}": "{"}
_NOTHING: Any = object()
_CONTROLS = {ord(char): f"\\x{ord(char):02x}" for char in "\n\r\0"}


@dataclass(slots=True)
class _Open:
    """An open bracket and its values."""

    bracket: str
    values: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)
    key: Any = _NOTHING  # the next entry's key
    num_commas: int = 0

    def add(self, value: Any) -> None:
        """Raises ValueError for a member of a set, which JSON cannot represent."""
        if self.bracket != "{":
            self.values.append(value)
        elif self.key is _NOTHING:
            raise ValueError
        else:
            self.entries[self.key], self.key = value, _NOTHING

    def value(self) -> Any:
        if self.bracket == "{":
            return self.entries
        return self.values[0] if self.bracket == "(" and self.values and not self.num_commas else self.values


class PythonLiteral:
    """One value, up to the comma or the bracket after it.

    Brackets and strings alone determine its end, so other expressions have an end too."""

    def __init__(self) -> None:
        self._at = self._token = 0  # position in the text, and where the current token starts
        self._quote = ""  # the open string's quote
        self._depth = 0  # brackets open
        self._is_literal = True  # so far
        self._brackets: list[_Open] = []
        self._value: Any = _NOTHING  # the last value, not yet in its bracket
        self._strings: list[str] = []  # its parts, if it is a string: adjacent strings are one

    def end(self, text: str, final: bool) -> int | None:
        """Return the end of the value in `text`; None while it continues. `text` begins with it and grows each time."""
        while True:
            mark = (_IN_STRING[self._quote] if self._quote else _MARK).search(text, self._at)
            if mark is None:
                # Half an escape, or some of three quotes, waits for the rest.
                kept = text[max(self._at, len(text) - 2) :]
                num_waiting = len(kept) - len(kept.rstrip("\\" + self._quote[:1])) if self._quote else 0
                self._at = max(self._at, len(text) - num_waiting)
                return None
            if self._quote:
                self._at = mark.end()
                if mark[0] == self._quote:
                    self._try(self._add_string, text[self._token : self._at])
                    self._quote, self._token = "", self._at
                continue
            char, at = mark[0], mark.start()
            if char in "'\"":
                opening = text[at : at + 3]
                if len(opening) < 3 and opening == char * len(opening) and not final:
                    self._at = at
                    return None
                self._quote = char * 3 if opening == char * 3 else char
                prefix = text[self._token : at].lstrip()
                self._is_literal = self._is_literal and prefix in _PREFIXES
                self._at, self._token = at + len(self._quote), at - len(prefix)
                continue
            self._try(self._add_word, text[self._token : at])
            if not self._depth and char in ",)]}":
                return at
            self._depth += (char in "([{") - (char in ")]}")
            self._try(self._add_mark, char)
            self._at = self._token = at + 1

    def json(self, text: str, types: frozenset[str]) -> str:
        """Return the JSON of the value with this text; other expressions become strings.

        A quoted value is parsed again if the parameter's schema does not allow a string."""
        value = self._taken()
        if self._is_literal and not self._brackets and value is not _NOTHING:
            try:
                if isinstance(value, str) and types and "string" not in types:
                    return as_json(value, types)
                return dumped(value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                pass
        return f'"{json_text(text)}"'

    def _try(self, add: Callable[[str], None], token: str) -> None:
        if self._is_literal:
            try:
                add(token)
            except (ValueError, SyntaxError, MemoryError):
                self._is_literal = False

    def _add_string(self, token: str) -> None:
        if self._value is not _NOTHING:
            raise ValueError
        try:
            self._strings.append(ast.literal_eval(token))
        except SyntaxError:  # models write lines within simple quotes
            self._strings.append(ast.literal_eval(token.translate(_CONTROLS)))

    def _add_word(self, token: str) -> None:
        """Add a name or a number. White space is ignored."""
        if word := token.strip():
            if self._strings:
                raise ValueError
            self._put(_NAMES[word] if word in _NAMES else _number(word))

    def _add_mark(self, char: str) -> None:
        if char in "([{":
            if self._strings or self._value is not _NOTHING:  # a call or an index
                raise ValueError
            self._brackets.append(_Open(char))
            return
        if not self._brackets:
            raise ValueError
        bracket, value = self._brackets[-1], self._taken()
        if char == ":":
            if bracket.bracket != "{" or bracket.key is not _NOTHING or isinstance(value, list | dict):
                raise ValueError
            bracket.key = value
            if value is _NOTHING:
                raise ValueError
            return
        if value is not _NOTHING:
            bracket.add(value)
        elif char == "," or bracket.key is not _NOTHING:
            raise ValueError
        if char == ",":
            bracket.num_commas += 1
            return
        if _CLOSES[char] != bracket.bracket:
            raise ValueError
        self._brackets.pop()
        self._put(bracket.value())

    def _put(self, value: Any) -> None:
        if self._value is not _NOTHING:
            raise ValueError
        self._value = value

    def _taken(self) -> Any:
        value = "".join(self._strings) if self._strings else self._value
        self._strings, self._value = [], _NOTHING
        return value


def _number(word: str) -> int | float:
    if (parts := _NUMBER.fullmatch(word)) is None:
        raise ValueError
    digits = parts[1] + parts[2]
    try:
        return int(digits, 0)
    except ValueError:
        if not {".", "e", "E"} & set(digits):
            raise
        return float(digits)
