"""Regular expressions as clients write them: the regular part of ECMA-262's syntax. The rest is refused by name."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from runtime.structured.pattern import (
    ALL,
    ANY_TEXT,
    FIRST_OF_SPECIAL,
    MAX_NESTING,
    MAX_REPEAT,
    MAX_STATES,
    NO_CHARACTER,
    Anchor,
    CharacterClass,
    Choice,
    GrammarError,
    Pattern,
    Ranges,
    Repeat,
    Sequence,
    parts_of,
    ranges,
    ranges_of,
    shown,
    size,
    without,
)

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD = ranges([*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_NARROW = {"d": _DIGIT, "w": _WORD, "s": ranges_of("\t\n\v\f\r ")}


@cache
def _wide(letter: str) -> Ranges:
    match letter:
        case "d":
            return ranges((c, c) for c in range(NO_CHARACTER) if chr(c).isdecimal())
        case "w":
            return ranges([*_WORD, (0x80, FIRST_OF_SPECIAL - 1)])
    return ranges((c, c) for c in range(0xFFFF) if chr(c).isspace() or c == 0xFEFF)


def _class_of(letter: str, wide: bool) -> Ranges:
    r"""Return the characters of \d, \w, \s or their opposites.

    ECMA-262 and Python differ beyond ASCII. An output has characters of both classes only. A negated set excludes
    either's characters: `wide`."""
    small = letter.lower()
    if letter == small:
        return _wide(small) if wide else _NARROW[small]
    return without(ALL, _NARROW[small] if wide else _wide(small))


_DOT = without(ALL, ranges_of("\n\r\u2028\u2029"))
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


@lru_cache(1024)
def whole(source: str) -> Pattern:
    """Return the pattern of the texts that an expression matches from end to end. Raises GrammarError."""
    return _read(source, ())


@lru_cache(1024)
def search(source: str) -> Pattern:
    """Return the pattern of the texts that an expression matches somewhere. Raises GrammarError."""
    return _read(source, (ANY_TEXT,))


def without_lookaheads(source: str) -> tuple[str, list[Pattern], list[Pattern]]:
    """Split an expression into the lookaheads behind its `^` and the rest after them.

    Returns the rest, the patterns that a text must also match, and the patterns that it must not match. Raises
    GrammarError."""
    must: list[Pattern] = []
    must_not: list[Pattern] = []
    at = 1
    while source.startswith("^") and source.startswith(("(?=", "(?!"), at):
        is_negative = source[at + 2] == "!"
        inner, at = _Parser(source, at + 3, is_negative).group()
        options = inner.parts if isinstance(inner, Choice) else (inner,)
        starts = tuple(_without_anchors(_from_start(option), (ANY_TEXT,)) for option in options)
        (must_not if is_negative else must).append(_checked(Choice(starts), source))
    if at == 1 or source[at : at + 1] in ("*", "+", "?", "{") or isinstance(_Parser(source[at:]).parse(), Choice):
        return source, [], []
    return "^" + source[at:], must, must_not


def _from_start(pattern: Pattern) -> Sequence:
    parts = pattern.parts if isinstance(pattern, Sequence) else (pattern,)
    return Sequence((Anchor(False), *parts[parts[:1] == (Anchor(False),) :]))


def _read(source: str, around: tuple[Pattern, ...]) -> Pattern:
    return _checked(_without_anchors(_Parser(source).parse(), around), source)


def _checked(pattern: Pattern, source: str) -> Pattern:
    if (states := size(pattern)) > MAX_STATES:
        raise GrammarError(f"has the pattern {shown(source)}, of {states} states; the limit is {MAX_STATES} states")
    return pattern


def _without_anchors(pattern: Pattern, around: tuple[Pattern, ...]) -> Pattern:
    """Remove `^` and `$` at the ends of each alternative; an end without one gets `around`."""
    if isinstance(pattern, Choice):
        return Choice(tuple(_without_anchors(part, around) for part in pattern.parts))
    parts = pattern.parts if isinstance(pattern, Sequence) else (pattern,)
    if len(parts) == 1 and isinstance(parts[0], Choice):
        return _without_anchors(parts[0], around)
    starts = bool(parts) and parts[0] == Anchor(False)
    ends = len(parts) > starts and parts[-1] == Anchor(True)
    inner = parts[starts : len(parts) - ends]
    if any(map(_has_anchor, inner)):
        raise GrammarError("has a pattern with ^ or $ inside; they are supported at its ends only")
    return Sequence((*(() if starts else around), *inner, *(() if ends else around)))


