"""Special tokens in grammars: allowed where a grammar names them, and never spelled out."""

from typing import Any

import numpy as np
import pytest
import torch

from runtime.features.device_automata import DeviceAutomata
from runtime.kernels.sampling.automata import advance_states_torch, mask_states_torch
from runtime.structured import rules
from runtime.structured.channels import _text_without
from runtime.structured.matching.automaton import EagerMatcher, build
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import FIRST_OF_SPECIAL, Choice, Name, Repeat, Sequence, special_text
from runtime.structured.rules import Special, terminal
from runtime.text.tool_calls.harmony import CHANNEL_MARKS
from runtime.text.vocabulary import SPECIAL_BYTES, Vocabulary

BEGIN, MARK, END, OTHER_END = 257, 258, 256, 259  # END and OTHER_END are EOS tokens
VOCABULARY = Vocabulary(SPECIAL_BYTES.tokens, (END, OTHER_END))
TURN = {
    "start": Sequence((Special(BEGIN), terminal("ab?"), Special(MARK), Name("rest"))),
    "rest": Choice((Sequence((terminal("(?s:.*)"), Special(END))), Sequence((terminal("<x>"), Special(OTHER_END))))),
}
LAZY = LazyEngine(VOCABULARY)


def matchers(of: dict[str, Any]) -> list[Matcher]:
    return [LAZY.matcher(rules.lark(of)), EagerMatcher(build(rules.expression(of), VOCABULARY))]


def next_ids(matcher: Matcher) -> set[int]:
    mask = np.zeros(VOCABULARY.num_words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("engine", [0, 1])
def test_special_tokens_stand_where_the_grammar_has_them(engine: int):
    matcher = matchers(TURN)[engine]
    assert next_ids(matcher) == {BEGIN}
    matcher.advance([BEGIN, ord("a")])
    assert next_ids(matcher) == {ord("b"), MARK}
    matcher.advance([MARK, *b"<x>"])
    assert {END, OTHER_END, ord("y")} <= next_ids(matcher)
    assert not {BEGIN, MARK, 260} & next_ids(matcher)
    assert not matcher.is_accepting
    matcher.advance([OTHER_END])
    assert matcher.is_accepting
    assert matcher.is_finished
    assert next_ids(matcher) == {END, OTHER_END}
    matcher.rollback(1)
    matcher.advance([ord("y")])
    assert OTHER_END not in next_ids(matcher)
    assert matcher.allowed([END, END]) == 2


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("spelled", [special_text(BEGIN).encode(), b"\xff[257]", b"<special 257>", b"\xf4\x8f\xbf\xbf"])
def test_bytes_never_spell_a_special_token(engine: int, spelled: bytes):
    matcher = matchers(TURN)[engine]
    assert matcher.allowed(spelled) == 0
    text = matchers({"start": Repeat(Choice((Special(BEGIN), terminal("a"))), 0, 9)})[engine]
    assert text.allowed([ord("a"), *spelled]) in (1, 2)
    assert text.allowed([ord("a"), *spelled]) < len(spelled) + 1


def test_both_engines_allow_the_same_tokens():
    lazy, automaton = matchers(TURN)
    for seed in range(100):
        random, one, two = np.random.default_rng(seed), lazy.copy(), EagerMatcher(automaton.automaton)
        for _ in range(30):
            assert next_ids(one) == next_ids(two)
            token = int(random.choice(sorted(next_ids(one))))
            one.advance([token])
            two.advance([token])
            if token in VOCABULARY.eos_ids:
                break


def test_reserved_characters_have_no_automaton():
    assert rules.expression({"start": terminal(f"a\\x{{{FIRST_OF_SPECIAL:x}}}")}) == ""
    assert not build(rules.expression({"start": terminal("(?s:.*)")}), VOCABULARY).token_class[[BEGIN, MARK]].any()


@pytest.mark.parametrize("seed", range(6))
def test_a_device_follows_special_tokens(seed: int):
    host = matchers(TURN)[1]
    device, random = DeviceAutomata(3, torch.device("cpu")), np.random.default_rng(seed)
    assert device.enter(1, host)
    row, placed = torch.tensor([[1, 0, 0, 0]], dtype=torch.int32), (device.places, device.states, device.pool)
    for _ in range(40):
        logits = torch.zeros(1, len(VOCABULARY.tokens))
        mask_states_torch(logits, row, *placed)
        ids = set(np.flatnonzero(logits[0].isfinite().numpy()).tolist())
        assert ids == next_ids(host)
        token = int(random.choice(sorted(ids)))
        host.advance([token])
        advance_states_torch(torch.tensor([token]), row, *placed)


def test_many_masks_show_eos_in_place_of_the_engines_end():
    ended, open_ = matchers(TURN)[0], matchers(TURN)[0]
    ended.advance([BEGIN, ord("a"), MARK, END])
    masks = np.zeros((2, VOCABULARY.num_words), np.int32)
    assert LAZY.fill([ended, open_], masks, [1, 0]) == [None, None]
    found = [set(np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder="little")).tolist()) for m in masks]
    assert found == [{BEGIN}, {END, OTHER_END}]


def test_free_text_spells_out_no_mark():
    matcher, random = (
        LAZY.matcher(rules.lark({"start": terminal(_text_without(CHANNEL_MARKS))})),
        np.random.default_rng(0),
    )
    parts = [
        "<",
        "|",
        "end",
        "start",
        "|>",
        "<|",
        "<|end|",
        "<|call|>",
        "é",
        "message",
        "cal",
        "l",
        "ret",
        "urn|>",
        "\n",
    ]
    num_refused = 0
    for _ in range(5000):
        text = "".join(random.choice(parts, random.integers(0, 7)))
        tokens = [*text.encode(), END]
        fits = not any(mark in text for mark in CHANNEL_MARKS)
        assert (matcher.allowed(tokens) == len(tokens)) == fits, text
        num_refused += not fits
    assert num_refused > 300
