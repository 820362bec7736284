"""Context-free grammars over characters as rules that llguidance reads exactly.

llguidance cuts a text into terminals before it parses, and each goes on as far as it can: of `[a-z]+ "."` and
`[a-z]+ "end"` it never finds the second, whose letters the first terminal takes all. So a terminal is a region of the
grammar without recursion, as large as there is, and where such a cut could still miss a text the terminal is taken
apart, down to single characters, which can be cut in one way only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.structured.pattern import (
    Alternation,
    Concatenation,
    Pattern,
    Reference,
    Repetition,
    plain,
    size,
)
from runtime.structured.readers.ambiguity import misleading
from runtime.structured.rules import NOTHING, Choice, Name, Repeat, Rule, Sequence, Terminal, choice, optional, terminal

_MAX_REGION = 2_000  # states of one terminal; what is larger stays in rules of its own
_MAX_FILLED = 100  # states of a pattern that is written anew without the empty text


def rules_of(grammar: Mapping[str, Pattern], start: str, prefix: str = "") -> dict[str, Rule]:
    """The rules of a grammar whose references all lead somewhere; the first one is `prefix` + "start"."""
    regions = _Regions(grammar)
    if (whole := regions.regular.get(start)) is not None:
        return {f"{prefix}start": terminal(plain(whole))}
    names = {start: f"{prefix}start"} | {
        name: f"{prefix}g{i}" for i, name in enumerate(grammar) if name != start and name not in regions.regular
    }
    terminals: dict[Terminal, Pattern] = {}
    written = {names[name]: _rule(regions.substituted(grammar[name], name), names, terminals) for name in names}
    while split := misleading(written, f"{prefix}start", terminals):
        parts = {each: _taken_apart(terminals[each], terminals) for each in split}
        written = {name: _replaced(rule, parts) for name, rule in written.items()}
    return written


class _Regions:
    """Finds the rules that need no recursion, to which a loop at one end of a rule can be rewritten."""

    def __init__(self, grammar: Mapping[str, Pattern]) -> None:
        self.regular: dict[str, Pattern] = {}
        self._grammar, self._sizes = grammar, dict[str, int]()
        self._open: set[str] = set()
        self._closed: set[str] = set()
        for name in grammar:
            self._visit(name)

    def substituted(self, pattern: Pattern, name: str = "") -> Pattern:
        """A pattern with regular rules in the places of their references; all of the rule `name` if it is one."""
        if name in self.regular:
            return self.regular[name]
        match pattern:
            case Reference(to):
                return self.regular.get(to, pattern)
            case Concatenation(parts):
                return Concatenation(tuple(map(self.substituted, parts)))
            case Alternation(parts):
                return Alternation(tuple(map(self.substituted, parts)))
            case Repetition(part, least, most):
                return Repetition(self.substituted(part), least, most)
        return pattern

    def _visit(self, name: str) -> None:
        if name in self._open or name in self._closed:
            return
        self._open.add(name)
        body = self._grammar[name]
        others = set(_references(body)) - {name}
        for other in others:
            self._visit(other)
        self._open.discard(name)
        self._closed.add(name)
        if others <= self.regular.keys() and (size := self._size(body)) <= _MAX_REGION:
            found = _without_loop(self.substituted(body), name)
            if found is not None:
                self.regular[name], self._sizes[name] = found, 2 * size

    def _size(self, pattern: Pattern) -> int:
        match pattern:
            case Reference(to):
                return self._sizes.get(to, 1)
            case Concatenation(parts) | Alternation(parts):
                return sum(map(self._size, parts)) + 1
            case Repetition(part, least, most):
                return self._size(part) * max(least if most is None else most, 1)
        return 1


def _references(pattern: Pattern) -> Iterable[str]:
    match pattern:
        case Reference(name):
            yield name
        case Concatenation(parts) | Alternation(parts):
            for part in parts:
                yield from _references(part)
        case Repetition(part):
            yield from _references(part)


def _is_free(pattern: Pattern) -> bool:
    return next(iter(_references(pattern)), None) is None


def _without_loop(body: Pattern, name: str) -> Pattern | None:
    """A rule's body, in which only its own `name` is referred to, as a pattern; None if there is no simple one."""
    if _is_free(body):
        return body
    options = [option.parts if isinstance(option, Concatenation) else (option,) for option in _options(body)]
    for side in (-1, 0):
        again: list[Pattern] = []
        ends: list[Pattern] = []
        for parts in options:
            rest = parts[:-1] if side else parts[1:]
            match parts[side] if parts else None:
                case Reference():
                    again.append(Concatenation(rest))
                case Repetition(Reference(), 0, 1):
                    again.append(Concatenation(rest))
                    ends.append(Concatenation(rest))
                case _:
                    ends.append(Concatenation(parts))
        if ends and all(map(_is_free, (*again, *ends))):
            loop = Repetition(Alternation(tuple(again)), 0, None)
            end = Alternation(tuple(ends))
            return Concatenation((loop, end) if side else (end, loop))
    return None


