"""Structured output: the matchers of the slots whose output is bound to a grammar, and their masks for a step.

A matcher stands where an output's known tokens lead to, so that a request that comes back after a preemption or a
restart goes on where it was (C8). The masks of a step depend on the tokens of the step before: a device's are made
while it computes. Outputs whose grammar is an automaton leave the host after their first token.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.core.plan import EMPTY, Int32s, NewSlot, StepPlan
from runtime.core.types import CallboardError, Grammar
from runtime.kernels.automata import AT, FIRST, GUESSES, NUM_GUESSES, SLOT
from runtime.structured.automaton import EagerMatcher
from runtime.structured.engines import Engines
from runtime.structured.matcher import Matcher
from runtime.structured.vocabulary import Vocabulary
from runtime.worker.device_automata import DeviceAutomata

logger = logging.getLogger(__name__)

_ROWS_OF_A_THREAD = 4  # at least: to hand rows over costs about what a mask does


@dataclass(slots=True)
class _Output:
    """One request's, in its slot."""

    grammar: Grammar
    untaken: list[int]  # its last tokens, which the matcher has not advanced by
    matcher: Matcher | None = None  # made with the first mask
    failed: bool = False
    on_device: bool = False  # it follows an automaton there, and its matcher stays behind


@dataclass(slots=True)
class _Row:
    """A row of a step: samples follow its last known token and each of its guesses."""

    slot: int
    output: _Output
    first: int  # of its samples, in the step
    guesses: list[int]
    words: NDArray[np.int32]  # [len(guesses) + 1, num_words]


@dataclass(slots=True)
class Masks:
    """Which tokens a step may sample; samples that are not in `numbers`, nor tracked, may be any."""

    numbers: Int32s  # [n] of samples of the step, rising
    words: Int32s  # [n, num_words], as Matcher.fill has them
    failed: Int32s  # numbers of the samples whose grammar cannot go on: their requests fail (C9)
    rows: list[_Row]  # that these are of
    tracked: Int32s  # [n, GUESSES + most guesses], rows of outputs on the device, as kernels/automata.py has them
    automata: DeviceAutomata | None
    begun: tuple[int, int]  # outputs for the first time here, by the engine that serves them: lazy, eager


class Structures:
    """The outputs that are bound to a grammar, by slot. Each step asks for `masks`, and, if there are any, tells what
    was `sampled`."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._num_threads = min(8, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")
        self._engines: Future[Engines] | None = None
        self._outputs: dict[int, _Output] = {}
        self._last: tuple[Masks, Callable[[], Int32s]] | None = None
        self._automata: DeviceAutomata | None = None

    def serve(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Make engines for the model's vocabulary in the background, which takes about a second. Until this is called,
        all outputs that have a grammar fail."""
        self._engines = self._threads.submit(lambda: Engines(vocabulary()))

    def clear(self, automata: DeviceAutomata | None = None) -> None:
        """Forget all requests. `automata`, where there is a device that follows them."""
        self._outputs, self._last, self._automata = {}, None, automata

    def add(self, new: NewSlot) -> None:
        """A request enters its slot."""
        self.remove(new.slot)
        if new.params.grammar is not None:
            self._outputs[new.slot] = _Output(
                new.params.grammar, new.token_ids[new.prompt_len :].tolist(), failed=self._engines is None
            )

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        self._outputs.pop(slot, None)

    def masks(self, plan: StepPlan) -> Masks | None:
        """Of the plan's samples; None if all of them may be any token. If some are the host's to make, it waits for the
        samples of the last plan that had such."""
        if not self._outputs or not (all_rows := self._rows(plan)):
            return None
        rows = [row for row in all_rows if not row.output.on_device]
        if rows and self._last is not None:
            self._take(*self._last)
            self._last = None
        new = [row for row in rows if row.output.matcher is None]
        num_parts = max(1, min(self._num_threads, len(rows) // _ROWS_OF_A_THREAD))
        if num_parts == 1:
            self._fill(rows)
        else:
            list(self._threads.map(self._fill, [rows[i::num_parts] for i in range(num_parts)]))
        numbers = [np.arange(row.first, row.first + len(row.words), dtype=np.int32) for row in rows]
        for row in new:
            row.output.on_device = self._moves(row.slot, row.output)
        failed = [at for at, row in zip(numbers, rows, strict=True) if row.output.failed]
        words = np.concatenate([np.zeros((0, self._num_words), np.int32), *(row.words for row in rows)])
        engines = [row.output.matcher.engine for row in new if row.output.matcher is not None]
        begun = engines.count("lazy"), engines.count("eager")
        # Failed ones too, whatever their slots' states are, so that the warm-up's row has all kernels compiled.
        tracked = _tracked([row for row in all_rows if row.output.on_device or row.output.failed])
        numbers, failed = (np.concatenate([EMPTY, *parts]) for parts in (numbers, failed))
        return Masks(numbers, words, failed, rows, tracked, self._automata, begun)

    def sampled(self, masks: Masks, tokens: Callable[[], Int32s]) -> None:
        """`tokens()` waits for the samples of the step that had these masks, [num_sampled]."""
        if masks.rows:
            self._last = masks, tokens

    def _rows(self, plan: StepPlan) -> list[_Row]:
        rows = []
        sizes, ends = plan.samples.tolist(), np.cumsum(plan.samples).tolist()
        given_ends = np.cumsum(plan.given).tolist() or ends
        for slot, size, end, given_end in zip(plan.slots.tolist(), sizes, ends, given_ends, strict=True):
            if size and (output := self._outputs.get(slot)) is not None:
                guesses = plan.given_ids[given_end - size + 1 : given_end].tolist() if size > 1 else []
                words = np.full((0 if output.on_device else size, self._num_words), -1, np.int32)
                rows.append(_Row(slot, output, end - size, guesses, words))
        return rows

    def _moves(self, slot: int, output: _Output) -> bool:
        """Whether the output goes on on the device."""
        matcher = output.matcher
        if self._automata is None or output.failed or not isinstance(matcher, EagerMatcher) or matcher.is_finished:
            return False
        return self._automata.enter(slot, matcher)

    def _take(self, masks: Masks, tokens: Callable[[], Int32s]) -> None:
        """As the scheduler does (core/plan.py): samples count up to the first that does not equal its guess."""
        samples = tokens().tolist()
        for row in masks.rows:
            for token, guess in zip(samples[row.first :], [*row.guesses, -1], strict=False):
                row.output.failed |= token < 0
                row.output.untaken.append(token)
                if token != guess:
                    break

    def _fill(self, rows: list[_Row]) -> None:
        """A mask after a guess that is not allowed stays open: no sample equals that guess, so none there counts."""
        for row in rows:
            output = row.output
            if output.failed:
                continue
            try:
                if output.matcher is None:
                    assert self._engines is not None
                    output.matcher = self._engines.result().matcher(output.grammar)
                output.matcher.advance(output.untaken)
                output.untaken = []
                output.matcher.fill_ahead(row.words, row.guesses)
                if not row.words.any(1).all():
                    raise CallboardError("No token of this model continues what this request's grammar allows.")
            except CallboardError as e:
                logger.info("a request fails: %s", e)
                output.failed = True


def _tracked(rows: list[_Row]) -> Int32s:
    table = np.zeros((len(rows), GUESSES + max((len(row.guesses) for row in rows), default=0)), np.int32)
    for line, row in zip(table, rows, strict=True):
        line[[SLOT, FIRST, AT, NUM_GUESSES]] = row.slot, row.first, row.first, len(row.guesses)
        line[GUESSES : GUESSES + len(row.guesses)] = row.guesses
    return table
