"""Finds terminals that llguidance's lexer could cut wrongly.

The lexer takes the longest terminal. Terminal `b` is ambiguous next to terminal `a` if it can continue a text of `a`
with a byte that may also follow `a` in the grammar. The lexer then never ends `a` there. FIRST and FOLLOW sets of
terminals decide this, as for LL(1) parsers. Sets of bytes and terminals are bit masks. The
analysis errs on the safe side: it assumes that any two terminals may be possible at the same point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.structured.pattern import CharacterClass, Choice, Name, Pattern, Ranges, Repeat, Sequence
from runtime.structured.rules import Rule, Terminal

_MAX_STEPS = 100_000  # steps in one comparison; a longer one counts as a conflict
_ALL_BYTES = (1 << 256) - 1


def ambiguous_terminals(rules: Mapping[str, Rule], patterns: Mapping[Terminal, Pattern]) -> set[Terminal]:
    """Return the terminals that may go on beyond the end of another that the text needs."""
    follows = _Follows(rules)
    automata = [_Automaton(patterns[terminal]) for terminal in follows.terminals]
    first = [automaton.first_bytes for automaton in automata]
    found: set[int] = set()
    for a, after in enumerate(follows.after):
        next_bytes = 0
        for terminal in _bits(after):
            next_bytes |= first[terminal]
        for b in range(len(automata)):
            if b not in found and first[a] & first[b] and _continuations(automata[a], automata[b]) & next_bytes:
                found.add(b)
    return {follows.terminals[number] for number in found}


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Neighbours:
    """The leaves of a tree by number, and for each the leaves that may follow it (Glushkov's construction)."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def _visit(self, tree: Any) -> tuple[bool, int, int]:
        """Return whether the tree may be empty, and the leaves that its texts may begin and end with."""
        empty, first, last = isinstance(tree, Sequence), 0, 0
        match tree:
            case Choice(parts):
                for part in parts:
                    part_empty, begins, ends = self._visit(part)
                    empty, first, last = empty or part_empty, first | begins, last | ends
                return empty, first, last
            case Sequence(parts):
                for part in parts:
                    part_empty, begins, ends = self._visit(part)
                    self._join(last, begins)
                    first |= begins if empty else 0
                    last = ends | (last if part_empty else 0)
                    empty = empty and part_empty
                return empty, first, last
            case Repeat(part, least, most):
                empty, first, last = self._visit(part)
                if most != 1:
                    self._join(last, first)
                return empty or least == 0, first, last
        return self._leaf(tree)

    def _leaf(self, leaf: Any) -> tuple[bool, int, int]:
        raise NotImplementedError

    def _join(self, ends: int, begins: int) -> None:
        for leaf in _bits(ends):
            self.after[leaf] |= begins


class _Follows(_Neighbours):
    """The terminals of rules, and for each the terminals that may follow it."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.terminals: list[Terminal] = []
        self._numbers: dict[Terminal, int] = {}
        self._ends: dict[str, tuple[bool, int, int]] = dict.fromkeys(rules, (False, 0, 0))
        before = None
        while before != (self._ends, self.after):  # up to the fixed point
            before = dict(self._ends), list(self.after)
            for name, rule in rules.items():
                self._ends[name] = self._visit(rule)

    def _leaf(self, leaf: Terminal | Name) -> tuple[bool, int, int]:
        if isinstance(leaf, Name):
            return self._ends[leaf.name]
        if leaf not in self._numbers:
            self._numbers[leaf] = len(self.terminals)
            self.terminals.append(leaf)
            self.after.append(0)
        bit = 1 << self._numbers[leaf]
        return False, bit, bit


def _continuations(a: _Automaton, b: _Automaton) -> int:
    """Return the bytes with which `b`'s texts may continue after a text of `a`."""
    num_steps = len(a.first) * len(b.first)
    found = 0
    seen: set[tuple[int, int]] = set()
    todo = [(i, j) for i in a.first for j in b.first] if num_steps <= _MAX_STEPS else []
    while todo:
        i, j = todo.pop()
        if (i, j) in seen or not (a.bytes[i] & b.bytes[j] and _overlap(a.chars[i], b.chars[j])):
            continue
        seen.add((i, j))
        if i in a.last:
            for after in b.next[j]:
                found |= b.bytes[after]
        num_steps += len(a.next[i]) * len(b.next[j])
        if num_steps > _MAX_STEPS:
            break
        todo += [(x, y) for x in a.next[i] for y in b.next[j]]
    if num_steps > _MAX_STEPS:
        return _ALL_BYTES if b.has_long_texts else 0
    return found


def _overlap(one: Ranges, other: Ranges) -> bool:
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


class _Automaton(_Neighbours):
    """The character classes of a pattern as states. It does not count repetitions: it may have too many texts."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.chars: list[Ranges] = []
        self.bytes: list[int] = []  # the first bytes of each state's characters
        _, first, last = self._visit(pattern)
        self.first, self.last = list(_bits(first)), set(_bits(last))
        self.next = [list(_bits(states)) for states in self.after]
        self.has_long_texts = any(self.after)  # texts with two characters or more
        self.first_bytes = 0
        for state in self.first:
            self.first_bytes |= self.bytes[state]

    def _leaf(self, leaf: CharacterClass) -> tuple[bool, int, int]:
        self.chars.append(leaf.ranges)
        self.bytes.append(_first_bytes(leaf.ranges))
        self.after.append(0)
        state = 1 << len(self.chars) - 1
        return False, state, state


_UTF8 = (0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 6), (0x800, 0xFFFF, 0xE0, 12), (0x10000, 0x10FFFF, 0xF0, 18)


def _first_bytes(these: Ranges) -> int:
    """Return the first bytes of characters in UTF-8."""
    found = 0
    for low, high in these:
        for start, end, lead, shift in _UTF8:
            a, b = max(low, start), min(high, end)
            if a <= b:
                a, b = lead | a >> shift, lead | b >> shift
                found |= (1 << b + 1) - (1 << a)
    return found