def _options(pattern: Pattern) -> Iterable[Pattern]:
    if isinstance(pattern, Alternation):
        for part in pattern.parts:
            yield from _options(part)
    elif isinstance(pattern, Concatenation) and len(pattern.parts) == 1:
        yield from _options(pattern.parts[0])
    else:
        yield pattern


# ---- rules -----------------------------------------------------------------------------------------------------------


def _rule(pattern: Pattern, names: Mapping[str, str], terminals: dict[Terminal, Pattern]) -> Rule:
    """A pattern whose largest parts without references are terminals."""
    if _is_free(pattern):
        return _region(pattern, terminals)
    match pattern:
        case Reference(name):
            return Name(names[name])
        case Concatenation(parts):
            written: list[Rule] = []
            run: list[Pattern] = []
            for part in parts:
                if _is_free(part):
                    run.append(part)
                    continue
                if run:
                    written.append(_region(Concatenation(tuple(run)), terminals))
                    run = []
                written.append(_rule(part, names, terminals))
            if run:
                written.append(_region(Concatenation(tuple(run)), terminals))
            return Sequence(tuple(written))
        case Alternation(parts):
            free = tuple(part for part in parts if _is_free(part))
            others = [_rule(part, names, terminals) for part in parts if not _is_free(part)]
            return choice([*others, *([_region(Alternation(free), terminals)] if free else [])])
        case Repetition(part, least, most):
            return Repeat(_rule(part, names, terminals), least, most) if most != 0 else NOTHING
    raise AssertionError(pattern)


def _region(pattern: Pattern, terminals: dict[Terminal, Pattern]) -> Rule:
    """A terminal of the pattern's texts; the empty text is none of a terminal's."""
    may_be_empty = _may_be_empty(pattern)
    if may_be_empty and size(pattern) <= _MAX_FILLED:
        if (filled := _filled(pattern)) is None:
            return NOTHING
        pattern = filled
        found = terminal(plain(pattern))
    else:
        found = Terminal((plain(pattern), "(?s:.+)")) if may_be_empty else terminal(plain(pattern))
    terminals[found] = pattern
    return optional(found) if may_be_empty else found


def _taken_apart(pattern: Pattern, terminals: dict[Terminal, Pattern]) -> Rule:
    match pattern:
        case Concatenation((part,)) | Alternation((part,)):
            return _taken_apart(part, terminals)
        case Concatenation(parts):
            return Sequence(tuple(_region(part, terminals) for part in parts))
        case Alternation(parts):
            return choice(_region(part, terminals) for part in parts)
        case Repetition(part, least, most):
            return Repeat(_region(part, terminals), least, most)
    raise AssertionError(pattern)  # a single character is never cut wrongly


def _replaced(rule: Rule, parts: Mapping[Terminal, Rule]) -> Rule:
    match rule:
        case Terminal():
            return parts.get(rule, rule)
        case Sequence(inner):
            return Sequence(tuple(_replaced(part, parts) for part in inner))
        case Choice(inner):
            return Choice(tuple(_replaced(part, parts) for part in inner))
        case Repeat(part, least, most):
            return Repeat(_replaced(part, parts), least, most)
    return rule


def _may_be_empty(pattern: Pattern) -> bool:
    match pattern:
        case Concatenation(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(parts):
            return any(map(_may_be_empty, parts))
        case Repetition(part, least):
            return least == 0 or _may_be_empty(part)
    return False


def _filled(pattern: Pattern) -> Pattern | None:
    """A pattern of the same texts but the empty one; None if there are no others."""
    match pattern:
        case Concatenation(parts):
            options: list[Pattern] = []
            for i, part in enumerate(parts):
                if (filled := _filled(part)) is not None:
                    options.append(Concatenation((filled, *parts[i + 1 :])))
                if not _may_be_empty(part):
                    break
            return _any_of(options)
        case Alternation(parts):
            return _any_of(filled for part in parts if (filled := _filled(part)) is not None)
        case Repetition(part, least, most):
            filled = None if most == 0 else _filled(part)
            if filled is None:
                return None
            return Repetition(filled, 1 if _may_be_empty(part) else max(least, 1), most)
    return pattern


def _any_of(options: Iterable[Pattern]) -> Pattern | None:
    found = tuple(options)
    return None if not found else found[0] if len(found) == 1 else Alternation(found)
