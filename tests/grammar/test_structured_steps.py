"""Grammars in the step: whatever the weights, the batch, speculation and what happens on the way, answers fit."""

import json
import time
from decimal import Decimal

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from runtime.base.types import FinishReason, Grammar, GrammarSpec
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.features.device_automata import DeviceAutomata
from runtime.kernels.sampling.automata import advance_states_torch, mask_states_torch
from runtime.policy.admission import Admission
from runtime.speculation.draft import LocalWire
from runtime.speculation.draft_client import DraftClient
from runtime.speculation.ngram import Ngram
from runtime.structured.grammar import compiled
from runtime.structured.matching.automaton import EagerMatcher, build
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.pattern import GrammarError
from tests.grammar.test_structured_walks import CHECKER, SCHEMAS, SMALL
from tests.support.engine.fake_runner import FixedShare
from tests.support.engine.whole import whole_draft
from tests.support.structured.cases import regex
from tests.support.structured.engine import SPEC, answers, hot, recorded, runner_of, text_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
}
PERSONS = compiled(GrammarSpec("json", json.dumps(PERSON)))
RUNNER = runner_of()


def check_fits(text: str, schema: object) -> None:
    value, exact = (json.loads(each, parse_float=Decimal) for each in (text, json.dumps(schema)))  # 0.56 is 56 * 0.01
    jsonschema.validate(value, exact, jsonschema.Draft202012Validator, format_checker=CHECKER)


