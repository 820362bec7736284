"""Structured output: the matchers of the slots whose output is bound to a grammar, and their masks for a step.

A matcher stands where an output's known tokens lead to, so that a request that comes back after a preemption or a
restart goes on where it was (C8). The masks of a step depend on the tokens of the step before: a device's are made
while it computes. Outputs whose grammar is an automaton leave the host after their first token.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from runtime.core.plan import Int32s, NewSlot, StepPlan
from runtime.core.sharding import ALONE, Shard
from runtime.core.types import CallboardError, Grammar, ThinkingBudget
from runtime.kernels.automata import AT, FIRST, GUESSES, NUM_GUESSES, SLOT
from runtime.structured.automaton import EagerMatcher
from runtime.structured.automaton_policy import AutomatonPolicy
from runtime.structured.engines import Engines
from runtime.structured.lazy import LazyMatcher
from runtime.structured.matcher import Matcher
from runtime.structured.thinking import ThinkingMatcher
from runtime.structured.vocabulary import Vocabulary
from runtime.worker.device_automata import DeviceAutomata

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Output:
    """The output of the request in a slot."""

    grammar: Grammar | None
    thinking: ThinkingBudget | None
    prompt_len: int
    untaken: list[int]  # its last tokens, which the matcher has not advanced by
    num_taken: int = 0
    matcher: Matcher | None = None  # made with the first mask
    failed: bool = False
    failure: str = ""  # why
    host_s: float = 0.0  # spent on its masks
    on_device: bool = False  # it follows an automaton there, and its matcher stays behind

    def fail(self, why: object) -> None:
        """Its request ends, and others go on (C9)."""
        logger.info("a request fails: %s", why)
        self.failed, self.failure = True, " ".join(str(why).split())

    def take(self) -> None:
        """Advance the matcher by what it has not seen."""
        assert self.matcher is not None
        self.matcher.advance(self.untaken)
        self.num_taken += len(self.untaken)
        self.untaken = []

    def rewrite(self, at: int, tokens: list[int]) -> None:
        """From position `at` on it has these tokens."""
        at -= self.prompt_len
        if self.matcher is not None and at < self.num_taken:
            try:
                self.matcher.rollback(self.num_taken - at)
            except CallboardError as e:
                self.fail(e)
            self.num_taken = at
        self.untaken[at - self.num_taken :] = tokens


@dataclass(slots=True)
class _Row:
    """A row of a step: samples follow its last known token and each of its guesses."""

    slot: int
    output: _Output
    first: int  # of its samples, in the step
    guesses: list[int]


@dataclass(slots=True)
class Masks:
    """The tokens that a step may sample; samples that are not in `numbers`, nor tracked, may be any."""

    numbers: Int32s  # [n] of samples of the step, rising
    words: Int32s  # [n, num_words], as Matcher.fill has them
    failed: Int32s  # numbers of the samples whose grammar cannot go on: their requests fail (C9)
    rows: list[_Row]  # the rows that have these samples
    tracked: Int32s  # [n, GUESSES + most guesses], rows of outputs on the device, as kernels/automata.py has them
    automata: DeviceAutomata | None
    begun: tuple[int, int]  # outputs for the first time here, by the engine that serves them: lazy, eager
    failures: dict[int, str]  # why, by the number of the first sample of each row that fails


class GrammarState:
    """The outputs that are bound to a grammar, by slot. Each step asks for `masks`, and, if there are any, tells what
    was `sampled`."""

    def __init__(self, vocab_size: int, is_draft: bool = False, shard: Shard = ALONE) -> None:
        """A draft's outputs are rewritten, and where a grammar cannot be served they go on without it. Ranks other than
        0 follow no output and take rank 0's tokens: which engine serves an output, and so which limits it may come to,
        depends on time, and masks would cost each rank the same again."""
        self._num_words, self._is_draft, self._shard = -(-vocab_size // 32), is_draft, shard
        self.step_us = math.inf  # a decode step of many rows, once a device's was measured
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._engines: Future[Engines] | None = None
        self._outputs: dict[int, _Output] = {}
        self._last: tuple[Masks, Callable[[], Int32s]] | None = None
        self._automata: DeviceAutomata | None = None

    def serve(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Make engines for the model's vocabulary, which takes about a second: a target's in the background, unless
        other ranks would wait for it in a step. Until this is called, no output that has a grammar can be served."""
        if self._shard.rank:
            return
        self._engines = self._thread.submit(lambda: self._make_engines(vocabulary()))
        if self._is_draft or self._shard.size > 1:
            self._engines.exception()  # waits: nobody needs a draft that starts, all wait for one that answers

    def _make_engines(self, vocabulary: Vocabulary) -> Engines:
        policy = None if self._is_draft else AutomatonPolicy(self.step_us, len(vocabulary.tokens))
        return Engines(vocabulary, policy)

    def clear(self, automata: DeviceAutomata | None = None) -> None:
        """Forget all requests. `automata`, where there is a device that follows them."""
        for slot in list(self._outputs):
            self.remove(slot)
        self._last, self._automata = None, automata

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.remove(new.slot)
        grammar, thinking = new.params.grammar, new.params.thinking
        if (grammar or thinking) and not self._shard.rank:
            output = _Output(grammar, thinking, new.prompt_len, new.token_ids[new.prompt_len :].tolist())
            if self._engines is None:
                output.failed, output.failure = True, "This model runner serves no structured output."
            self._outputs[new.slot] = output

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        output = self._outputs.pop(slot, None)
        if output is not None and output.matcher is not None and output.grammar is not None:
            self._made_engines().spent(output.grammar, output.host_s)

    def masks(self, plan: StepPlan) -> Masks | None:
        """The masks of the plan's samples; None if all of them may be any token. If some are the host's to make, it
        waits for the samples of the last plan that had such."""
        if not self._outputs:
            return None
        if self._is_draft:
            self._rewrite(plan)
        if not (all_rows := self._rows(plan)):
            return None
        rows = [row for row in all_rows if not row.output.on_device]
        if rows:
            self._take_last()
        new = [row for row in rows if row.output.matcher is None]
        numbers = [number for row in rows for number in range(row.first, row.first + len(row.guesses) + 1)]
        words = np.empty((len(numbers), self._num_words), np.int32)
        self._fill(rows, words)
        if self._is_draft:  # whose outputs are all the host's
            for row in rows:
                if row.output.failed:
                    self.remove(row.slot)
            all_rows = rows = [row for row in rows if not row.output.failed]
        for row in new + self._left_thinking(rows):
            row.output.on_device = self._moves(row.slot, row.output)
        failed = [row.first + i for row in rows if row.output.failed for i in range(len(row.guesses) + 1)]
        failures = {row.first: row.output.failure for row in rows if row.output.failed}
        engines = [row.output.matcher.engine for row in new if row.output.matcher is not None]
        begun = engines.count("lazy"), engines.count("eager")
        # Failed ones too, whatever their slots' states are, so that the warm-up's row has all kernels compiled.
        tracked = _tracked([row for row in all_rows if row.output.on_device or row.output.failed])
        as_arrays = np.array(numbers, np.int32), words, np.array(failed, np.int32)
        return Masks(*as_arrays, rows, tracked, self._automata, begun, failures)

    def sampled(self, masks: Masks, tokens: Callable[[], Int32s]) -> None:
        """`tokens()` waits for the samples of the step that had these masks, [num_sampled]."""
        if masks.rows:
            self._last = masks, tokens

    def _rewrite(self, plan: StepPlan) -> None:
        """The tokens that a draft's plan brings are final (core/draft.py): they replace those sampled there."""
        if not len(plan.draft_token_ids):
            return
        self._take_last()
        firsts, ends = plan.ends - plan.draft_lens, np.cumsum(plan.draft_lens)
        for slot, first, given, end in zip(
            plan.slots.tolist(), firsts.tolist(), plan.draft_lens.tolist(), ends, strict=True
        ):
            if given and (output := self._outputs.get(slot)) is not None:
                output.rewrite(first, plan.draft_token_ids[end - given : end].tolist())

    def _take_last(self) -> None:
        if self._last is not None:
            self._take(*self._last)
            self._last = None

    def _rows(self, plan: StepPlan) -> list[_Row]:
        rows = []
        sizes, ends = plan.num_samples.tolist(), np.cumsum(plan.num_samples).tolist()
        given_ends = np.cumsum(plan.draft_lens).tolist() or ends
        for slot, size, end, given_end in zip(plan.slots.tolist(), sizes, ends, given_ends, strict=True):
            if size and (output := self._outputs.get(slot)) is not None:
                guesses = plan.draft_token_ids[given_end - size + 1 : given_end].tolist() if size > 1 else []
                rows.append(_Row(slot, output, end - size, guesses))
        return rows

    def _moves(self, slot: int, output: _Output) -> bool:
        """Move the output to the device, if an automaton there can follow it; True if it goes on there."""
        matcher = output.matcher
        if self._automata is None or output.failed or not isinstance(matcher, EagerMatcher) or matcher.is_finished:
            return False
        return self._automata.enter(slot, matcher)

    def _left_thinking(self, rows: list[_Row]) -> list[_Row]:
        """Of the rows whose reasoning is over, those that go on with a grammar; the others are bound no longer. A draft
        may have to take tokens back, so that nothing is ever over there."""
        left = []
        for row in rows:
            matcher = row.output.matcher
            if isinstance(matcher, ThinkingMatcher) and matcher.is_closed and not self._is_draft:
                if matcher.inner is None:
                    del self._outputs[row.slot]
                else:
                    row.output.matcher = matcher.inner
                    left.append(row)
        return left

    def _take(self, masks: Masks, tokens: Callable[[], Int32s]) -> None:
        """As the scheduler does (core/plan.py): samples count up to the first that does not equal its guess."""
        samples = tokens().tolist()
        for row in masks.rows:
            for token, guess in zip(samples[row.first :], [*row.guesses, -1], strict=False):
                if token < 0 and not row.output.failed:
                    row.output.fail("its logits are not finite")
                row.output.untaken.append(token)
                if token != guess:
                    break

    def _made_engines(self) -> Engines:
        """Waits for them. A vocabulary that they cannot be made for fails the outputs that need them, not the step."""
        assert self._engines is not None
        try:
            return self._engines.result()
        except Exception as e:  # whatever llguidance, or the reader of the tokenizer, does not like
            raise CallboardError(f"Structured output does not work with this model's tokenizer: {e}") from e

    def _fill(self, rows: list[_Row], words: Int32s) -> None:
        """A mask after a guess that is not allowed stays open: no sample equals that guess, so none there counts."""
        started, begin, spans = time.perf_counter(), 0, []
        together: list[tuple[_Output, LazyMatcher, int]] = []
        for row in rows:
            output, span = row.output, slice(begin, begin + len(row.guesses) + 1)
            begin = span.stop
            spans.append(span)
            try:
                if output.matcher is None and not output.failed:
                    asked = time.perf_counter()
                    output.matcher = self._made_engines().matcher(output.grammar, output.thinking)
                    started += time.perf_counter() - asked  # masks alone count
                if output.matcher is not None and not output.failed:
                    output.take()
                    if not row.guesses and isinstance(output.matcher, LazyMatcher):
                        together.append((output, output.matcher, span.start))
                    else:
                        words[span] = -1
                        output.matcher.fill_ahead(words[span], row.guesses)
            except CallboardError as e:
                output.fail(e)
        if together:
            outputs, matchers, numbers = zip(*together, strict=True)
            errors = self._made_engines().fill(matchers, words, numbers)
            for output, error in zip(outputs, errors, strict=True):
                if error is not None:
                    output.fail(error)
        allowed = np.asarray(words.any(1))
        all_go_on = bool(allowed.all())
        share = (time.perf_counter() - started) / max(1, len(rows))
        for row, span in zip(rows, spans, strict=True):
            output = row.output
            output.host_s += share
            if not all_go_on and not output.failed and not allowed[span].all():
                output.fail("No token of this model continues what this request's grammar allows there.")
            if output.failed:
                words[span] = -1


def _tracked(rows: list[_Row]) -> Int32s:
    table = np.zeros((len(rows), GUESSES + max((len(row.guesses) for row in rows), default=0)), np.int32)
    for line, row in zip(table, rows, strict=True):
        line[[SLOT, FIRST, AT, NUM_GUESSES]] = row.slot, row.first, row.first, len(row.guesses)
        line[GUESSES : GUESSES + len(row.guesses)] = row.guesses
    return table
