"""Runners with parts of the vocabulary, step by step beside one with all of it."""

import threading
from unittest import mock

import numpy as np

from runtime.base.shard import Shard
from runtime.base.types import FinishReason, Grammar, SamplingParams
from runtime.core.plan import EMPTY, EMPTY_TABLE, NewSlot, StepPlan
from runtime.features.grammar_state import GrammarState
from runtime.text.vocabulary import Vocabulary
from tests.grammar.test_structured_walks import SMALL
from tests.support.ranks.split_runners import SplitRunner
from tests.support.structured.cases import regex
from tests.support.structured.engine import answers, hot, recorded, runner_of

PARAMS = [
    hot(regex("(?:ab|c){3,9}"), max_tokens=20),
    hot(None, max_tokens=12, logprobs=2, sampling_logprobs=True, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, repetition_penalty=1.2, min_tokens=3),
    SamplingParams(max_tokens=6, prompt_logprobs=2, temperature=0.8),
    hot(Grammar("broken", "start: /(/", "")),
    hot(regex("ab"), max_tokens=5, min_tokens=5, temperature=0.0, logprobs=0),
]


# otherwise rows of one runner wait for matchers in some steps
@mock.patch("runtime.features.grammar_state._MAKING_S", 60.0)
def test_every_rank_samples_as_one_rank_does():
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


def test_ranks_do_not_wait_in_a_step_for_grammars():
    states = [GrammarState(len(SMALL.tokens), shard=Shard(rank, 2)) for rank in range(2)]
    is_read = threading.Event()

    def read() -> Vocabulary:
        assert is_read.wait(60)
        return SMALL

    for state in states:
        state.serve(read)
        state.add(NewSlot(0, np.array([1, 2], np.int32), 2, 0, hot(regex("ab"))))
    row = [np.array([n], np.int32) for n in (0, 0, 2, 1)]
    assert states[0].masks(StepPlan(1, EMPTY, [], EMPTY_TABLE, *row)).deferred == [0]
    assert states[1]._engines is None, "rank 0 alone follows grammars"
    is_read.set()
