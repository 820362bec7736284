"""N-gram drafts: they follow the longest earlier match, and their cost per step is bounded."""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Sequence
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import Request, SamplingParams
from runtime.core.request_state import RequestState
from runtime.core.requests import requests_of
from runtime.speculation import ngram
from runtime.speculation.gram_chains import MAX_LINKS
from runtime.speculation.ngram import OWN_COST, REACH, SIZES, STEP_WORK, Ngram
from runtime.speculation.past_outputs import PIECE_COST
from tests.support.examples import examples


def prompt_lookup(tokens: Sequence[int], most: int) -> list[int]:
    """The tokens after the last place with the last 4, or else 2, tokens: what other servers' lookups draft."""
    for size in (4, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return list(tokens[end : end + most])
    return []


def matches(text: Sequence[int]) -> tuple[int, list[int]]:
    """The most tokens that earlier places have in common with the end, and these places, the newest first."""
    lengths = {}
    for end in range(len(text) - 1, 0, -1):
        lengths[end] = next((n for n in range(end) if text[end - 1 - n] != text[-1 - n]), end)
    longest = max(lengths.values(), default=0)
    return (longest, [end for end, n in lengths.items() if n == longest]) if longest >= SIZES[0] else (0, [])


def plain_guess(prediction: Sequence[int], tokens: Sequence[int], prompt_len: int, most: int) -> list[int] | None:
    """The vote of the longest matches. As long as the output is as predicted, the prediction goes on."""
    text = [*prediction, *tokens]
    length, ends = matches(text)
    output = text[len(prediction) + prompt_len :]
    if prediction and output == text[: len(output)]:
        length, ends = 1 << 30, [len(output)]
    paths = []
    for end in ends:
        longer = text.copy()
        for at in range(end, end + min(most, REACH * length)):
            longer.append(longer[at])
        paths.append(longer[len(text) :])
    guess: list[int] = []
    while paths and len(guess) < len(paths[0]):
        votes = [path[len(guess)] for path in paths]
        guess.append(max(votes, key=votes.count))
        paths = [path for path in paths if path[: len(guess)] == guess]
    return guess or None


_names = map(str, itertools.count())


def states_of(
    prompt: list[int], prediction: Sequence[int] = (), count: int = 1, salt: str = "", adapter: str = ""
) -> list[RequestState]:
    request = Request(
        "", prompt, len(prompt), SamplingParams(), prediction=tuple(prediction), cache_salt=salt, adapter=adapter
    )
    requests = requests_of(request, _names, count)
    return [RequestState(r, array("i", r.token_ids), 1 << 30, frozenset(), (0, 0, 0)) for r in requests]


def end_with(drafter: Ngram, output: Sequence[int], salt: str = "", adapter: str = "") -> None:
    """Let a request end with this output."""
    (state,) = states_of([1 << 20], salt=salt, adapter=adapter)
    state.tokens.extend(output)
    drafter.forget(state)


TEXT = st.lists(st.integers(0, 2), max_size=40)


def guesses_once_complete(lookup: Ngram, states: list[RequestState], most: int) -> list[list[int] | None]:
    """Plan steps until the index is complete."""
    seen: tuple[int, ...] = ()
    while True:
        lookup.begin_step()
        guesses = [lookup.guess(state, most) for state in states]
        held = lookup._lookups.values()
        if seen == (seen := (lookup.num_indexed, *(h.seen for h in held))) and all(h.is_complete for h in held):
            return guesses


@given(
    prediction=TEXT,
    prompt=TEXT.filter(bool),
    outputs=st.lists(TEXT, min_size=2, max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    step_work=st.integers(1, 50),
    short=st.sampled_from([0, 20]),
)
@settings(max_examples=examples(150))
def test_guesses_follow_the_longest_match(prediction, prompt, outputs, cuts, step_work, short):
    sizes = {"STEP_WORK": step_work, "PIECE_COST": 1, "SHORT_PROMPT": short, "DEPTH": 1000, "MAX_LINKS": 1000}
    with mock.patch.multiple(ngram, **sizes), mock.patch("runtime.speculation.gram_chains.MAX_LINKS", 1000):
        lookup, states = Ngram(), states_of(prompt, prediction, len(outputs))
        for start, stop in itertools.pairwise([0, 0, *sorted(cuts), 40]):
            for state, output in zip(states, outputs, strict=True):
                state.tokens.extend(output[start:stop])
            guesses = guesses_once_complete(lookup, states, 6)
            assert guesses == [plain_guess(prediction, list(s.tokens), len(prompt), 6) for s in states]
    assert lookup.num_indexed <= len(prediction) + len(prompt), "choices share the index of their prompt"
    for state in states:
        lookup.forget(state)
    assert not lookup.num_held


def test_a_step_indexes_a_bounded_piece():
    """Prompts and predictions of any length are indexed over several steps, all choices at once."""
    length = 5 * STEP_WORK
    states = states_of([1, 2, 3], range(length), 32) + states_of(list(range(length)))
    for state in states:
        state.tokens.extend([7, 8, length - 6, length - 5, length - 4])
    lookup, indexed = Ngram(), [0]
    while lookup.num_indexed < 2 * length - 1:
        lookup.begin_step()
        guesses = [lookup.guess(state, 3) for state in states]
        assert guesses[:32] == [[length - 3, length - 2, length - 1]] * 32, "the end of a text is indexed first"
        indexed.append(lookup.num_indexed)
    assert max(new - old for old, new in itertools.pairwise(indexed)) <= STEP_WORK
    assert lookup.num_held == 2 * length + 3


@mock.patch.object(ngram, "SHORT_PROMPT", 0)
def test_many_short_texts_take_several_steps():
    lookup, states = Ngram(), [state for i in range(40) for state in states_of([1, 2, 3, i])]
    for state in states:
        state.tokens.append(9)
        lookup.guess(state, 1)
    assert 1 <= lookup.num_indexed <= 2 * (1 + STEP_WORK // PIECE_COST)


def test_output_that_piled_up_is_indexed_in_pieces():
    """Guesses did not pay for a long time, then they do."""
    (state,) = states_of([1, 2])
    state.tokens.extend(range(STEP_WORK))
    lookup = Ngram()
    for step in range(1, 3 * OWN_COST):
        lookup.begin_step()
        lookup.guess(state, 1)
        assert lookup._lookups[state.request.request_id].seen <= 1 + step * STEP_WORK // OWN_COST
    state.tokens.extend([5, 6, 7, 8])
    assert lookup.guess(state, 2) == [9, 10]


def test_a_look_up_compares_few_places():
    """A text of one token matches itself everywhere."""
    (state,) = states_of([5] * 2000)
    lookup = Ngram(1 << 16)
    for _ in range(20):
        end_with(lookup, [5] * 500)
    for _ in range(10):
        lookup.begin_step()
    before = lookup.num_compared
    assert lookup.guess(state, 7) == [5] * 7
    assert 0 < lookup.num_compared - before <= (len(SIZES) + 2) * MAX_LINKS
    before = lookup.num_compared
    state.tokens.extend([5] * 8)
    assert lookup.guess(state, 7) == [5] * 7
    assert lookup.num_compared == before, "a match that goes on is not looked up again"


@mock.patch.object(ngram, "SHORT_PROMPT", 0)
def test_texts_beyond_the_limit_wait_for_others_to_end():
    (one,), (other,) = states_of([1, 2, 3, 4, 5]), states_of([1, 2, 3, 4, 5])
    lookup = Ngram()
    with mock.patch.object(ngram, "MAX_TEXT_TOKENS", 9):
        for state in (one, other):
            state.tokens.extend([1, 2])
        assert [lookup.guess(state, 2) for state in (one, other)] == [[3, 4], None]
        assert lookup.num_held == 5
        lookup.forget(one)
        lookup.begin_step()
        assert lookup.guess(other, 2) == [3, 4]


_WORD = re.compile(r"\w+|\s+|.")
_CLASS = """
class {0}Field(Field):
    def read(self, value):
        if value is None:
            return self.default
        return {1}(value)

    def write(self, value):
        if value is None:
            return ""
        return str(value)
"""


def test_a_file_that_is_edited_twice():
    """An agent writes a file of similar parts again, with a change, and then once more."""
    names = ["Int", "Float", "Text", "Bytes", "Date", "Time", "Decimal", "Path"]
    first = "".join(_CLASS.format(name, name.lower()) for name in names)
    second = first.replace('return ""', 'return "-"', 3).replace("str(value)", "repr(value)", 2)
    third = second.replace("self.default", "self.get_default()", 5)
    ids: dict[str, int] = {}
    texts = [[ids.setdefault(word, len(ids)) for word in _WORD.findall(text)] for text in (first, second, third)]
    rounds, drafted, accepted = [0, 0], [0, 0], [0, 0]
    for prompt, output in ((texts[0], texts[1]), (texts[0] + texts[1], texts[2])):
        lookup = Ngram()
        for i in range(2):
            (state,) = states_of(prompt)
            while rest := output[len(state.tokens) - len(prompt) :]:
                lookup.begin_step()
                guess = lookup.guess(state, 7) or [] if i else prompt_lookup(state.tokens, 7)
                right = next((n for n, pair in enumerate(zip(guess, rest, strict=False)) if pair[0] != pair[1]), None)
                right = min(len(guess), len(rest)) if right is None else right
                state.tokens.extend(rest[: right + 1])
                rounds[i] += 1
                drafted[i] += len(guess)
                accepted[i] += right
    assert rounds[1] < rounds[0]
    assert accepted[1] > accepted[0]
    assert accepted[1] / drafted[1] > accepted[0] / drafted[0]
