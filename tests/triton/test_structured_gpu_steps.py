"""Grammars in the steps of the Triton path: its answers are the torch path's."""

import time
from functools import partial

import pytest

from runtime.base.types import FinishReason, Grammar, SamplingParams
from runtime.speculation.head_drafter import HeadDrafter
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.runner import ModelRunner
from tests.grammar.test_deferred_grammars import SLOW, both
from tests.support.kernels.triton_engine import replayed_graphs
from tests.support.ranks.split_runners import SplitRunner
from tests.support.structured.cases import regex
from tests.support.structured.engine import Answers, answers, hot, recorded, small_runner

pytestmark = pytest.mark.usefixtures("wide_products")


def tokens_and_reasons(found: Answers) -> dict[str, tuple[list[int], FinishReason]]:
    return {name: answer[:2] for name, answer in found.items()}


@pytest.mark.thorough
def test_triton_gives_the_same_tokens_as_torch(monkeypatch):
    pair = regex('[{]"age": ?[0-9]{1,2}[}]')
    params = [
        hot(pair, max_tokens=12, logprobs=0),
        hot(None, max_tokens=5),
        hot(regex("(?:ab|c){2,4}"), max_tokens=8),
        hot(pair, max_tokens=12, top_k=5, top_p=0.9, repetition_penalty=1.2, min_tokens=3),
        hot(Grammar("broken", "start: /(/", "")),
        hot(regex("ab"), max_tokens=5, min_tokens=5, temperature=0.0),
    ]
    found = answers(small_runner("torch"), params)
    want = tokens_and_reasons(found)
    assert want["4"][1] is FinishReason.GRAMMAR
    assert [want[name][1] for name in "0235"].count(FinishReason.STOP) >= 3, want
    runner = small_runner("triton", (1, 3))
    assert isinstance(runner.steps, GpuSteps)
    assert tokens_and_reasons(answers(runner, params)) == want
    assert tokens_and_reasons(answers(runner, params, recorded(found, 0.8), guesses=2)) == want
    graphs = [g for graphs in runner.steps.graph_runner.graphs.values() for g in graphs]
    assert all(g.graph.count for g in graphs if g.shape.num_rows == 4)

    # Again with automata, which take their outputs from the host after the first token.
    engines = runner.masks._engines.result()
    engines.policy = AutomatonPolicy(0.0, 0)  # at once
    for grammar in (params[0].grammar, params[2].grammar, params[5].grammar):
        while engines.matcher(grammar).engine == "lazy":
            time.sleep(0.02)
    filled = []
    fill = runner.masks._fill

    def noting(rows, words):
        filled.extend(row.output.grammar.key for row in rows if not row.waits)
        fill(rows, words)

    monkeypatch.setattr(runner.masks, "_fill", noting)
    assert tokens_and_reasons(answers(runner, params, recorded(found, 0.8), guesses=2)) == want
    filled = sorted(key for key in filled if key != "broken")
    assert filled == sorted(params[i].grammar.key for i in (0, 2, 3, 5)), filled


@pytest.mark.thorough
@pytest.mark.thorough
def test_automata_follow_the_draft_tokens_of_a_head():
    """At first the host masks the samples after draft tokens, then automata on the device do."""
    letters = regex("[ab]{4,12}c")
    params = [hot(letters, max_tokens=14), hot(letters, max_tokens=14, temperature=0.0), hot(None, max_tokens=9)]
    want = tokens_and_reasons(answers(small_runner("torch"), params))
    runner = small_runner("triton", has_head=True)
    assert tokens_and_reasons(answers(runner, params, HeadDrafter(runner.info.head), guesses=2)) == want
    assert runner.steps.head.made is not None, "it has drafted"
    engines = runner.masks._engines.result()
    engines.policy = AutomatonPolicy(0.0, 0)  # at once
    while engines.matcher(letters).engine == "lazy":
        time.sleep(0.02)
    assert tokens_and_reasons(answers(runner, params, HeadDrafter(runner.info.head), guesses=2)) == want


def test_ranks_with_parts_of_the_vocabulary_sample_as_one():
    """Plain and filtered rows within graphs; masks, penalties and log-probabilities beside them."""
    params = [
        hot(regex("(?:ab|c){2,4}"), max_tokens=2, logprobs=1, presence_penalty=1.0),
        SamplingParams(max_tokens=2, temperature=0.9, top_p=0.9),
        SamplingParams(max_tokens=2, temperature=0.0),
    ]

    def add_graphs(runner: ModelRunner) -> None:
        replayed_graphs(runner.steps, (1, 3), MixedShape(16, 3, 4, 4, 16, runner.info.max_model_len))

    found = answers(SplitRunner(2, partial(small_runner, "triton"), add_graphs), params)
    assert all(len(tokens) == 2 for tokens, _, _ in found.values())


@pytest.mark.thorough
def test_a_row_waits_for_its_matcher_and_others_go_on(monkeypatch):
    """Within captured steps of two rows; one of them is not sampled."""
    params = [hot(SLOW[0], max_tokens=3), hot(None, max_tokens=5)]
    both(small_runner("triton", (1,)), monkeypatch, params, {"1"})
