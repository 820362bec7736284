"""Patterns: texts as trees of character classes, and the regular expressions that they are written as.

A language has two spellings in an output: plain, or between the quotes of a JSON string. In a JSON string each
character has exactly one form (`\\n` is an escape, `é` stands for itself), so lengths and patterns count characters.
The written expressions use the Rust syntax that llguidance and outlines-core share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Generic, TypeVar

from runtime.base.types import CallboardError

MAX_REPEAT = 10_000  # limit for one quantifier, minLength, maxLength
MAX_STATES = 50_000  # states in a pattern with its repetitions written out
MAX_NESTING = 60  # nested groups


class GrammarError(CallboardError):
    """A grammar that cannot be enforced. The text is a predicate; its subject is the grammar."""


Ranges = tuple[tuple[int, int], ...]  # code points, sorted and disjoint, both ends included


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and merge ranges of code points."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def without(these: Ranges, those: Ranges) -> Ranges:
    """Return the characters of `these` that are not in `those`."""
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


def ranges_of(chars: str) -> Ranges:
    """Return the ranges of some characters."""
    return ranges((ord(c), ord(c)) for c in chars)


NO_CHARACTER = 0x10FFFF  # no text contains it: it ends a text for outlines-core
# No text contains the last 64 characters either. Their encodings share three bytes. Special tokens are written in them.
FIRST_OF_SPECIAL = 0x10FFC0
_DIGITS, _NUM_DIGITS = 62, 4  # digits of a special token's number; each digit is one character
ALL: Ranges = ((0, 0xD7FF), (0xE000, FIRST_OF_SPECIAL - 1))  # all characters but surrogates


def special_text(token_id: int) -> str:
    """Return the text that stands for a special token in an expression for outlines-core."""
    digits = (token_id // _DIGITS**i % _DIGITS for i in range(_NUM_DIGITS))
    return "".join(chr(FIRST_OF_SPECIAL + digit) for digit in digits)


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """Any one of these characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`; no pattern outside the reader of regular expressions has one."""

    at_end: bool


# ---- trees: patterns, and rules (rules.py), which have other leaves -------------------------------------------------

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Sequence(Generic[T_co]):
    parts: tuple[T_co, ...]


@dataclass(frozen=True, slots=True)
class Choice(Generic[T_co]):
    parts: tuple[T_co, ...]


@dataclass(frozen=True, slots=True)
class Repeat(Generic[T_co]):
    part: T_co
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Name:
    """The rule with this name; among patterns, only grammars have one."""

    name: str


def parts_of(tree: T) -> tuple[T, ...]:
    """Return the trees that a tree is made of; none for a leaf."""
    node: Any = tree
    return (node.part,) if isinstance(node, Repeat) else node.parts if isinstance(node, Sequence | Choice) else ()


def mapped(tree: T, change: Callable[[T], T]) -> T:
    """Return a tree with each leaf changed."""
    node: Any = tree
    match node:
        case Sequence(parts) | Choice(parts):
            node = type(node)(tuple(mapped(part, change) for part in parts))
        case Repeat(part, least, most):
            node = Repeat(mapped(part, change), least, most)
        case leaf:
            node = change(leaf)
    result: T = node
    return result


def names_in(tree: Any) -> Iterator[str]:
    """Yield the names of the rules that a tree refers to."""
    if isinstance(tree, Name):
        yield tree.name
    for part in parts_of(tree):
        yield from names_in(part)


# ---- patterns --------------------------------------------------------------------------------------------------------

Pattern = CharacterClass | Sequence["Pattern"] | Choice["Pattern"] | Repeat["Pattern"] | Anchor | Name
ANY_TEXT = Repeat(CharacterClass(ALL), 0, None)


def literal(text: str) -> Sequence:
    """Return the pattern of one text."""
    return Sequence(tuple(CharacterClass(ranges_of(c)) for c in text))


def any_of(options: Iterable[Pattern]) -> Pattern:
    """Return the pattern of texts that match any option."""
    found = tuple(options)
    return found[0] if len(found) == 1 else Choice(found)


def size(pattern: Pattern) -> int:
    """Return about how many states an automaton of the pattern has."""
    match pattern:
        case CharacterClass():
            return 1
        case Sequence(parts) | Choice(parts):
            return sum(map(size, parts)) + 1
        case Repeat(part, least, most):
            return size(part) * max(least if most is None else most, 1)
    return 0


def in_any_case(pattern: Pattern) -> Pattern:
    """Return a pattern in which ASCII letters match in both cases."""

    def widen(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, CharacterClass):
            return leaf
        cased = [
            (max(low, first) + shift, min(high, first + 25) + shift)
            for low, high in leaf.ranges
            for first, shift in ((65, 32), (97, -32))
            if max(low, first) <= min(high, first + 25)
        ]
        return CharacterClass(ranges((*leaf.ranges, *cased)))

    return mapped(pattern, widen)


# ---- writing ---------------------------------------------------------------------------------------------------------

_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # JSON requires an escape for these


def plain(pattern: Pattern) -> str:
    """Return the regular expression of a pattern's texts."""
    match pattern:
        case CharacterClass(these):
            return _class(these)
        case Sequence(parts):
            return "".join(map(plain, parts))
        case Choice(parts):
            return "(?:" + "|".join(map(plain, parts)) + ")"
        case Repeat(part, least, most):
            inner = plain(part)
            return f"(?:{inner}){{{least},{'' if most is None else most}}}" if inner else ""
    raise AssertionError(pattern)


@lru_cache(1024)
def quoted(pattern: Pattern) -> str:
    """Return the regular expression of a pattern's texts as JSON strings."""
    return '"' + plain(escaped(pattern)) + '"'


def escaped(pattern: Pattern) -> Pattern:
    """Return a pattern for the same texts between a JSON string's quotes."""
    return mapped(pattern, lambda leaf: _json_form(leaf.ranges) if isinstance(leaf, CharacterClass) else leaf)


def literal_text(text: str) -> str:
    """Return the regular expression of one text."""
    return "".join(map(_char, map(ord, text)))


def literal_string(text: str) -> str:
    """Return the regular expression of one text as a JSON string."""
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
    ends: dict[str, str] = {}  # last characters of escapes, by the characters before
    for low, high in these:
        for form in (json.dumps(chr(code))[1:-1] for code in range(low, min(high, 0x5C) + 1)):
            ends[form[:-1]] = ends.get(form[:-1], "") + form[-1]
    ends.pop("", None)  # characters without an escape
    options = [Sequence((*literal(start).parts, CharacterClass(ranges_of(last)))) for start, last in ends.items()]
    plain_chars = CharacterClass(without(these, _ESCAPED))
    return Choice((*([plain_chars] * bool(plain_chars.ranges)), *options)) if ends else plain_chars


@lru_cache(4096)
def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def shown(value: object) -> str:
    """Return a client's value as a message shows it, cut to 60 characters."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
