"""Grammars that begin well and come to a limit in mid-answer: one output fails, with the cause, and spoils no other."""

import threading
from collections.abc import Callable

import llguidance
import numpy as np
import pytest

from runtime.base.types import CallboardError, FinishReason
from runtime.core.engine import EngineCore
from runtime.structured.matching import lazy
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.matcher import Matcher
from runtime.text.vocabulary import BYTES
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer, chat, client_of, events_of
from tests.support.structured.cases import regex
from tests.support.structured.engine import answers, hot, runner_of

# It has 2**16 states, for all that may be "a" among the last letters, and they are found only as letters are written.
BOMB = regex("xx?yz|(?:a|b)*a(?:a|b){16}c")
EOS = BYTES.eos_ids[0]


@pytest.fixture(autouse=True)
def few_states(monkeypatch: pytest.MonkeyPatch):
    names = ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_items_in_row", "max_grammar_size")
    same = {name: getattr(lazy.LIMITS, name) for name in names}
    few = llguidance.LLParserLimits(**same, max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(lazy, "LIMITS", few)


def mask_of(matcher: Matcher) -> list[int]:
    mask = np.zeros((1, BYTES.num_words), np.int32)
    matcher.fill(mask[0])
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def explode(matcher: Matcher) -> None:
    """Write allowed tokens until the matcher reaches a limit."""
    random = np.random.default_rng(0)

    def write() -> None:
        for letter in random.choice([*b"ab"], 1000):
            mask_of(matcher)
            matcher.advance([int(letter)])

    with pytest.raises(CallboardError, match="too many states: 60"):
        write()


def filled_together(matcher: Matcher) -> object:
    masks = np.zeros((2, BYTES.num_words), np.int32)
    twin = lazy.LazyEngine(BYTES).matcher(regex("q").lark)
    for error in lazy.LazyEngine(BYTES).fill([twin, matcher], masks, [1, 0]):
        if error is not None:
            raise error
    return masks.tolist()


def filled_ahead(matcher: Matcher) -> object:
    masks = np.zeros((4, BYTES.num_words), np.int32)
    return matcher.fill_ahead(masks, b"yz"), masks.tolist()


def after(matcher: Matcher, text: bytes) -> object:
    matcher.advance(text)
    return mask_of(matcher)


def before(matcher: Matcher) -> object:
    matcher.rollback(2)
    return mask_of(matcher)


@pytest.mark.parametrize(
    "use",
    [
        mask_of,
        filled_together,
        filled_ahead,
        before,
        lambda matcher: after(matcher, b"y"),
        lambda matcher: after(matcher, b"yz"),
    ],
    ids=["fill", "together", "ahead", "rollback", "advance", "to_the_end"],
)
def test_others_go_on(use: Callable[[Matcher], object]):
    engines = MatcherFactory(BYTES)
    greedy, other = engines.matcher(BOMB), engines.matcher(BOMB)
    untouched = lazy.LazyEngine(BYTES).matcher(BOMB.lark)
    for matcher in (other, untouched):
        assert mask_of(matcher) == [*b"abx"]
        matcher.advance(b"xx")
    explode(greedy)
    try:
        found = use(other), mask_of(other)
    except lazy.SharedLimit:  # a matcher with its own lexer goes on where this one stood
        other = engines.matcher(BOMB, alone=True)
        other.advance(b"xx")
        found = use(other), mask_of(other)
    assert found == (use(untouched), mask_of(untouched))
    fresh = engines.matcher(BOMB)
    assert mask_of(fresh) == [*b"abx"]
    fresh.advance(b"xyz")
    assert fresh.is_accepting
    explode(engines.matcher(BOMB))
    assert mask_of(engines.matcher(BOMB)) == [*b"abx"]
    engines.close()


def test_what_is_accepted_is_known_after_anothers_failure():
    engines = MatcherFactory(BYTES)
    greedy, other = engines.matcher(BOMB), engines.matcher(BOMB)
    other.advance(b"xyz")
    explode(greedy)
    other.advance([EOS])
    assert other.has_ended
    other.rollback(1)
    assert mask_of(other) == [EOS]
    engines.close()


def test_an_output_that_fails_by_itself_stays_failed():
    """However often it is asked; a token is then refused for the limit's sake, not the grammar's."""
    matcher = lazy.LazyEngine(BYTES).matcher(BOMB.lark)
    explode(matcher)
    for use in (mask_of, filled_ahead, lambda matcher: after(matcher, b"a"), before):
        with pytest.raises(CallboardError, match="too many states: 60"):
            use(matcher)


def made_beside_the_steps(alone: list[bool]) -> Callable[..., Matcher]:
    """Replace MatcherFactory.matcher: a thread makes the matchers of new grammars, and those with their own lexer."""
    make = MatcherFactory.matcher

    def matcher(engines: MatcherFactory, grammar, thinking=None, is_alone: bool = False) -> Matcher:
        in_step = threading.current_thread() is threading.main_thread()
        assert not in_step or (engines.is_ready(grammar) and not is_alone)
        alone.append(is_alone)
        return make(engines, grammar, thinking, is_alone)

    return matcher


def test_a_failed_answer_names_the_cause_and_stops_no_other():
    """In one batch, before and after."""
    runner = runner_of()
    push = {"max_tokens": 60, "temperature": 1.0}
    towards = [tuple((ord(c), 50.0) for c in letters) for letters in ("x", "ab", "x")]
    params = [hot(BOMB, **push, logit_bias=bias) for bias in towards]
    alone = [answers(runner_of(), [each])["0"][:2] for each in params]
    assert [reason for _, reason in alone] == [FinishReason.STOP, FinishReason.GRAMMAR, FinishReason.STOP]
    failures = {}

    def note(core: EngineCore, step: int) -> None:
        failures.update({state.request.request_id: state.failure for state in states if state.failure})

    states: list = []
    add = EngineCore.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "add", lambda core, request: states.append(add(core, request)))
        patch.setattr(MatcherFactory, "matcher", made_beside_the_steps(makers := []))
        for _ in range(2):
            found = answers(runner, params, between=note)
            assert [reason for _, reason, _ in found.values()] == [reason for _, reason in alone]
    assert True in makers, "an output needs its own lexer"
    assert failures.keys() == {"1"}
    assert "too many states: 60" in failures["1"]


TEXT = "This request's grammar is too complex to go on here (too many states); ask for a simpler one."


@pytest.mark.usefixtures("shared_compiler")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails_after", [0, 3])
async def test_a_client_is_told_the_cause(fails_after: int, stream: bool):
    engine = FakeEngine("abcdef", fails_after=fails_after, failure=(FinishReason.GRAMMAR, TEXT), max_model_len=4096)
    body = chat(response_format={"type": "regex", "regex": "[a-z]*"}, stream=stream)
    async with client_of(engine, byte_tokenizer()) as client:
        response = await client.post("/v1/chat/completions", json=body)
    told = {
        "message": TEXT,
        "type": "invalid_request_error",
        "param": "response_format.regex",
        "code": "grammar_failed",
    }
    if stream and fails_after:
        *events, last = events_of(response)
        assert "".join(e["choices"][0]["delta"]["content"] or "" for e in events) == "abc"
        assert last == {"error": told}
    else:
        assert response.status_code == 400
        assert response.json() == {"error": told}
