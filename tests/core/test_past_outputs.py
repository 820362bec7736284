"""Drafts from earlier outputs: each owner finds only its own, and they are bounded."""

from __future__ import annotations

from array import array
from itertools import pairwise
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.speculation.choose_k import Speculation
from runtime.speculation.gram_chains import GramChains, Longest, mixed
from runtime.speculation.ngram import STEP_WORK, Ngram
from runtime.speculation.past_outputs import PIECE_COST, SIZE, PastOutputs
from tests.core.test_ngram import end_with, states_of
from tests.support.examples import examples


@given(
    text=st.lists(st.integers(0, 1), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    older=st.booleans(),
)
@settings(max_examples=examples(100))
def test_ends_of_a_bucket_come_newest_first(text, cuts, older):
    chains, sizes = GramChains(len(text), (2, 5)), (2, 5)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = list(pairwise(bounds))
    for start, end in reversed(pieces) if older else pieces:
        chains.insert(np.array(text, np.int32), start, end, older)
    with mock.patch("runtime.speculation.gram_chains.MAX_LINKS", 1000):
        for size in sizes:
            for end in range(size, len(text) + 1):
                gram = text[end - size : end]
                found = chains.ends(size, mixed(gram, size))
                assert found == sorted(found, reverse=True)
                assert [at for at in found if text[at - size : at] == gram] == [
                    at for at in range(len(text), size - 1, -1) if text[at - size : at] == gram
                ]


OWNER = st.tuples(st.sampled_from(["", "a"]), st.sampled_from(["", "s", "t"]))
OUTPUT = st.lists(st.integers(0, 1), max_size=30)


def found(past: PastOutputs, owner: tuple[str, str], tail: list[int]) -> tuple[int, list[list[int]]]:
    """The length of the longest match in an owner's outputs, and what follows each such place."""
    longest = Longest(array("i", tail))
    past.search(owner, array("i", tail), longest)
    return longest.length, [past.after(longest.text, end, 8) for end in longest.ends if longest.text is not None]


@given(outputs=st.lists(st.tuples(OWNER, OUTPUT), max_size=12), owner=OWNER, tail=OUTPUT.filter(bool))
@settings(max_examples=examples(150))
@mock.patch("runtime.speculation.gram_chains.MAX_LINKS", 1000)
def test_other_owners_outputs_do_not_show(outputs, owner, tail):
    with mock.patch("runtime.speculation.past_outputs.hash", return_value=0, create=True):  # owners share buckets
        _check_owners(outputs, owner, tail)


def _check_owners(outputs, owner, tail):
    every, own = PastOutputs(10_000), PastOutputs(10_000)
    for other, output in outputs:
        every.add(other, array("i", output))
        if other == owner:
            own.add(other, array("i", output))
    every.advance(1 << 20)
    own.advance(1 << 20)
    assert found(every, owner, tail) == found(own, owner, tail)
    best = 0
    for other, output in outputs:
        for end in range(SIZE, len(output) + 1) if other == owner and len(output) > SIZE else ():
            common = next((n for n in range(min(end, len(tail))) if output[end - 1 - n] != tail[-1 - n]), None)
            best = max(best, min(end, len(tail)) if common is None else common)
    assert found(every, owner, tail)[0] == (best if best >= SIZE else 0)


def test_requests_find_outputs_of_their_salt_and_adapter():
    drafter, output = Ngram(10_000), list(range(10, 40))
    end_with(drafter, output, "salt", "adapter")
    drafter.begin_step()
    guesses = {}
    for owner in (("salt", "adapter"), ("salt", ""), ("", "adapter"), ("", "")):
        (state,) = states_of([1, *output[:8]], salt=owner[0], adapter=owner[1])
        guesses[owner] = drafter.guess(state, 4)
    assert guesses == {
        ("salt", "adapter"): output[8:12],
        ("salt", ""): None,
        ("", "adapter"): None,
        ("", ""): None,
    }


def test_new_weights_forget_all_outputs():
    drafter, output = Ngram(10_000), list(range(10, 40))
    speculation = Speculation(drafter, None, (), 0.0)
    end_with(drafter, output)
    drafter.begin_step()
    end_with(drafter, output)
    speculation.on_weights()
    drafter.begin_step()
    (state,) = states_of([1, *output[:8]])
    assert drafter.guess(state, 4) is None
    assert not len(drafter._past)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 60)), max_size=40))
@settings(max_examples=examples(60))
def test_the_newest_outputs_stay_within_the_capacity(history):
    """Each entry is an output's length, and the work of a step."""
    past, next_id, last = PastOutputs(300), 0, []
    for length, work in history:
        output = list(range(next_id, next_id + length))
        next_id += length
        past.add("", array("i", output))
        assert len(past) <= 300
        before = past.num_indexed
        past.advance(work)
        assert past.num_indexed - before <= work
        last = output if len(output) > SIZE else last
    past.advance(1 << 20)
    assert len(past) <= 300
    if last:
        length, after = found(past, "", last[-10:-1])
        assert length == min(9, len(last) - 1)
        assert after == [last[-1:]]


def test_a_long_output_is_indexed_over_several_steps():
    drafter = Ngram(10 * STEP_WORK)
    end_with(drafter, list(range(3 * STEP_WORK)))
    for _ in range(4):
        before = drafter._past.num_indexed
        drafter.begin_step()
        assert 0 <= drafter._past.num_indexed - before <= STEP_WORK
    assert drafter._past.num_indexed == 3 * STEP_WORK + 1
    for i in range(3 * STEP_WORK // PIECE_COST):
        end_with(drafter, [i] * 10)
    before = drafter._past.num_indexed
    drafter.begin_step()
    assert 0 < drafter._past.num_indexed - before <= 11 * (1 + STEP_WORK // PIECE_COST), "a piece has a fixed cost"


def test_nothing_is_kept_without_a_capacity():
    drafter = Ngram()
    end_with(drafter, list(range(10, 40)))
    drafter.begin_step()
    (state,) = states_of([1, *range(10, 18)])
    assert drafter.guess(state, 4) is None
