"""Runners that have parts of the vocabulary, step by step beside one that has all of it."""

from runtime.core.sharding import Shard
from runtime.core.types import FinishReason, Grammar, SamplingParams
from runtime.worker.grammar_state import GrammarState
from tests.grammar.test_structured_walks import SMALL
from tests.support.split_runners import SplitRunner
from tests.support.structured_cases import regex
from tests.support.structured_engine import answers, hot, recorded, runner_of

PARAMS = [
    hot(regex("(?:ab|c){3,9}"), max_tokens=20),
    hot(None, max_tokens=12, logprobs=2),
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, repetition_penalty=1.2, min_tokens=3),
    SamplingParams(max_tokens=6, prompt_logprobs=2, temperature=0.8),
    hot(Grammar("broken", "start: /(/", "")),
    hot(regex("ab"), max_tokens=5, min_tokens=5, temperature=0.0, logprobs=0),
]


def test_every_rank_samples_what_one_rank_does():
    """With grammars, log-probabilities of prompts and answers, and guesses to verify; SplitRunner compares."""
    runner = SplitRunner(3, runner_of)
    found = answers(runner, PARAMS)
    assert found["5"][1] is FinishReason.GRAMMAR
    assert found["0"][1] is FinishReason.STOP
    assert answers(runner, PARAMS, recorded(found, 0.7)) == found
    greedy = answers(runner, [PARAMS[2]])
    counts = runner.group.ranks[0].counts.copy()
    assert answers(runner, [PARAMS[2]], recorded(greedy, 1.0)) == greedy
    assert runner.group.ranks[0].counts["all_gather"] == counts["all_gather"], "greedy rows want no logits"


def test_no_rank_waits_in_a_step_until_grammars_can_be_served():
    states = [GrammarState(len(SMALL.tokens), shard=Shard(rank, 2)) for rank in range(2)]
    for state in states:
        state.serve(lambda: SMALL)
    assert states[0]._engines.done()
    assert states[1]._engines is None, "rank 0 alone follows grammars"
