"""Structured output in a runner: the matchers of outputs with a grammar, and their masks for a step.

A matcher stands after an output's known tokens, so a request continues after a preemption or a restart (C8). A step's
masks depend on the previous step's tokens; they are computed while the device computes. An output with an automaton
leaves the host after its first token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.model_info import ModelInfo
from runtime.base.reports import GrammarSamples
from runtime.base.shard import ALONE, Shard
from runtime.base.types import CallboardError
from runtime.core.plan import NewSlot, StepPlan, StepResult
from runtime.features.device_automata import DeviceAutomata
from runtime.features.grammar_output import GrammarOutput, made_factory
from runtime.kernels.sampling.automata import AT, FIRST, GUESSES, NUM_GUESSES, SLOT
from runtime.structured.matching.automaton import EagerMatcher
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.structured.matching.factory import MatcherFactory
from runtime.structured.matching.lazy import LazyMatcher
from runtime.structured.matching.thinking import ThinkingMatcher
from runtime.text.vocabulary import Vocabulary
from runtime.worker.extras import RunnerParts, TokenMasks
from runtime.worker.sources import ModelSource

_MAKING_S = 0.002  # most seconds that a step waits for new outputs' matchers; a small grammar takes half
_IDLE_S = 0.01  # the same for a step in which all rows wait for their matchers


@dataclass(slots=True)
class _Row:
    """A step's row: samples follow its last known token and each of its guesses."""

    slot: int
    output: GrammarOutput
    first: int  # its first sample's number in the step
    position: int  # the position of that sample's token
    guesses: list[int]
    waits: bool = False  # True if it waits for its matcher and is not sampled in this step

    @property
    def num_samples(self) -> int:
        return len(self.guesses) + 1


@dataclass(slots=True)
class Masks:
    """The tokens that a step may sample. A sample outside `numbers` and `tracked` may be any token."""

    numbers: Int32s  # [n] sample numbers in the step, rising
    words: Int32s  # [n, num_words], as Matcher.fill has them
    failed: Int32s  # numbers of samples that are not drawn: the grammar cannot continue, or waits for its matcher
    rows: list[_Row]  # rows with drawn samples
    # [n, GUESSES + most guesses], rows for outputs on the device, as kernels/sampling/automata.py has them
    tracked: Int32s
    automata: DeviceAutomata | None
    begun: tuple[int, int]  # new outputs with the lazy and the eager engine
    failures: dict[int, str]  # why requests failed (C9), by the number of the row's first sample
    deferred: list[int]  # first sample numbers of rows that wait for a matcher

    def report(self, result: StepResult) -> None:
        if self.deferred or self.failures or any(self.begun):
            result.reports.append((-1, GrammarSamples(self.deferred, self.failures, self.begun)))


