"""Context-free grammars over characters as rules over terminals that llguidance's lexer cuts right.

The steps:

1. Find the rules without recursion. Each becomes a pattern; a loop at one end of a rule is rewritten as a repetition.
2. Write the other rules. Each largest part without references becomes one terminal: the fewer, the faster.
3. While a terminal is ambiguous (ambiguity.py), split it into terminals of its parts. Single characters never are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from runtime.structured.pattern import (
    Choice,
    Name,
    Pattern,
    Repeat,
    Sequence,
    any_of,
    mapped,
    names_in,
    parts_of,
    plain,
    size,
)
from runtime.structured.readers.ambiguity import ambiguous_terminals
from runtime.structured.rules import NOTHING, Rule, Terminal, choice, optional, terminal

_MAX_REGION = 2_000  # states in one terminal; a larger rule stays a rule
_MAX_REWRITTEN = 100  # states in a pattern that is rewritten without the empty text


def rules_of(grammar: Mapping[str, Pattern], start: str, prefix: str = "") -> dict[str, Rule]:
    """Return the rules of a grammar, in which each reference leads to a rule; the first one is `prefix` + "start"."""
    regular = _regular_rules(grammar)
    if (whole := regular.get(start)) is not None:
        return {f"{prefix}start": terminal(plain(whole))}
    names = {start: f"{prefix}start"}
    names |= {name: f"{prefix}g{i}" for i, name in enumerate(grammar) if name != start and name not in regular}
    writer = _Writer(names)
    written = {names[name]: writer.rule(_substituted(grammar[name], regular)) for name in names}
    while ambiguous := ambiguous_terminals(written, writer.patterns):
        parts: dict[Rule, Rule] = {each: writer.split(writer.patterns[each]) for each in ambiguous}
        replaced = partial(_replaced, parts)
        written = {name: mapped(rule, replaced) for name, rule in written.items()}
    return written


def _replaced(parts: Mapping[Rule, Rule], leaf: Rule) -> Rule:
    return parts.get(leaf, leaf)


# ---- step 1: rules without recursion ---------------------------------------------------------------------------------


def _regular_rules(grammar: Mapping[str, Pattern]) -> dict[str, Pattern]:
    """Return the patterns of the rules without recursion, by name."""
    regular: dict[str, Pattern] = {}
    sizes: dict[str, int] = {}
    visited: set[str] = set()

    def full_size(pattern: Pattern) -> int:
        match pattern:
            case Name(to):
                return sizes.get(to, 1)
            case Repeat(part, least, most):
                return full_size(part) * max(least if most is None else most, 1)
        return sum(map(full_size, parts_of(pattern))) + 1

    def visit(name: str) -> None:
        if name in visited:
            return
        visited.add(name)
        body = grammar[name]
        others = set(names_in(body)) - {name}
        for other in others:
            visit(other)
        if others <= regular.keys() and (states := full_size(body)) <= _MAX_REGION:
            found = _without_loop(_substituted(body, regular))
            if found is not None:
                regular[name], sizes[name] = found, 2 * states

    for name in grammar:
        visit(name)
    return regular


def _has_references(pattern: Pattern) -> bool:
    return next(names_in(pattern), None) is not None


def _substituted(pattern: Pattern, regular: Mapping[str, Pattern]) -> Pattern:
    return mapped(pattern, lambda leaf: regular.get(leaf.name, leaf) if isinstance(leaf, Name) else leaf)


def _without_loop(body: Pattern) -> Pattern | None:
    """Rewrite a rule that refers to itself at one end of its options; None if it refers to itself elsewhere."""
    if not _has_references(body):
        return body
    options = [option.parts if isinstance(option, Sequence) else (option,) for option in _options(body)]
    for end in (-1, 0):
        loops: list[Pattern] = []
        exits: list[Pattern] = []
        for parts in options:
            rest = parts[:-1] if end else parts[1:]
            match parts[end] if parts else None:
                case Name():
                    loops.append(Sequence(rest))
                case Repeat(Name(), 0, 1):
                    loops.append(Sequence(rest))
                    exits.append(Sequence(rest))
                case _:
                    exits.append(Sequence(parts))
        if exits and not any(map(_has_references, (*loops, *exits))):
            loop = Repeat(Choice(tuple(loops)), 0, None)
            exit_ = Choice(tuple(exits))
            return Sequence((loop, exit_) if end else (exit_, loop))
    return None


def _options(pattern: Pattern) -> Iterator[Pattern]:
    match pattern:
        case Choice(parts) | Sequence((_,) as parts):
            for part in parts:
                yield from _options(part)
        case _:
            yield pattern


# ---- steps 2 and 3: terminals ----------------------------------------------------------------------------------------


class _Writer:
    """Writes patterns as rules, and keeps the pattern of each terminal."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.patterns: dict[Terminal, Pattern] = {}
        self._names = names  # names of rules that references lead to

    def rule(self, pattern: Pattern) -> Rule:
        """Write a pattern; each largest part without references becomes one terminal."""
        if not _has_references(pattern):
            return self.terminal(pattern)
        match pattern:
            case Name(name):
                return Name(self._names[name])
            case Sequence(parts):
                runs: list[list[Pattern]] = []  # neighbours without references; any other part alone
                for part in parts:
                    if runs and not _has_references(part) and not _has_references(runs[-1][-1]):
                        runs[-1].append(part)
                    else:
                        runs.append([part])
                return Sequence(tuple(self.rule(run[0] if len(run) == 1 else Sequence(tuple(run))) for run in runs))
            case Choice(parts):
                plain_parts = tuple(part for part in parts if not _has_references(part))
                others = [self.rule(part) for part in parts if _has_references(part)]
                return choice([*others, *([self.terminal(Choice(plain_parts))] if plain_parts else [])])
            case Repeat(part, least, most):
                return Repeat(self.rule(part), least, most) if most != 0 else NOTHING
        raise AssertionError(pattern)

    def terminal(self, pattern: Pattern) -> Rule:
        """Write a pattern as one terminal, which never matches the empty text; an optional one if the pattern does."""
        may_be_empty = _may_be_empty(pattern)
        if may_be_empty and size(pattern) <= _MAX_REWRITTEN:
            if (rest := _without_empty(pattern)) is None:
                return NOTHING
            pattern = rest
            found = terminal(plain(pattern))
        else:
            found = Terminal((plain(pattern), "(?s:.+)")) if may_be_empty else terminal(plain(pattern))
        self.patterns[found] = pattern
        return optional(found) if may_be_empty else found

    def split(self, pattern: Pattern) -> Rule:
        """Write a pattern with a terminal for each of its parts."""
        match pattern:
            case Sequence((part,)) | Choice((part,)):
                return self.split(part)
            case Sequence(parts):
                return Sequence(tuple(map(self.terminal, parts)))
            case Choice(parts):
                return choice(map(self.terminal, parts))
            case Repeat(part, least, most):
                return Repeat(self.terminal(part), least, most)
        raise AssertionError(pattern)


def _may_be_empty(pattern: Pattern) -> bool:
    match pattern:
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Choice(parts):
            return any(map(_may_be_empty, parts))
        case Repeat(part, least):
            return least == 0 or _may_be_empty(part)
    return False


def _without_empty(pattern: Pattern) -> Pattern | None:
    """Return the pattern of the same texts but the empty one; None without such texts."""
    match pattern:
        case Sequence(parts):
            options: list[Pattern] = []
            for i, part in enumerate(parts):
                if (rest := _without_empty(part)) is not None:
                    options.append(Sequence((rest, *parts[i + 1 :])))
                if not _may_be_empty(part):
                    break
            return _any_or_none(options)
        case Choice(parts):
            return _any_or_none(rest for part in parts if (rest := _without_empty(part)) is not None)
        case Repeat(part, least, most):
            rest = None if most == 0 else _without_empty(part)
            if rest is None:
                return None
            return Repeat(rest, 1 if _may_be_empty(part) else max(least, 1), most)
    return pattern


def _any_or_none(options: Iterable[Pattern]) -> Pattern | None:
    found = tuple(options)
    return any_of(found) if found else None
