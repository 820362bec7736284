"""Calls of custom tools, with a text as argument. Models write them as function calls with one string, `input`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace

from runtime.text.tool_calls.parser import CallDelta

_HEAD, _HEAD_CHARS = re.compile(r'\s*\{\s*"input"\s*:\s*"'), '{"input":"'
_MAX_HEAD_CHARS = 256
_HALF, _OTHER_HALF = r"\\u[dD][89abAB][\da-fA-F]{2}", r"\\u[dD][c-fC-F][\da-fA-F]{2}"
_PIECE = re.compile(rf'[^"\\]+|{_HALF}{_OTHER_HALF}|\\u(?![dD][89abAB])[\da-fA-F]{{4}}|\\[^u]', re.DOTALL)
_LONGEST_ESCAPE, _ESCAPE = 12, 6  # characters in a pair, and in each half


class CustomInputs:
    """Turns such calls' pieces into pieces of text."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the custom tools; other calls pass unchanged."""
        self._names = names
        self._text: _InputText | None = None  # the current call's text; None if it is not custom

    def push(self, calls: list[CallDelta]) -> list[CallDelta]:
        given: list[CallDelta] = []
        for call in calls:
            if call.name:
                self._text = _InputText() if call.name in self._names else None
            text = call.arguments if self._text is None else self._text.push(call.arguments)
            if call.name or text:
                given.append(replace(call, arguments=text, is_custom=self._text is not None))
        return given


class _InputText:
    """Reads the text out of `{"input": "…"}` as it comes. Other arguments are taken as the text."""

    def __init__(self) -> None:
        self._held = ""
        self._state = self._head

    def push(self, arguments: str) -> str:
        self._held += arguments
        return self._state()

    def _head(self) -> str:
        if head := _HEAD.match(self._held):
            self._held = self._held[head.end() :]
            self._state = self._string
        elif len(self._held) > _MAX_HEAD_CHARS or not _HEAD_CHARS.startswith("".join(self._held.split())):
            self._state = self._raw
        else:
            return ""
        return self._state()

    def _raw(self) -> str:
        text, self._held = self._held, ""
        return text

    def _string(self) -> str:
        text, at, given = self._held, 0, list[str]()
        while at < len(text):
            if text[at] == '"':
                self._state = self._ended
                break
            if piece := _PIECE.match(text, at):
                end = piece.end()
            elif len(text) - at < _LONGEST_ESCAPE:
                break  # an escape's rest has not arrived
            else:
                end = at + _ESCAPE  # half a character, or no escape
            given.append(_unescaped(text[at:end]))
            at = end
        self._held = text[at:]
        return "".join(given)

    def _ended(self) -> str:
        return ""


def _unescaped(piece: str) -> str:
    """Return a piece of a JSON string as text. Lone surrogates become "?"; invalid escapes stay unchanged."""
    try:
        return str(json.loads(f'"{piece}"', strict=False)).encode("utf-8", "replace").decode()
    except ValueError:
        return piece
