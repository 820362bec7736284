"""Where the greedy cut of a text into terminals can miss a text of the grammar: an analysis that errs on the safe side.

A cut is right if, wherever a terminal may end, no terminal that is possible in the same place goes on with a character
that what follows may begin with. Characters are told apart by the first byte of their UTF-8, by which the text is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runtime.structured.pattern import Alternation, CharacterClass, Concatenation, Pattern, Ranges, Repetition
from runtime.structured.rules import Choice, Name, Repeat, Rule, Sequence, Terminal

_MAX_PLACES = 3_000  # of terminals in the rules, up to which their contexts are told apart
_MAX_STEPS = 100_000  # for one pair of terminals; beyond, they are taken to be in each other's way
_ALL = (1 << 256) - 1


def misleading(rules: Mapping[str, Rule], start: str, terminals: Mapping[Terminal, Pattern]) -> set[Terminal]:
    """The terminals that may go on beyond the end of one that the text needs."""
    places = _Places(rules, start)
    pairs = _Pairs([terminals[each] for each in places.terminals])
    begins = [pairs.begins(number) for number in places.numbers]
    alike = _alike(begins)
    found: set[int] = set()
    for at, others in enumerate(places.together(pairs, alike)):
        follows = 0
        for after in _bits(places.after[at]):
            follows |= begins[after]
        for other in _bits(others & alike[at]):
            number = places.numbers[other]
            if number not in found and pairs.goes_on(places.numbers[at], number) & follows:
                found.add(number)
    return {places.terminals[number] for number in found}


def _alike(begins: list[int]) -> list[int]:
    """For each place those whose texts may begin with one of the same bytes."""
    of_byte = [0] * 256
    for at, mask in enumerate(begins):
        for byte in _bits(mask):
            of_byte[byte] |= 1 << at
    found = {}
    for mask in set(begins):
        found[mask] = 0
        for byte in _bits(mask):
            found[mask] |= of_byte[byte]
    return [found[mask] for mask in begins]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Places:
    """The places of terminals in rules, and which places may follow which; sets of places are bit masks."""

    def __init__(self, rules: Mapping[str, Rule], start: str) -> None:
        self.terminals: list[Terminal] = []  # each once
        self.numbers: list[int] = []  # of the terminal in each place
        self.after: list[int] = []
        self._ends: dict[str, tuple[bool, int, int]] = dict.fromkeys(rules, (False, 0, 0))
        self._number: dict[Terminal, int] = {}
        self._place = 0
        while True:  # until nothing is new
            self._place, before = 0, (dict(self._ends), list(self.after))
            for name, rule in rules.items():
                self._ends[name] = self._walk(rule)
            if (self._ends, self.after) == before:
                break
        self.first = self._ends[start][1]

    def _walk(self, rule: Rule) -> tuple[bool, int, int]:
        """True if the rule may be empty, and the places where its texts may begin and end."""
        match rule:
            case Terminal():
                at = self._place
                self._place += 1
                if at == len(self.numbers):
                    if rule not in self._number:
                        self._number[rule] = len(self.terminals)
                        self.terminals.append(rule)
                    self.numbers.append(self._number[rule])
                    self.after.append(0)
                return False, 1 << at, 1 << at
            case Name(of):
                return self._ends[of]
            case Choice(parts):
                walked = [self._walk(part) for part in parts]
                first = last = 0
                for _, begins, ends in walked:
                    first, last = first | begins, last | ends
                return any(empty for empty, _, _ in walked), first, last
            case Sequence(parts):
                empty, first, last = True, 0, 0
                for part in parts:
                    may_be_empty, begins, ends = self._walk(part)
                    self._join(last, begins)
                    first |= begins if empty else 0
                    last = ends | (last if may_be_empty else 0)
                    empty = empty and may_be_empty
                return empty, first, last
            case Repeat(part, least, most):
                empty, first, last = self._walk(part)
                if most != 1:
                    self._join(last, first)
                return empty or least == 0, first, last
        raise AssertionError(rule)

    def _join(self, ends: int, begins: int) -> None:
        for at in _bits(ends):
            self.after[at] |= begins

    def together(self, pairs: _Pairs, alike: list[int]) -> list[int]:
        """For each place those that may be possible at the same point of a text."""
        num_places = len(self.numbers)
        if num_places > _MAX_PLACES:
            return [(1 << num_places) - 1] * num_places
        together = [0] * num_places
        todo: list[int] = []  # places with new companions
        done = [0] * num_places

        def allow(places: int) -> None:
            for at in _bits(places):
                if places & ~together[at]:
                    together[at] |= places
                    todo.append(at)

        allow(self.first)
        while todo:
            at = todo.pop()
            for other in _bits(together[at] & alike[at] & ~done[at]):
                done[at] |= 1 << other
                done[other] |= 1 << at
                if at == other or pairs.share_text(self.numbers[at], self.numbers[other]):
                    allow(self.after[at] | self.after[other])
        return together


class _Pairs:
    """Facts about pairs of terminals, by their numbers, each worked out once."""

    def __init__(self, patterns: list[Pattern]) -> None:
        self._automata = list(map(_Automaton, patterns))
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}

    def begins(self, number: int) -> int:
        """The first bytes of its texts."""
        automaton, found = self._automata[number], 0
        for state in automaton.first:
            found |= automaton.bytes[state]
        return found

    def goes_on(self, one: int, other: int) -> int:
        """The bytes with which texts of the other may go on after a text of the one."""
        return self._of(one, other)[0]

    def share_text(self, one: int, other: int) -> bool:
        return self._of(one, other)[1]

    def _of(self, one: int, other: int) -> tuple[int, bool]:
        if (one, other) not in self._known:
            self._known[one, other] = _compared(self._automata[one], self._automata[other])
        return self._known[one, other]


def _compared(a: _Automaton, b: _Automaton) -> tuple[int, bool]:
    goes_on, shares = 0, False
    seen: set[tuple[int, int]] = set()
    num_steps = len(a.first) * len(b.first)
    todo = [(i, j) for i in a.first for j in b.first] if num_steps <= _MAX_STEPS else []
    while todo:
        i, j = todo.pop()
        if (i, j) in seen or not (a.bytes[i] & b.bytes[j] and _overlap(a.chars[i], b.chars[j])):
            continue
        seen.add((i, j))
        if i in a.last:
            shares = shares or j in b.last
            for after in b.after[j]:
                goes_on |= b.bytes[after]
        num_steps += len(a.after[i]) * len(b.after[j])
        if num_steps > _MAX_STEPS:
            break
        todo += ((k, m) for k in a.after[i] for m in b.after[j])
    return (goes_on, shares) if num_steps <= _MAX_STEPS else (_ALL if b.is_long else 0, True)


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


class _Automaton:
    """A pattern's characters as states, with those that may come first, last, and one after another. How often a
    repetition goes on is left out, so that it may have more texts here than the pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self.chars: list[Ranges] = []
        self.bytes: list[int] = []
        self.after: list[set[int]] = []
        _, self.first, self.last = self._add(pattern)
        self.is_long = any(self.after)  # some text has two characters

    def _add(self, pattern: Pattern) -> tuple[bool, set[int], set[int]]:
        match pattern:
            case CharacterClass(these):
                self.chars.append(these)
                self.bytes.append(_first_bytes(these))
                self.after.append(set())
                state = {len(self.chars) - 1}
                return False, state, state
            case Concatenation(parts):
                empty, first, last = True, set[int](), set[int]()
                for part in parts:
                    may_be_empty, begins, ends = self._add(part)
                    self._join(last, begins)
                    first = first | begins if empty else first
                    last = ends | last if may_be_empty else ends
                    empty = empty and may_be_empty
                return empty, first, last
            case Alternation(parts):
                added = [self._add(part) for part in parts]
                first, last = set[int]().union(*(f for _, f, _ in added)), set[int]().union(*(e for _, _, e in added))
                return any(empty for empty, _, _ in added), first, last
            case Repetition(part, least, most):
                empty, first, last = self._add(part)
                if most != 1:
                    self._join(last, first)
                return empty or least == 0, first, last
        raise AssertionError(pattern)

    def _join(self, ends: set[int], begins: set[int]) -> None:
        for state in ends:
            self.after[state] |= begins


def _first_bytes(these: Ranges) -> int:
    """The first bytes of characters in UTF-8."""
    found = 0
    for low, high in these:
        for start, end, lead, shift in _LEADS:
            a, b = max(low, start), min(high, end)
            if a <= b:
                a, b = lead | a >> shift, lead | b >> shift
                found |= (1 << b + 1) - (1 << a)
    return found


_LEADS = (0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 6), (0x800, 0xFFFF, 0xE0, 12), (0x10000, 0x10FFFF, 0xF0, 18)