def schemas_with_grammars(num: int) -> list[tuple[dict, Grammar]]:
    """Random ones, always the same."""
    found: list[tuple[dict, Grammar]] = []

    @settings(
        max_examples=3 * num, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(SCHEMAS)
    def draw(schema: dict) -> None:
        if len(found) < num:
            try:
                found.append((schema, compiled(GrammarSpec("json", json.dumps(schema)))))
            except GrammarError:  # nothing fits, or options of oneOf overlap
                return

    draw()
    return found


def check_many(num_schemas: int, num_answers: int, batch: int) -> int:
    """How many answers were finished; all fit, and are the same with speculation."""
    finished, cases = 0, schemas_with_grammars(num_schemas)
    runner = RUNNER if batch > 1 else runner_of(max_num_seqs=1)
    params = [hot(cases[i % len(cases)][1], seed=i) for i in range(num_answers)]
    plain = answers(runner, params)
    guessed = answers(runner, params, recorded(plain, 0.7))
    assert guessed == plain
    for name, (tokens, reason, _) in plain.items():
        assert reason in (FinishReason.STOP, FinishReason.LENGTH)
        if reason is FinishReason.STOP:
            check_fits(text_of(tokens), cases[int(name) % len(cases)][0])
            finished += 1
    return finished


def test_random_answers_fit_with_and_without_speculation():
    assert check_many(40, 80, batch=32) > 60
    assert check_many(10, 10, batch=1) > 7


@pytest.mark.long
@pytest.mark.thorough
def test_many_random_answers_fit():
    assert check_many(90, 300, batch=32) > 225
    assert check_many(20, 30, batch=1) > 20


# ---- what happens on the way -----------------------------------------------------------------------------------------

MIXED = [hot(PERSONS), hot(None, max_tokens=30), hot(regex("(?:ab|c){3,9}")), hot(PERSONS, temperature=0.0)]


@pytest.fixture(scope="module")
def plain():
    return answers(RUNNER, MIXED)


def test_rows_with_and_without_grammars_share_steps(plain):
    assert [reason for _, reason, _ in plain.values()].count(FinishReason.STOP) >= 2
    alone = [answers(runner_of(max_num_seqs=1), MIXED)]
    assert alone == [plain]
    counts = {}

    def count(core: EngineCore, step: int) -> None:
        counts.update(lazy=core.scheduler.stats.structured_lazy, eager=core.scheduler.stats.structured_eager)

    free = answers(RUNNER, [hot(PERSONS), hot(None, max_tokens=30)], between=count)
    assert sum(counts.values()) == 1
    assert free["1"] == plain["1"]


@pytest.mark.parametrize("share_right", [0.0, 0.8, 1.0])
def test_speculation_changes_no_token(plain, share_right: float):
    assert answers(RUNNER, MIXED, recorded(plain, share_right)) == plain
    assert answers(runner_of(pipeline_depth=1), MIXED, recorded(plain, share_right)) == plain
    assert answers(RUNNER, MIXED, Ngram()) == plain


def share_accepted(params, want, ahead, keeps_grammars, noise=0.0, vocabulary=SMALL, **config):
    """Return the accepted share of a draft's tokens. The draft is the model with `noise` in its last norm."""
    model = runner_of(vocabulary, is_draft=True, **config)
    model.decoder.final_norm *= 1 + noise * torch.randn(SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    draft = whole_draft(model.config, model.info, InProcess(model), ahead, keeps_grammars)
    draft.scheduler.extras[Admission].lengths = FixedShare(0.0)  # it admits as if answers were short
    say, lazy = draft._send, LazyEngine(SMALL)

    def check_and_say(owner, chain):
        state = draft._streams[owner, chain.stream]
        if chain.length and state.params.grammar is not None and vocabulary is not None:
            output = [*state.tokens[state.prompt_len : chain.length], *chain.token_ids]
            assert lazy.matcher(state.params.grammar.lark).allowed(output) == len(output)
        say(owner, chain)

    draft._send = check_and_say
    client, schedulers = DraftClient(SPEC.vocab_size, time.monotonic), []
    client.attach(LocalWire(draft), ((1, 0.1), (64, 0.1)))
    assert answers(RUNNER, params, client, between=lambda core, step: schedulers.append(core.scheduler)) == want
    stats = schedulers[0].stats
    return stats.accepted_draft_tokens / stats.draft_tokens, draft.scheduler.stats.preemptions


@pytest.mark.parametrize("ahead", [0, 5])
def test_a_draft_guesses_what_grammars_allow(plain, ahead):
    """It also keeps to the grammars through commits that rewrite its tokens, and through its own preemptions."""
    with_grammars, _ = share_accepted(MIXED, plain, ahead, True)
    assert with_grammars > 0.93, "only what was guessed after an end is wrong"
    assert with_grammars > 0.2 + share_accepted(MIXED, plain, ahead, False)[0]
    noisy, _ = share_accepted(MIXED, plain, ahead, True, noise=0.3)
    assert 0.2 < noisy < 0.9
    assert share_accepted(MIXED, plain, ahead, True, vocabulary=None)[0] > 0.1, "without an engine it guesses freely"


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.thorough
def test_many_drafted_answers(noise):
    params = [hot(grammar, seed=i) for i, (_, grammar) in enumerate(schemas_with_grammars(30))]
    want = answers(RUNNER, params)
    tight = {"num_kv_blocks": 13, "block_size": 16, "max_num_seqs": 12}
    share, num_preemptions = share_accepted(params, want, 3, True, noise, **tight)
    assert share > (0.1 if noise else 0.9)
    assert num_preemptions > 0


def test_preemption_and_lost_runners_change_no_token(plain):
    long = [hot(regex("(?:ab|[^a])*"), max_tokens=100, logit_bias=tuple((i, -99.0) for i in SMALL.eos_ids))] * 3
    tight = runner_of(num_kv_blocks=14, block_size=16, prefix_cache=False, max_num_seqs=4)
    counts = []

    def optimist(core: EngineCore, step: int) -> None:
        core.extras[Admission].lengths = FixedShare(0.0)
        counts.append(core.scheduler.stats.preemptions)

    assert answers(tight, long, between=optimist) == answers(RUNNER, long)
    assert counts[-1] > 0

    def lose_runners(core: EngineCore, step: int) -> None:
        if step % 9 == 0:
            RUNNER.reset()
            core.recover(InProcess(RUNNER))

    assert answers(RUNNER, MIXED, between=lose_runners) == plain
    assert answers(RUNNER, MIXED, recorded(plain, 0.8), between=lose_runners) == plain


def test_a_cut_answer_says_length_and_others_end_in_time():
    cut, stopped, two = (
        answers(RUNNER, [hot(regex("a{50}"), max_tokens=7)])["0"],
        answers(RUNNER, [hot(regex("a{3}b{3}"), stop_token_ids=(ord("b"),))])["0"],
        answers(RUNNER, [hot(regex("ab"), max_tokens=3)])["0"],
    )
    assert cut[1] is FinishReason.LENGTH
    assert set(b"".join(SMALL.tokens[i] for i in cut[0])) == {ord("a")}
    assert stopped[1] is FinishReason.STOP
    assert SMALL.tokens[stopped[0][-1]] == b"b" or stopped[0][-1] in SMALL.eos_ids
    assert two[1] is FinishReason.STOP


def test_a_grammar_wins_over_min_tokens_and_bias():
    params = hot(regex("ab"), min_tokens=20, max_tokens=20, logit_bias=((ord("x"), 100.0), (SMALL.eos_ids[0], -100.0)))
    tokens, reason, _ = answers(RUNNER, [params])["0"]
    assert reason is FinishReason.STOP
    assert text_of(tokens) == "ab"
    tokens, reason, _ = answers(RUNNER, [hot(regex("a*"), min_tokens=10, max_tokens=60)])["0"]
    assert len(b"".join(SMALL.tokens[i] for i in tokens)) >= 10


def test_penalties_filters_and_logprobs_under_a_grammar():
    params = [
        hot(PERSONS, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
        hot(PERSONS, top_k=3, top_p=0.8, min_p=0.01),
        hot(PERSONS, logprobs=2),
    ]
    found = answers(RUNNER, params)
    guessed = answers(RUNNER, params, recorded(found, 0.8))
    assert {name: answer[:2] for name, answer in guessed.items()} == {
        name: answer[:2] for name, answer in found.items()
    }
    for tokens, reason, _ in found.values():
        if reason is FinishReason.STOP:
            check_fits(text_of(tokens), PERSON)
    tokens, _, logprobs = found["2"]
    assert [entry.token_id for entry in logprobs] == tokens
    assert any(entry.rank > 2 for entry in logprobs)  # of the model's own distribution


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_grammar_that_fails_ends_its_request_alone(plain):
    broken = Grammar("broken", "start: /(/", "")
    found = answers(RUNNER, [*MIXED, hot(broken)])
    assert found.pop("4") == ([], FinishReason.GRAMMAR, [])
    assert found == plain
    unreachable = answers(runner_of(vocabulary=None), [hot(PERSONS), hot(None, max_tokens=5)])
    assert [unreachable[name][1] for name in "01"] == [FinishReason.GRAMMAR, FinishReason.LENGTH]


def test_steps_without_grammars_do_nothing_for_them(monkeypatch: pytest.MonkeyPatch):
    def never(*args: object) -> None:
        raise AssertionError("work for a grammar that nobody has")

    runner = runner_of()
    for name in ("_rows", "_fill", "_take", "sampled"):
        monkeypatch.setattr(f"runtime.features.grammar_state.GrammarState.{name}", never)
    answers(runner, [hot(None, max_tokens=5)] * 3)


# ---- on the device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_device_has_the_automaton_of_the_host(seed: int, monkeypatch: pytest.MonkeyPatch):
    automaton = build(regex('(?:ab|c){1,9}x?|"[a-z]*"').expression, SMALL)
    host, device, random = EagerMatcher(automaton), DeviceAutomata(3, torch.device("cpu")), np.random.default_rng(seed)
    host.advance([ord("c")] if seed % 2 else [])
    assert device.enter(1, host)
    row = torch.tensor([[1, 0, 0, 0]], dtype=torch.int32)
    placed = device.places, device.states, device.pool
    for _ in range(30):
        mask, logits = np.zeros(SMALL.num_words, np.int32), torch.zeros(1, len(SMALL.tokens))
        host.fill(mask)
        mask_states_torch(logits, row, *placed)
        ids = np.flatnonzero(logits[0].isfinite().numpy())
        assert ids.tolist() == np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        token = random.choice(ids)
        host.advance([token])
        advance_states_torch(torch.tensor([token]), row, *placed)
    monkeypatch.setattr("runtime.features.device_automata._POOL_BYTES", 400)
    assert not DeviceAutomata(3, torch.device("cpu")).enter(1, EagerMatcher(automaton))