class GrammarState:
    """The outputs with a grammar, by slot. A step requests `masks` and, if it gets any, reports with `sampled`."""

    def __init__(
        self,
        vocab_size: int,
        is_draft: bool = False,
        shard: Shard = ALONE,
        new_automata: Callable[[], DeviceAutomata] | None = None,  # None unless a device can follow automata
    ) -> None:
        """A draft's outputs are rewritten; without a matcher, they go on free.

        Only rank 0 follows outputs; the other ranks take its tokens. The engine of an output, and so its limits, depend
        on time, so two ranks could disagree."""
        self._num_words, self._is_draft, self._shard = -(-vocab_size // 32), is_draft, shard
        self.step_us = math.inf  # time of a decode step with many rows, once a device has measured it
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._engines: Future[MatcherFactory] | None = None
        self._outputs: dict[int, GrammarOutput] = {}
        self._last: tuple[Masks, Callable[[], Int32s]] | None = None
        self._new_automata = new_automata
        self._automata: DeviceAutomata | None = None
        self._source: ModelSource | None = None

    @classmethod
    def of(cls, parts: RunnerParts) -> GrammarState:
        """For a runner's model."""
        numerics, spec = parts.decoder.numerics, parts.decoder.spec
        on_device = numerics.backend == "triton"
        new_automata = partial(DeviceAutomata, parts.num_slots, numerics.device) if on_device else None
        state = cls(spec.whole.vocab_size, parts.is_draft, spec.shard, new_automata)
        state._source = parts.source
        return state

    def open(self, info: ModelInfo, asynchronous: bool, large_step_us: float) -> None:
        """Serve the vocabulary of the model, if it has one."""
        self.step_us = large_step_us
        assert self._source is not None
        read_vocabulary = self._source.vocabulary_reader(info)
        waits_for_masks = self._is_draft and asynchronous  # a device's draft would wait for its host at every token
        if read_vocabulary is not None and not waits_for_masks:
            self.serve(read_vocabulary)

    def serve(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Make a factory for the model's vocabulary, which takes about a second. A target makes it in the background.

        Without it, an output with a grammar fails."""
        if self._shard.rank:
            return
        self._engines = self._thread.submit(lambda: self._make_factory(vocabulary()))
        if self._is_draft:
            self._engines.exception()  # waits: its engine decodes without a draft meanwhile

    def _make_factory(self, vocabulary: Vocabulary) -> MatcherFactory:
        policy = None if self._is_draft else AutomatonPolicy(self.step_us, len(vocabulary.tokens))
        return MatcherFactory(vocabulary, policy)

    def reset(self) -> None:
        """Forget all requests."""
        for slot in list(self._outputs):
            self.remove(slot)
        self._last, self._automata = None, None if self._new_automata is None else self._new_automata()

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.remove(new.slot)
        grammar, thinking = new.params.grammar, new.params.thinking
        if (grammar or thinking) and not self._shard.rank:
            output = GrammarOutput(grammar, thinking, new.prompt_len, new.token_ids[new.prompt_len :].tolist())
            if self._engines is None:
                output.failed, output.failure = True, "This model runner serves no structured output."
            else:
                output.begin(self._thread, self._engines)  # while the prompt is computed
            self._outputs[new.slot] = output

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        if (output := self._outputs.pop(slot, None)) is None:
            return
        output.cancel()
        if output.matcher is not None and output.grammar is not None:
            self._made_factory().spent(output.grammar, output.host_s)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Return the masks for the plan's samples; None if all may be any token.

        Host masks need the samples from the last plan with such masks, so this waits for them."""
        if not self._outputs:
            return None
        if self._is_draft:
            self._rewrite(plan)
        if not (all_rows := self._rows(plan)):
            return None
        rows = [row for row in all_rows if not row.output.on_device]
        if rows:
            self._take_last()
        without = [row for row in rows if row.output.matcher is None]
        self._find_matchers(rows, len(plan.slots))
        new = [row for row in without if row.output.matcher is not None]
        words = np.empty((sum(row.num_samples for row in rows), self._num_words), np.int32)
        self._fill(rows, words)
        numbers = _numbers(rows)
        if self._is_draft:  # its outputs are all on the host
            all_rows = rows = self._without_failed(rows)
        for row in new + self._left_thinking(rows):
            row.output.on_device = self._moves(row.slot, row.output)
        return Masks(
            numbers=numbers,
            words=words,
            failed=_numbers([row for row in rows if row.output.failed or row.waits]),
            rows=[row for row in rows if not row.waits],
            # Failed rows, too: the warm-up's row then compiles all kernels.
            tracked=_tracked([row for row in all_rows if row.output.on_device or row.output.failed]),
            automata=self._automata,
            begun=_begun(new),
            failures={row.first: row.output.failure for row in rows if row.output.failed},
            deferred=[row.first for row in rows if row.waits],
        )

    def _without_failed(self, rows: list[_Row]) -> list[_Row]:
        """Forget the failed outputs of a draft; return the other rows."""
        for row in rows:
            if row.output.failed:
                self.remove(row.slot)
        return [row for row in rows if not row.output.failed]

    def sampled(self, masks: TokenMasks, tokens: Callable[[], Int32s]) -> None:
        """`tokens()` waits for the samples of the step that had these masks, [num_sampled]."""
        assert isinstance(masks, Masks)
        if masks.rows:
            self._last = masks, tokens

    def _rewrite(self, plan: StepPlan) -> None:
        """Replace a draft's sampled tokens by its plan's final tokens (speculation/draft.py)."""
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
        positions = (plan.ends - plan.num_samples + 1).tolist()
        columns = plan.slots.tolist(), sizes, ends, positions, given_ends
        for slot, size, end, position, given_end in zip(*columns, strict=True):
            if size and (output := self._outputs.get(slot)) is not None:
                guesses = plan.draft_token_ids[given_end - size + 1 : given_end].tolist() if size > 1 else []
                rows.append(_Row(slot, output, end - size, position, guesses))
        return rows

    def _find_matchers(self, rows: list[_Row], num_rows: int) -> None:
        """Note the rows that wait for a matcher, or for an earlier token that was not sampled.

        A step with `num_rows` rows waits at most _MAKING_S for new outputs' matchers; if all rows wait, _IDLE_S."""
        begun, waiting = time.perf_counter(), []
        for row in rows:
            row.waits = row.position > row.output.end and not row.output.failed
            if not row.waits and not self._has_matcher(row.output, begun + _MAKING_S):
                row.waits = True
                waiting.append(row)
        if waiting and len(waiting) == num_rows and self._engines is not None:
            making = [m for row in waiting if (m := row.output.begin(self._thread, self._engines)) is not None]
            wait(making, _IDLE_S, FIRST_COMPLETED)
            for row in waiting:
                row.waits = not self._has_matcher(row.output, math.inf)

    def _has_matcher(self, output: GrammarOutput, until: float) -> bool:
        """Return False if its matcher cannot be made until this time. A failed output does not need one."""
        if output.matcher is not None or output.failed:
            return True
        assert self._engines is not None
        making = output.begin(self._thread, self._engines)
        if making is not None and output.is_new:
            wait((making,), max(0.0, until - time.perf_counter()))
        output.is_new = False
        if time.perf_counter() >= until if making is None else not making.done():
            return False
        try:
            output.adopt(self._engines)
        except CallboardError as e:
            output.fail(e)
        return True

    def _moves(self, slot: int, output: GrammarOutput) -> bool:
        """Move the output to the device if an automaton can follow it there; return True if it moved."""
        matcher = output.matcher
        if self._automata is None or output.failed or not isinstance(matcher, EagerMatcher) or matcher.is_finished:
            return False
        return self._automata.enter(slot, matcher)

    def _left_thinking(self, rows: list[_Row]) -> list[_Row]:
        """Return the rows that end their reasoning and go on with a grammar; drop the others' outputs.

        A draft may take tokens back, so its reasoning never ends for good."""
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
        """Take the samples that the scheduler accepts (core/plan.py): up to the first that does not equal its guess."""
        samples = tokens().tolist()
        for row in masks.rows:
            for token, guess in zip(samples[row.first :], [*row.guesses, -1], strict=False):
                if token < 0 and not row.output.failed:
                    row.output.fail("its logits are not finite")
                row.output.tokens.append(token)
                if token != guess:
                    break

    def _made_factory(self) -> MatcherFactory:
        """Wait for the factory. A vocabulary without one fails the outputs that need it, not the step."""
        assert self._engines is not None
        return made_factory(self._engines.result)

    def _fill(self, rows: list[_Row], words: Int32s) -> None:
        """Fill the masks of rows. A mask after a rejected guess allows all tokens: its sample does not count."""
        started, begin, spans = time.perf_counter(), 0, []
        together: list[tuple[_Row, LazyMatcher, int]] = []
        for row in rows:
            output, span = row.output, slice(begin, begin + row.num_samples)
            begin = span.stop
            spans.append(span)
            try:
                if output.matcher is not None and not output.failed and not row.waits:
                    output.take()
                    if not row.guesses and isinstance(output.matcher, LazyMatcher):
                        together.append((row, output.matcher, span.start))
                    else:
                        words[span] = -1
                        output.matcher.fill_ahead(words[span], row.guesses)
            except CallboardError as e:
                self._stop(row, e)
        if together:
            stepping, matchers, numbers = zip(*together, strict=True)
            errors = self._made_factory().fill(matchers, words, numbers)
            for row, error in zip(stepping, errors, strict=True):
                if error is not None:
                    self._stop(row, error)
        allowed = np.asarray(words.any(1))
        all_go_on = bool(allowed.all())
        share = (time.perf_counter() - started) / max(1, len(rows))
        for row, span in zip(rows, spans, strict=True):
            output = row.output
            output.host_s += share
            if not all_go_on and not output.failed and not row.waits and not allowed[span].all():
                output.fail("No token of this model continues what this request's grammar allows there.")
            if output.failed or row.waits:
                words[span] = -1

    def _stop(self, row: _Row, why: CallboardError) -> None:
        """The row's matcher cannot go on: its output fails, or waits for another one."""
        row.output.stop(why)
        if not row.output.failed:
            row.waits = True
            assert self._engines is not None
            row.output.begin(self._thread, self._engines)


def _numbers(rows: list[_Row]) -> Int32s:
    """The numbers of the rows' samples in the step."""
    return np.array([row.first + i for row in rows for i in range(row.num_samples)], np.int32)


def _begun(new: list[_Row]) -> tuple[int, int]:
    """Count the new outputs with the lazy and the eager engine."""
    engines = [row.output.matcher.engine for row in new if row.output.matcher and not row.output.alone]
    return engines.count("lazy"), engines.count("eager")


def _tracked(rows: list[_Row]) -> Int32s:
    table = np.zeros((len(rows), GUESSES + max((len(row.guesses) for row in rows), default=0)), np.int32)
    for line, row in zip(table, rows, strict=True):
        line[[SLOT, FIRST, AT, NUM_GUESSES]] = row.slot, row.first, row.first, len(row.guesses)
        line[GUESSES : GUESSES + len(row.guesses)] = row.guesses
    return table
