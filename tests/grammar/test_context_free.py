"""Grammars of clients: what they generate is allowed, token by token, and nothing else is."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.structured.matching.lazy import LazyEngine, LazyMatcher
from runtime.structured.pattern import (
    CharacterClass,
    Choice,
    GrammarError,
    Name,
    Pattern,
    Repeat,
    Sequence,
    literal,
)
from runtime.structured.readers.context_free import rules_of
from runtime.structured.rules import lark, pruned
from runtime.text.vocabulary import Vocabulary

PIECES = ["a", "b", "ab", "ba", "aab", "bb", "abab"]
ENGINE = LazyEngine(Vocabulary((*(piece.encode() for piece in PIECES), b""), (len(PIECES),)))
EOS = len(PIECES)


class Oracle:
    """Reads one text by a grammar in every way there is: tables of spans, grown until nothing is new."""

    def __init__(self, grammar: dict[str, Pattern], text: str) -> None:
        self._grammar, self._text = grammar, text
        places = range(len(text) + 1)
        self._ends = {(name, at): frozenset[int]() for name in grammar for at in places}
        self._begins = {(name, at): False for name in grammar for at in places}
        before = None
        while before != (self._ends, self._begins):
            before = dict(self._ends), dict(self._begins)
            for name, body in grammar.items():
                for at in places:
                    self._ends[name, at] = self.ends(body, at)
                    self._begins[name, at] = self.begins(body, at)

    def ends(self, body: Pattern, at: int) -> frozenset[int]:
        """Where a text of `body` from `at` on may end."""
        match body:
            case Name(name):
                return self._ends[name, at]
            case CharacterClass(these):
                fit = at < len(self._text) and any(low <= ord(self._text[at]) <= high for low, high in these)
                return frozenset([at + 1] if fit else [])
            case Choice(parts):
                return frozenset().union(*(self.ends(part, at) for part in parts))
            case Sequence(parts):
                found = frozenset([at])
                for part in parts:
                    found = frozenset().union(*(self.ends(part, end) for end in found))
                return found
            case Repeat(part, least, most):
                found, all_found = frozenset([at]), set[int]()
                for times in range(8 if most is None else most + 1):
                    new = found - all_found if times > least else found
                    all_found |= new if times >= least else set()
                    if not new:
                        break
                    found = frozenset().union(*(self.ends(part, end) for end in found))
                return frozenset(all_found)
        raise AssertionError(body)

    def begins(self, body: Pattern, at: int) -> bool:
        """Whether some text of `body` begins with all that is there from `at` on."""
        match body:
            case Name(name):
                return self._begins[name, at]
            case CharacterClass():
                return at == len(self._text) or self.ends(body, at) == {len(self._text)}
            case Choice(parts):
                return any(self.begins(part, at) for part in parts)
            case Sequence(parts):
                found = {at}
                for i, part in enumerate(parts):
                    ended = all(self.begins(rest, len(self._text)) for rest in parts[i + 1 :])
                    if ended and any(self.begins(part, end) for end in found):
                        return True
                    found = {end for start in found for end in self.ends(part, start)}
                return len(self._text) in found
            case Repeat(part, least, most):
                found = {at}
                for times in range(8 if most is None else most):
                    if (times >= least and len(self._text) in found) or any(self.begins(part, end) for end in found):
                        return True
                    found = {end for start in found for end in self.ends(part, start)}
                return len(self._text) in found and (most is None or most >= least)
        raise AssertionError(body)

    def allowed(self) -> tuple[bool, bool]:
        """Whether the text may go on to one of the grammar, and whether it is one."""
        return self.begins(Name("s"), 0), len(self._text) in self.ends(Name("s"), 0)


def check_masks(grammar: dict[str, Pattern], matcher: LazyMatcher, text: str, depth: int) -> int:
    """The number of masks that were compared."""
    mask = np.zeros(1, np.int32)
    matcher.fill(mask)
    wanted = {i for i, piece in enumerate(PIECES) if Oracle(grammar, text + piece).allowed()[0]}
    wanted |= {EOS} if Oracle(grammar, text).allowed()[1] else set()
    assert {i for i in range(EOS + 1) if int(mask[0]) >> i & 1} == wanted, (text, grammar)
    num = 1
    for i in (0, 1):
        if depth and i in wanted:
            matcher.advance([i])
            num += check_masks(grammar, matcher, text + PIECES[i], depth - 1)
            matcher.rollback(1)
    return num


_LEAVES = (
    st.sampled_from(["", "a", "b", "ab", "aba"]).map(literal)
    | st.just(CharacterClass(((97, 98),)))
    | st.sampled_from("stu").map(Name)
)
_TIMES = st.sampled_from([(0, 1), (0, None), (1, None), (2, 2)])
_BODIES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple).map(Sequence)
        | st.lists(inner, min_size=1, max_size=3).map(tuple).map(Choice)
        | st.tuples(inner, st.sampled_from([(0, 1), (0, None), (1, None), (2, 2)])).map(lambda x: Repeat(x[0], *x[1]))
    ),
    max_leaves=6,
)
_GRAMMARS = st.fixed_dictionaries({"s": _BODIES, "t": _BODIES, "u": _BODIES})


def check_random(grammar: dict[str, Pattern], depth: int) -> None:
    try:
        text = lark(pruned(rules_of(grammar, "s")))
    except GrammarError:
        assert Oracle(grammar, "").allowed() == (False, False)
        return
    check_masks(grammar, ENGINE.matcher(text), "", depth)


def test_another_token_after_one_that_was_taken_back():
    """Both are /[ab]/, but only "b" may begin the recursion: what was parsed after "a" is not what follows "b"."""
    matcher = ENGINE.matcher("start: /[ab]/ rest /[ab]/\nrest: /b/ start | /[ab]/")
    mask = np.zeros((2, 1), np.int32)
    matcher.advance([0])
    assert matcher.fill_ahead(mask, [0]) == 1
    matcher.advance([1])
    matcher.fill(mask[0])
    assert mask[0, 0] == (1 << len(PIECES)) - 1


@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_GRAMMARS)
def test_masks_of_random_grammars(grammar: dict[str, Pattern]):
    check_random(grammar, 2)


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(_GRAMMARS)
def test_masks_of_many_random_grammars(grammar: dict[str, Pattern]):
    check_random(grammar, 3)
