"""Tokens of a grammar text, and errors that show a token's place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.structured.pattern import GrammarError, Pattern, shown
from runtime.structured.readers.regex import whole

COUNT = r"\{\s*\d*\s*(?:,\s*\d*\s*)?\}"
STRING = r'"(?:\\.|[^"\\\n])*"'


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # name of the group that matches it; "end" after the last one
    text: str
    at: int  # offset in the grammar's text
    begins_line: bool


def tokens_of(text: str, forms: re.Pattern[str]) -> list[Token]:
    """Cut a text into tokens, each a group of `forms`; the group `space` is left out. Raises GrammarError."""
    found: list[Token] = []
    at, begins_line = 0, True
    while at < len(text):
        if not (match := forms.match(text, at)):
            raise error_at(text, f"has {shown(text[at : at + 10])}, which is not understood,", at)
        if match.lastgroup == "space":
            begins_line = begins_line or "\n" in match[0]
        else:
            found.append(Token(str(match.lastgroup), match[0], at, begins_line))
            begins_line = False
        at = match.end()
    found.append(Token("end", "", at, True))
    return found


def error_at(text: str, problem: str, at: int) -> GrammarError:
    """Return the error for a problem at an offset in a grammar's text."""
    line = text.count("\n", 0, at) + 1
    return GrammarError(f"{problem} at line {line}, column {at - text.rfind(chr(10), 0, at)}")


def pattern_at(text: str, source: str, at: int) -> Pattern:
    """Read a regular expression that stands at an offset of a grammar's text. Raises GrammarError."""
    try:
        return whole(source)
    except GrammarError as e:
        raise error_at(text, f"{e},", at) from None


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def string_at(text: str, quoted: str, at: int) -> str:
    """Return the text of a string token, without its quotes and escapes. Raises GrammarError."""

    def char(match: re.Match[str]) -> str:
        if match[4] is None:
            return chr(int(match[1] or match[2] or match[3], 16))
        if match[4].isalnum() and match[4] not in _ESCAPES:
            raise ValueError(match[0])
        return _ESCAPES.get(match[4], match[4])

    try:
        found = _ESCAPE.sub(char, quoted[1:-1])
        found.encode()
    except ValueError as e:  # an unknown escape, or half of a surrogate pair
        raise error_at(text, f"has the string {shown(quoted)} with a wrong escape ({shown(str(e))})", at) from None
    return found