def _has_anchor(pattern: Pattern) -> bool:
    return isinstance(pattern, Anchor) or any(map(_has_anchor, parts_of(pattern)))


_CODES = {
    "x": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{2})"),
    "u": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})"),
}
_COUNT = re.compile(r"\{(\d{1,9})(,?)(\d{0,9})\}")


class _Parser:
    """A recursive-descent parser of one expression."""

    def __init__(self, source: str, at: int = 0, is_negated: bool = False) -> None:
        """`is_negated` if texts that match are excluded, as in a negative lookahead."""
        self._source = source
        self._at = at
        self._depth = 0
        self._is_negated = is_negated

    def parse(self) -> Pattern:
        pattern = self._alternation()
        if self._at < len(self._source):
            raise self._error("has a ')' too many")
        return pattern

    def group(self) -> tuple[Pattern, int]:
        """Read up to the ")" that closes the group before; return the pattern and the offset behind."""
        pattern = self._alternation()
        if not self._skip(")"):
            raise self._error("leaves a group open")
        return pattern, self._at

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"has the pattern {shown(self._source)}, which {problem}")

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        if not (char := self._peek()):
            raise self._error("ends too early")
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _alternation(self) -> Pattern:
        parts = [self._concatenation()]
        while self._skip("|"):
            parts.append(self._concatenation())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _concatenation(self) -> Pattern:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repetition(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repetition(self, part: Pattern) -> Pattern:
        while True:
            least, most = 0, None
            if self._skip("+"):
                least = 1
            elif self._skip("?"):
                most = 1
            elif count := _COUNT.match(self._source, self._at):
                self._at = count.end()
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
            self._skip("?")  # a lazy quantifier matches the same texts
            part = Repeat(part, least, most)

    def _atom(self) -> Pattern:
        match char := self._take():
            case "(":
                return self._group()
            case "[":
                return CharacterClass(self._set())
            case ".":
                return CharacterClass(without(ALL, ranges_of("\n")) if self._is_negated else _DOT)
            case "^" | "$":
                return Anchor(char == "$")
            case "\\":
                return CharacterClass(self._escape())
            case "*" | "+" | "?":
                raise self._error(f"has a {char!r} with nothing to repeat")
        return CharacterClass(ranges_of(char))

    def _group(self) -> Pattern:
        if self._skip("?"):
            if any(map(self._skip, ("=", "!", "<=", "<!"))):
                raise self._error("looks ahead or behind, which is not supported")
            if self._skip("<") or self._skip("P<"):
                while self._take() != ">":
                    pass
            elif not self._skip(":"):
                raise self._error("has a group with flags, which are not supported")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"nests groups deeper than the limit of {MAX_NESTING}")
        inner, _ = self.group()
        self._depth -= 1
        return inner

    def _set(self) -> Ranges:
        outside, is_negated = self._is_negated, self._skip("^")
        self._is_negated = is_negated != outside
        pairs: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._set_item()
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                high = self._set_item()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)):
                    pairs += [*low, *ranges_of("-"), *high]  # next to a class such as \d, a hyphen is a character
                elif low[0][0] > high[0][1]:
                    raise self._error("has a range in brackets that is none")
                else:
                    pairs.append((low[0][0], high[0][1]))
            else:
                pairs += low
        self._is_negated = outside
        return without(ALL, ranges(pairs)) if is_negated else without(ranges(pairs), without(((0, NO_CHARACTER),), ALL))

    def _set_item(self) -> Ranges:
        if (char := self._take()) != "\\":
            return ranges_of(char)
        return ranges_of("\b") if self._skip("b") else self._escape()

    def _escape(self) -> Ranges:
        char = self._take()
        if char in "dwsDWS":
            return _class_of(char, self._is_negated)
        if char in _CONTROLS and not (char == "0" and self._peek().isdigit()):
            return ranges_of(_CONTROLS[char])
        if char in "xu":
            if found := _CODES[char].match(self._source, self._at):
                self._at = found.end()
                code = int(found[1] or found[2], 16)
                if code < FIRST_OF_SPECIAL and not 0xD800 <= code <= 0xDFFF:
                    return ((code, code),)
        elif not char.isalnum():
            return ranges_of(char)
        problem = "refers back to a group" if char.isdigit() or char == "k" else f"has the escape \\{char}"
        raise self._error(f"{problem}, which is not supported")
