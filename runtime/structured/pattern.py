"""Regular expressions, read and written again: what every engine agrees about, and nothing else.

`parse` takes the part of ECMA-262's syntax that describes regular languages and refuses the rest by name. `Written`
says how a language of texts is spelled in the output: as it stands, or between the quotes of a JSON string, where each
character has exactly one form (`\\n` is an escape, `é` is itself), so that lengths and patterns mean characters. The
regular expressions that come out are in the Rust syntax that llguidance and outlines-core share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from json.encoder import encode_basestring

from runtime.spec.types import CallboardError

MAX_REPEAT = 10_000  # of one quantifier, minLength, maxLength
MAX_STATES = 50_000  # of a pattern with its repetitions written out
MAX_NESTING = 60  # of groups


class GrammarError(CallboardError):
    """A grammar that cannot be enforced. The text is a predicate: what names the grammar goes before it."""


Ranges = tuple[tuple[int, int], ...]  # code points, sorted and apart, both ends included


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def without(these: Ranges, those: Ranges) -> Ranges:
    """`these` characters but not `those`."""
    left: list[tuple[int, int]] = []
    for low, high in these:
        for start, end in those:
            if start > high or end < low:
                continue
            if start > low:
                left.append((low, start - 1))
            low = end + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)


def _of(chars: str) -> Ranges:
    return ranges((ord(c), ord(c)) for c in chars)


NO_CHARACTER = 0x10FFFF  # is never written: it means the end of a text to the eager engine
ALL: Ranges = ((0, 0xD7FF), (0xE000, NO_CHARACTER - 1))  # surrogates are no characters
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD = ranges([*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_NARROW = {"d": _DIGIT, "w": _WORD, "s": _of("\t\n\v\f\r ")}


@cache
def _wide(letter: str) -> Ranges:
    match letter:
        case "d":
            return ranges((c, c) for c in range(NO_CHARACTER) if chr(c).isdecimal())
        case "w":
            return ranges([*_WORD, (0x80, NO_CHARACTER)])
    return ranges((c, c) for c in range(0xFFFF) if chr(c).isspace() or c == 0xFEFF)


def _class_of(letter: str, wide: bool) -> Ranges:
    """The characters of \\d, \\w, \\s and their opposites.

    ECMA's and Python's differ beyond ASCII. What is written is in both; `wide` is what is in either, which a "[^" takes
    away."""
    small = letter.lower()
    if letter == small:
        return _wide(small) if wide else _NARROW[small]
    return without(ALL, _NARROW[small] if wide else _wide(small))


_DOT = without(ALL, _of("\n\r\u2028\u2029"))
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """Any one of these characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    part: Pattern
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The places where a pattern is tied to the beginning (^) or the end ($) of the text."""

    at_end: bool


@dataclass(frozen=True, slots=True)
class Reference:
    name: str  # of a rule: patterns of grammars have them, those of texts do not


Pattern = CharacterClass | Concatenation | Alternation | Repetition | Anchor | Reference
ANY_TEXT = Repetition(CharacterClass(ALL), 0, None)


def literal(text: str) -> Concatenation:
    return Concatenation(tuple(CharacterClass(_of(c)) for c in text))


def size(pattern: Pattern) -> int:
    """About how many states an automaton of it has."""
    match pattern:
        case CharacterClass():
            return 1
        case Concatenation(parts) | Alternation(parts):
            return sum(map(size, parts)) + 1
        case Repetition(part, least, most):
            return size(part) * max(least if most is None else most, 1)
    return 0


@lru_cache(1024)
def whole(source: str) -> Pattern:
    """A pattern that must match all of a text; raises GrammarError."""
    return _checked(_anchored(_Parser(source).parse(), ()), source)


@lru_cache(1024)
def search(source: str) -> Pattern:
    """A pattern that must match somewhere in a text, as JSON Schema means it; raises GrammarError."""
    return _checked(_anchored(_Parser(source).parse(), (ANY_TEXT,)), source)


def without_lookaheads(source: str) -> tuple[str, list[Pattern], list[Pattern]]:
    """A pattern without the lookaheads that follow its `^`: what is left of it, what a text must match beside it, and
    what it must not. Raises GrammarError."""
    must: list[Pattern] = []
    must_not: list[Pattern] = []
    at = 1
    while source.startswith("^") and source.startswith(("(?=", "(?!"), at):
        negative = source[at + 2] == "!"
        parser = _Parser(source, at + 3, negative)
        inner = parser.group()
        options = inner.parts if isinstance(inner, Alternation) else (inner,)
        starts = tuple(_anchored(_from_start(option), (ANY_TEXT,)) for option in options)
        (must_not if negative else must).append(_checked(Alternation(starts), source))
        at = parser.at
    if at == 1 or source[at : at + 1] in ("*", "+", "?", "{") or isinstance(_Parser(source[at:]).parse(), Alternation):
        return source, [], []
    return "^" + source[at:], must, must_not


def _from_start(pattern: Pattern) -> Concatenation:
    parts = pattern.parts if isinstance(pattern, Concatenation) else (pattern,)
    return Concatenation((Anchor(False), *parts[parts[:1] == (Anchor(False),) :]))


def _checked(pattern: Pattern, source: str) -> Pattern:
    if (states := size(pattern)) > MAX_STATES:
        raise GrammarError(f"has the pattern {shown(source)}, of {states} states; the limit is {MAX_STATES} states")
    return pattern


def _anchored(pattern: Pattern, around: tuple[Pattern, ...]) -> Pattern:
    """Without its edges; each alternative gets `around` on the sides that are not tied."""
    if isinstance(pattern, Alternation):
        return Alternation(tuple(_anchored(part, around) for part in pattern.parts))
    parts = pattern.parts if isinstance(pattern, Concatenation) else (pattern,)
    if len(parts) == 1 and isinstance(parts[0], Alternation):
        return _anchored(parts[0], around)
    starts = bool(parts) and parts[0] == Anchor(False)
    ends = len(parts) > starts and parts[-1] == Anchor(True)
    inner = parts[starts : len(parts) - ends]
    if any(map(_has_anchor, inner)):
        raise GrammarError("has a pattern with ^ or $ inside; they are supported at its ends only")
    return Concatenation((*(() if starts else around), *inner, *(() if ends else around)))


def _has_anchor(pattern: Pattern) -> bool:
    match pattern:
        case Concatenation(parts) | Alternation(parts):
            return any(map(_has_anchor, parts))
        case Repetition(part):
            return _has_anchor(part)
    return isinstance(pattern, Anchor)


_CODES = {
    "x": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{2})"),
    "u": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})"),
}
_COUNT = re.compile(r"\{(\d{1,9})(,?)(\d{0,9})\}")


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, source: str, at: int = 0, negated: bool = False) -> None:
        self._source = source
        self.at = at
        self._depth = 0
        self._negated = negated  # what it matches is taken away, as within "[^"

    def parse(self) -> Pattern:
        pattern = self._alternation()
        if self.at < len(self._source):
            raise self._error("has a ')' too many")
        return pattern

    def group(self) -> Pattern:
        """Parses up to the next ")" that closes no group of its own."""
        pattern = self._alternation()
        if not self._skip(")"):
            raise self._error("leaves a group open")
        return pattern

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"has the pattern {shown(self._source)}, which {problem}")

    def _peek(self) -> str:
        return self._source[self.at : self.at + 1]

    def _take(self) -> str:
        if not (char := self._peek()):
            raise self._error("ends too early")
        self.at += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _alternation(self) -> Pattern:
        parts = [self._concatenation()]
        while self._skip("|"):
            parts.append(self._concatenation())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _concatenation(self) -> Pattern:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repetition(self._atom()))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _repetition(self, part: Pattern) -> Pattern:
        while True:
            least, most = 0, None
            if self._skip("+"):
                least = 1
            elif self._skip("?"):
                most = 1
            elif count := _COUNT.match(self._source, self.at):
                self.at = count.end()
                least = int(count[1])
                most = int(count[3]) if count[3] else None if count[2] else least
            elif not self._skip("*"):
                return part
            if max(least, most or 0) > MAX_REPEAT:
                raise self._error(f"repeats {max(least, most or 0)} times; the limit is {MAX_REPEAT} repetitions")
            if most is not None and most < least:
                raise self._error(f"repeats at least {least} and at most {most} times")
            if isinstance(part, Anchor):
                raise self._error("repeats ^ or $")
            self._skip("?")  # which match is preferred does not change what matches
            part = Repetition(part, least, most)

    def _atom(self) -> Pattern:
        match char := self._take():
            case "(":
                return self._group()
            case "[":
                return CharacterClass(self._set())
            case ".":
                return CharacterClass(without(ALL, _of("\n")) if self._negated else _DOT)
            case "^" | "$":
                return Anchor(char == "$")
            case "\\":
                return CharacterClass(self._escape())
            case "*" | "+" | "?":
                raise self._error(f"has a {char!r} with nothing to repeat")
        return CharacterClass(_of(char))

    def _group(self) -> Pattern:
        if self._skip("?"):
            for mark in ("=", "!", "<=", "<!"):
                if self._skip(mark):
                    raise self._error("looks ahead or behind, which is not supported")
            if self._skip("<") or self._skip("P<"):
                while self._take() != ">":
                    pass
            elif not self._skip(":"):
                raise self._error("has a group with flags, which are not supported")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"nests groups deeper than the limit of {MAX_NESTING}")
        inner = self.group()
        self._depth -= 1
        return inner

    def _set(self) -> Ranges:
        outside, negated = self._negated, self._skip("^")
        self._negated = negated != outside
        pairs: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._set_item()
            if self._peek() == "-" and self._source[self.at + 1 : self.at + 2] not in ("]", ""):
                self._take()
                high = self._set_item()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)):
                    pairs += [*low, *_of("-"), *high]  # of a class there is no range: the hyphen is itself
                elif low[0][0] > high[0][1]:
                    raise self._error("has a range in brackets that is none")
                else:
                    pairs.append((low[0][0], high[0][1]))
            else:
                pairs += low
        self._negated = outside
        return without(ALL, ranges(pairs)) if negated else without(ranges(pairs), without(((0, NO_CHARACTER),), ALL))

    def _set_item(self) -> Ranges:
        if (char := self._take()) != "\\":
            return _of(char)
        return _of("\b") if self._skip("b") else self._escape()

    def _escape(self) -> Ranges:
        char = self._take()
        if char in "dwsDWS":
            return _class_of(char, self._negated)
        if char in _CONTROLS and not (char == "0" and self._peek().isdigit()):
            return _of(_CONTROLS[char])
        if char in "xu":
            if found := _CODES[char].match(self._source, self.at):
                self.at = found.end()
                code = int(found[1] or found[2], 16)
                if code < NO_CHARACTER and not 0xD800 <= code <= 0xDFFF:
                    return ((code, code),)
        elif not char.isalnum():
            return _of(char)
        problem = "refers back to a group" if char.isdigit() or char == "k" else f"has the escape \\{char}"
        raise self._error(f"{problem}, which is not supported")


# ---- writing ---------------------------------------------------------------------------------------------------------

_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # what JSON does not let stand for itself


def plain(pattern: Pattern) -> str:
    """The regular expression of the texts of a pattern as they stand."""
    match pattern:
        case CharacterClass(these):
            return _class(these)
        case Concatenation(parts):
            return "".join(map(plain, parts))
        case Alternation(parts):
            return "(?:" + "|".join(map(plain, parts)) + ")"
        case Repetition(part, least, most):
            inner = plain(part)
            return f"(?:{inner}){{{least},{'' if most is None else most}}}" if inner else ""
    raise AssertionError(pattern)  # edges are gone by now


@lru_cache(1024)
def quoted(pattern: Pattern) -> str:
    """The regular expression of the texts of a pattern as JSON strings."""
    return '"' + plain(escaped(pattern)) + '"'


def escaped(pattern: Pattern) -> Pattern:
    """The pattern of the same texts as they stand in JSON strings."""
    match pattern:
        case CharacterClass(these):
            return _json_form(these)
        case Concatenation(parts) | Alternation(parts):
            return type(pattern)(tuple(map(escaped, parts)))
        case Repetition(part, least, most):
            return Repetition(escaped(part), least, most)
    return pattern


def literal_text(text: str) -> str:
    """The regular expression of one text."""
    return "".join(map(_char, map(ord, text)))


def literal_string(text: str) -> str:
    """The regular expression of one text as a JSON string."""
    return literal_text(encode_basestring(text))


@lru_cache(4096)
def _class(these: Ranges) -> str:
    if not these:
        raise GrammarError("has a pattern with an empty set of characters, which nothing matches")
    if len(these) == 1 and these[0][0] == these[0][1]:
        return _char(these[0][0])
    return "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in these) + "]"


@lru_cache(4096)
def _json_form(these: Ranges) -> Pattern:
    ends: dict[str, str] = {}  # the last characters of escapes, by those before
    for low, high in these:
        for form in (json.dumps(chr(code))[1:-1] for code in range(low, min(high, 0x5C) + 1)):
            ends[form[:-1]] = ends.get(form[:-1], "") + form[-1]
    ends.pop("", None)  # of characters that stand for themselves
    options = [Concatenation((*literal(start).parts, CharacterClass(_of(last)))) for start, last in ends.items()]
    plain_chars = CharacterClass(without(these, _ESCAPED))
    return Alternation((*([plain_chars] * bool(plain_chars.ranges)), *options)) if ends else plain_chars


@lru_cache(4096)
def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def shown(value: object) -> str:
    """A value of the client's as a message may show it."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
