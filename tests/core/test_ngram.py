"""Prompt lookup: its draft tokens equal a plain definition, and its cost per step is bounded."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import Request, SamplingParams
from runtime.core.request_state import RequestState
from runtime.core.requests import requests_of
from runtime.speculation import ngram
from runtime.speculation.ngram import OWN_COST, STEP_WORK, TEXT_COST, Ngram
from tests.support.examples import examples


def plain_guess(prediction: Sequence[int], tokens: Sequence[int], prompt_len: int, most: int) -> list[int]:
    """The tokens after the last place with the last 4, or else 2, tokens."""
    if prediction and len(tokens) == prompt_len:
        return list(prediction[:most])
    text = [*prediction, *tokens]
    for size in (4, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                for at in range(end, end + most):
                    text.append(text[at])
                return text[len(prediction) + len(tokens) :]
    return []


_names = map(str, itertools.count())


def states_of(prompt: list[int], prediction: Sequence[int] = (), count: int = 1) -> list[RequestState]:
    requests = requests_of(
        Request("", prompt, len(prompt), SamplingParams(), prediction=tuple(prediction)), _names, count
    )
    return [RequestState(r, array("i", r.token_ids), 1 << 30, frozenset(), (0, 0, 0)) for r in requests]


TEXT = st.lists(st.integers(0, 2), max_size=40)


def guesses_once_complete(lookup: Ngram, states: list[RequestState], most: int) -> list[list[int]]:
    """Plan steps until the index is complete."""
    seen: tuple[int, ...] = ()
    while True:
        lookup.begin_step()
        guesses = [lookup.guess(state, most) for state in states]
        if seen == (seen := (lookup.num_indexed, *(held.seen for held in lookup._lookups.values()))):
            return guesses


@given(
    prediction=TEXT,
    prompt=TEXT.filter(bool),
    outputs=st.lists(TEXT, min_size=2, max_size=2),
    step_work=st.integers(1, 50),
    few=st.sampled_from([0, 32]),
    short=st.sampled_from([0, 20]),
)
@settings(max_examples=examples(120))
def test_guesses_equal_the_plain_definition(prediction, prompt, outputs, step_work, few, short):
    with mock.patch.multiple(ngram, STEP_WORK=step_work, TEXT_COST=1, _FEW=few, SHORT_PROMPT=short):
        lookup, states = Ngram(), states_of(prompt, prediction, len(outputs))
        for half in (slice(0), slice(10), slice(10, None)):
            for state, output in zip(states, outputs, strict=True):
                state.tokens.extend(output[half])
            guesses = guesses_once_complete(lookup, states, 6)
            assert guesses == [plain_guess(prediction, state.tokens, len(prompt), 6) for state in states]
    assert lookup.num_indexed <= max(0, len(prediction) + len(prompt) - 2), "choices share the index of their prompt"
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
    assert 1 <= lookup.num_indexed <= 2 * (1 + STEP_WORK // TEXT_COST)


def test_output_that_piled_up_is_indexed_in_pieces():
    """Guesses did not pay for a long time, then they do."""
    (state,) = states_of([1, 2])
    state.tokens.extend(range(STEP_WORK))
    lookup = Ngram()
    for step in range(1, 3 * OWN_COST):
        lookup.begin_step()
        lookup.guess(state, 1)
        assert len(lookup._lookups[state.request.request_id].ends) <= 2 * step * STEP_WORK // OWN_COST
    state.tokens.extend([5, 6, 7, 8])
    assert lookup.guess(state, 2) == [9, 10]


@mock.patch.object(ngram, "SHORT_PROMPT", 0)
def test_texts_beyond_the_limit_wait_for_others_to_end():
    (one,), (other,) = states_of([1, 2, 3, 4, 5]), states_of([1, 2, 3, 4, 5])
    lookup = Ngram()
    with mock.patch.object(ngram, "MAX_TEXT_TOKENS", 9):
        for state in (one, other):
            state.tokens.extend([1, 2])
        assert [lookup.guess(state, 2) for state in (one, other)] == [[3, 4], []]
        assert lookup.num_held == 5
        lookup.forget(one)
        assert lookup.guess(other, 2) == [3, 4]
