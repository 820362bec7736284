"""Budgets of reasoning: no output has more tokens of it, whatever the marks, the grammar and what happens to it."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.assembly.engine import build_engine, extras_of
from runtime.base.types import FinishReason, GrammarSpec, Request, SamplingParams, ThinkingBudget
from runtime.core.executor import InProcess
from runtime.speculation.draft import DraftCore, LocalWire
from runtime.speculation.draft_client import DraftClient
from runtime.structured.grammar import compiled
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.thinking import ThinkingMatcher
from runtime.text.vocabulary import BYTES, Vocabulary
from tests.grammar.test_structured_walks import SMALL, allowed
from tests.support.structured.engine import SPEC, answers, hot, recorded, runner_of

OPEN, CLOSE = b"<think>", b"</think>"
MARKED = Vocabulary((*BYTES.tokens[:256], b"", b"", b""), (256,))  # and tokens of their own for both marks
OPEN_ID, CLOSE_ID = 257, 258
ENGINES = MatcherFactory(BYTES)


def text_budget(num_tokens: int, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, tuple(CLOSE), None, is_open)


def next_ids(matcher: ThinkingMatcher, vocabulary: Vocabulary = BYTES) -> list[int]:
    mask = np.zeros(vocabulary.num_words, np.int32)
    matcher.fill(mask)
    return [i for i in allowed(mask).tolist() if i < len(vocabulary.tokens)]


def test_the_mark_is_forced_when_the_budget_is_spent():
    matcher = ThinkingMatcher(text_budget(3), BYTES, None)
    for token in b"abc":
        assert len(next_ids(matcher)) == 257
        assert matcher.is_accepting
        matcher.advance([token])
    for token in CLOSE:
        assert next_ids(matcher) == [token]
        assert not matcher.is_accepting
        assert not matcher.is_closed
        assert matcher.allowed([ord("x")]) == matcher.allowed([256]) == 0
        matcher.advance([token])
    assert matcher.is_closed
    assert len(next_ids(matcher)) == 257


def test_special_marks_are_tokens():
    budget = ThinkingBudget(2, (CLOSE_ID,), OPEN_ID, False)
    matcher = ThinkingMatcher(budget, MARKED, None)
    matcher.advance([ord("\n"), OPEN_ID, *b"ab"])
    assert next_ids(matcher, MARKED) == [CLOSE_ID]
    matcher.advance([CLOSE_ID])
    assert matcher.is_closed
    early = ThinkingMatcher(budget, MARKED, None)
    early.advance([OPEN_ID, ord("a"), CLOSE_ID])
    assert early.is_closed


@pytest.mark.parametrize(
    ("text", "is_open", "num_left"),  # of a budget of 12 bytes; None without open reasoning
    [
        (b"", True, 12),
        (b"ab", True, 10),
        (b"ab</think>", True, None),
        (b"ab</thinkab", True, 1),
        (b"<think>ab", False, 10),
        (b"\n <think>ab", False, 10),
        (b"<think>ab</think>", False, None),
        (b"<thing", False, None),
        (b"Hello", False, None),
    ],
)
def test_tokens_of_reasoning_are_counted(text: bytes, is_open: bool, num_left: int | None):
    matcher = ThinkingMatcher(text_budget(12, is_open), BYTES, None)
    matcher.advance(list(text))
    assert matcher.is_closed == (num_left is None)
    assert matcher.allowed(b"x" * 20) == (20 if num_left is None else num_left)


def test_a_character_is_finished_before_the_mark():
    matcher = ENGINES.matcher(GRAMMAR, text_budget(2))
    whole = "a😎".encode()
    matcher.advance(whole[:2])
    assert not set(next_ids(matcher)) & {CLOSE[0], 256}
    assert matcher.allowed([*whole[2:], *CLOSE, *b"12", 256]) == 3 + len(CLOSE) + 3
    assert matcher.allowed([*whole[2:], ord("x")]) == 3


def test_without_any_budget_nothing_is_thought():
    matcher = ThinkingMatcher(text_budget(0), BYTES, None)
    assert next_ids(matcher) == [CLOSE[0]]
    assert matcher.allowed([*CLOSE, *b"\n\nHello", 256]) == len(CLOSE) + 8


GRAMMAR = compiled(GrammarSpec("regex", "[0-9]{2,4}", after="</think>"))


@settings(max_examples=60)
@given(
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from([*b"<a/7>\n", 256]), st.integers(0, 9)), max_size=40),
)
def test_going_back_leads_where_the_tokens_lead(num_tokens, is_open, has_grammar, steps):
    """Random walks with rollbacks; a fresh matcher of the same tokens allows the same, and no budget is exceeded."""
    budget, grammar = text_budget(num_tokens, is_open), GRAMMAR if has_grammar else None
    matcher, tokens = ENGINES.matcher(grammar, budget), []
    for token, back in steps:
        if back > 7 and tokens:
            matcher.rollback(min(len(tokens), back - 7))
            del tokens[-(back - 7) :]
        options = next_ids(matcher)
        fresh = ENGINES.matcher(grammar, budget)
        fresh.advance(tokens)
        assert next_ids(fresh) == options
        tokens.append(token if token in options else options[0])
        matcher.advance(tokens[-1:])
    text = bytes(t for t in tokens if t != 256)
    begun = text if is_open else text.lstrip()[len(OPEN) :] if text.lstrip().startswith(OPEN) else None
    if begun is not None:
        assert len(begun.partition(CLOSE)[0]) <= num_tokens + (0 if CLOSE in begun else len(CLOSE))


# ---- in the step -----------------------------------------------------------------------------------------------------

IDS = {token: i for i, token in enumerate(SMALL.tokens) if token}
CLOSE_IDS = tuple(IDS[bytes((c,))] for c in CLOSE)
NUMBER = compiled(GrammarSpec("regex", "[0-9]{2,4}", after="</think>"))


def thinking(num_tokens: int, grammar=None, **fields) -> SamplingParams:
    return replace(hot(grammar, **fields), thinking=ThinkingBudget(num_tokens, CLOSE_IDS, None, True))


PARAMS = [
    thinking(0), thinking(5), thinking(9, NUMBER), thinking(60), thinking(3, NUMBER, presence_penalty=0.5),
    hot(None), thinking(7, logprobs=2), thinking(200),
]  # fmt: skip


def check_budgets(found) -> None:
    for i, params in enumerate(PARAMS):
        tokens, reason, _ = found[str(i)]
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
        if params.thinking is None:
            continue
        texts = [SMALL.tokens[t] for t in tokens]
        end = next((n for n in range(len(texts) + 1) if CLOSE in b"".join(texts[:n])), None)
        spent = params.thinking.num_tokens + 3 * (params.grammar is not None)  # a character may be unfinished
        if end is not None:
            assert end <= spent + len(CLOSE_IDS)
        else:
            assert len(tokens) <= spent + len(CLOSE_IDS)
        if end is not None and params.grammar is not None and reason is FinishReason.STOP:
            assert b"".join(texts[end:]).strip().isdigit()
    assert b"".join(SMALL.tokens[t] for t in found["0"][0][:8]) == CLOSE
    assert all(CLOSE in b"".join(SMALL.tokens[t] for t in found[i][0]) for i in "124")


RUNNER = runner_of()


def test_answers_keep_their_budgets_in_every_mode():
    plain = answers(RUNNER, PARAMS)
    check_budgets(plain)
    assert answers(RUNNER, PARAMS, recorded(plain, 0.7)) == plain
    assert answers(RUNNER, PARAMS, recorded(plain, 1.0)) == plain
    tight = runner_of(num_kv_blocks=14, max_num_seqs=8)  # so that requests are preempted
    assert {name: each[:2] for name, each in answers(tight, PARAMS).items()} == {n: e[:2] for n, e in plain.items()}


def test_a_stream_that_is_resumed_goes_on_alike():
    core = build_engine(RUNNER.config, RUNNER.info, InProcess(RUNNER))
    plain = answers(RUNNER, PARAMS)
    for number in (1, 2, 4):
        whole = plain[str(number)][0]
        prompt = [1 + (7 * number + k) % 200 for k in range(3 + number % 5)]
        for known in (2, 5, 9, 12):
            RUNNER.reset()
            core = build_engine(RUNNER.config, RUNNER.info, InProcess(RUNNER))
            core.add(Request("again", prompt + whole[:known], len(prompt), PARAMS[number], seed=number))
            got: list[int] = []
            while core.has_work:
                if (output := core.step()) is not None:
                    got += output.token_ids
            assert got == whole[known:]


def test_a_draft_guesses_within_the_budget():
    plain = answers(RUNNER, PARAMS)
    runner = runner_of(is_draft=True, num_kv_blocks=500)
    draft = DraftCore(
        runner.config,
        runner.info,
        InProcess(runner),
        3,
        keeps_grammars=True,
        extras=extras_of(runner.config, runner.info),
    )
    client = DraftClient(SPEC.vocab_size, time.monotonic)
    client.attach(LocalWire(draft), ((1, 0.1), (64, 0.1)))
    schedulers = []
    found = answers(RUNNER, PARAMS, client, between=lambda core, step: schedulers.append(core.scheduler))
    assert found == plain
    stats = schedulers[0].stats
    assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 0  # the same model, bound alike
