"""A matcher that takes long to make: its row waits, other rows go on, and no token changes."""

import threading

import pytest

from runtime.base.types import FinishReason, Grammar
from runtime.core.engine import EngineCore
from runtime.core.executor import InProcess
from runtime.features import grammar_state
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.lazy import LazyEngine
from runtime.text.vocabulary import BYTES
from runtime.worker.runner import ModelRunner
from tests.support.structured.cases import regex
from tests.support.structured.engine import Answers, answers, hot, recorded, runner_of

SLOW = [regex("(?:ab|c){3,9}s"), regex("[a-z]{4,9}t")]
QUICK = regex("(?:ab|c){4,9}q")


class SlowMatchers:
    """Matchers of SLOW are made when `gate` is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.makers, make = threading.Event(), set[str](), LazyEngine.matcher

        def matcher(engine: LazyEngine, lark: str):
            if lark in [grammar.lark for grammar in SLOW]:
                self.makers.add(threading.current_thread().name)
                assert threading.current_thread() is threading.main_thread() or self.gate.wait(60)
            return make(engine, lark)

        monkeypatch.setattr(LazyEngine, "matcher", matcher)
        monkeypatch.setattr(grammar_state, "_MAKING_S", 0.0)

    def open_when(self, names: set[str], deferred: list[int]):
        """For `answers`: opens the gate when requests of these names have ended."""

        def between(core: EngineCore, step: int) -> None:
            deferred.append(step)
            if not names & core.scheduler.requests.keys():
                self.gate.set()

        return between


def forget(runner: ModelRunner) -> None:
    """SLOW ones are new to the runner."""
    entries = runner.masks._made_factory()._entries
    for grammar in SLOW:
        entries.pop(grammar.key, None)


def both(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, params: list, others: set[str], **kw) -> Answers:
    """The answers without a wait; they are the same while SLOW ones wait until `others` have ended."""
    plain = answers(runner, params)
    forget(runner)
    slow, steps = SlowMatchers(monkeypatch), []
    assert answers(runner, params, between=slow.open_when(others, steps), **kw) == plain
    assert slow.makers == {"grammars_0"}, "a step has made the matcher of a new grammar"
    return plain


@pytest.mark.parametrize("depth", [1, 2])
def test_other_rows_go_on_while_a_matcher_is_made(depth: int, monkeypatch):
    params = [hot(SLOW[0]), hot(None, max_tokens=20), hot(QUICK), hot(SLOW[1], logprobs=1), hot(SLOW[0], seed=5)]
    plain = both(runner_of(pipeline_depth=depth), monkeypatch, params, {"1", "2"})
    assert [reason for _, reason, _ in plain.values()].count(FinishReason.STOP) >= 3


def test_an_idle_engine_notices_a_finished_matcher(monkeypatch):
    """Only rows that wait: steps are few, since each waits for a matcher."""
    runner = runner_of()
    params = [hot(SLOW[0])]
    plain = answers(runner, params)
    forget(runner)
    slow, steps = SlowMatchers(monkeypatch), []
    threading.Timer(0.05, slow.gate.set).start()
    assert answers(runner, params, between=lambda core, step: steps.append(step)) == plain
    assert len(steps) < 2 * len(plain["0"][0]) + 20


def test_guesses_wait_with_their_row(monkeypatch):
    runner = runner_of()
    params = [hot(SLOW[0]), hot(None, max_tokens=12)]
    drafter = recorded(answers(runner, params), 0.7)
    both(runner, monkeypatch, params, {"1"}, drafter=drafter)


def test_requests_that_come_back_wait_for_their_long_outputs(monkeypatch):
    """After a loss of runners, a matcher advances by many tokens: that is made beside the steps, too."""
    long = regex("(?:ab|[^a])*")
    params = [hot(long, max_tokens=100, logit_bias=tuple((i, -99.0) for i in range(256, 260)))] * 2
    runner = runner_of()
    plain = answers(runner, params)
    made = []
    make = grammar_state.GrammarOutput._made

    def note(output, engines, tokens):
        made.append(len(tokens))
        return make(output, engines, tokens)

    monkeypatch.setattr(grammar_state.GrammarOutput, "_made", note)

    def lose_runners(core: EngineCore, step: int) -> None:
        if step == 85:
            runner.reset()
            core.recover(InProcess(runner))

    assert answers(runner, params, between=lose_runners) == plain
    assert any(count > 64 for count in made) or all(len(tokens) < 70 for tokens, _, _ in plain.values())


def test_a_request_that_leaves_gives_its_matcher_up(monkeypatch):
    runner = runner_of()
    answers(runner, [hot(None, max_tokens=1)])
    runner.masks._made_factory()
    slow = SlowMatchers(monkeypatch)

    def leave(core: EngineCore, step: int) -> None:
        if step == 3:
            core.abort("0")
            core.abort("1")
            slow.gate.set()

    found = answers(runner, [hot(SLOW[0]), hot(SLOW[1]), hot(None, max_tokens=9, ignore_eos=True)], between=leave)
    assert list(found) == ["2"]
    assert not runner.masks._outputs


def test_a_fault_of_the_maker_ends_its_request_alone(monkeypatch):
    make = LazyEngine.matcher

    def matcher(engine: LazyEngine, lark: str):
        if lark == SLOW[0].lark:
            raise RuntimeError("a panic")
        return make(engine, lark)

    monkeypatch.setattr(LazyEngine, "matcher", matcher)
    found = answers(runner_of(), [hot(SLOW[0]), hot(QUICK)])
    assert {name: reason for name, (_, reason, _) in found.items()} == {
        "0": FinishReason.GRAMMAR,
        "1": FinishReason.STOP,
    }


def test_prototypes_count_in_the_memory_of_the_cache():
    engines = MatcherFactory(BYTES, max_bytes=3 << 19)
    small = [Grammar(f"{i}", regex(f"{i}+").lark, "") for i in range(5)]
    large = Grammar("large", regex("x" * 40_000).lark, "")
    for grammar in small:
        engines.matcher(grammar)
    assert len(engines._entries) == 5
    engines.matcher(large)
    assert [engines.is_ready(grammar) for grammar in small] == [False, False, True, True, True]
    assert engines.is_ready(large)
    engines.close()
