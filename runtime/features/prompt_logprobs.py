"""Log-probabilities of prompts: a prompt may take several steps, and its parts are joined here.

A request may bring an output behind its prompt (`Request.prompt_len`), which is scored, too."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from runtime.base.types import FinishReason, PromptLogprobs, StepOutput
from runtime.core.extra import Culprit, Ended, Extra
from runtime.core.plan import StepResult, num_targets
from runtime.core.request_state import RequestState
from runtime.core.step import Step


class _ScoredRow(NamedTuple):
    """A planned row of a request that scores its prompt."""

    state: RequestState
    epoch: int
    num_targets: int  # given tokens that it scores
    is_last: bool  # True if it reaches the last known token


class _Parts:
    """The parts of one prompt, a step each. A preemption begins again (C3)."""

    __slots__ = ("epoch", "parts")

    def __init__(self) -> None:
        self.epoch, self.parts = -1, list[PromptLogprobs]()


class PromptScoring(Extra):
    """Serves `prompt_logprobs`."""

    serves = frozenset({"prompt_logprobs"})

    def __init__(self) -> None:
        self._prompts: dict[RequestState, _Parts] = {}  # that are not complete
        self._planned: list[_ScoredRow] = []  # rows of the step that is being planned
        self._in_flight: dict[int, list[_ScoredRow]] = {}  # by the id of the step

    def on_add(self, state: RequestState) -> None:
        if state.params.prompt_logprobs is not None:
            state.reads_cache = False  # the cache holds no log-probabilities
            state.on_row = self._note_row
            self._prompts[state] = _Parts()

    def _note_row(self, state: RequestState, start: int, count: int) -> None:
        is_last = start + count == state.num_total
        num_given = len(state.request.token_ids)
        self._planned.append(_ScoredRow(state, state.epoch, num_targets(start, count, num_given), is_last))

    def on_plan(self, step: Step) -> None:
        if self._planned:
            self._in_flight[step.step_id], self._planned = self._planned, []

    def on_result(self, step: Step, result: StepResult, output: StepOutput) -> Ended:
        """Store the parts of the step's prompts, and report the complete ones."""
        ended: Ended = []
        at = 0
        for state, epoch, num, is_last in self._in_flight.pop(step.step_id, ()):
            prompt = self._prompts.get(state)
            if prompt is not None and state.epoch == epoch:
                if prompt.epoch != epoch:
                    prompt.epoch, prompt.parts = epoch, []
                prompt.parts.append(result.prompt_logprobs(at, num, state.params.prompt_logprobs or 0))
                if is_last:
                    ended += self._complete(state, prompt, output)
            at += num
        return ended

    def _complete(self, state: RequestState, prompt: _Parts, output: StepOutput) -> Ended:
        columns = PromptLogprobs(*map(b"".join, zip(*prompt.parts, strict=True)))
        output.prompt_logprobs.append((state, columns))
        del self._prompts[state]
        state.on_row = None
        if state.only_scores:
            return [(state, end_of(columns.logprobs))]
        state.reads_cache = True
        state.params = replace(state.params, prompt_logprobs=None)  # a preemption need not score it again
        return []

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._prompts.pop(state, None)

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        self._in_flight.clear()
        return None


def end_of(numbers: bytes) -> FinishReason:
    """Return the finish reason of a request with these float32 numbers as output: ERROR if one is not finite."""
    return FinishReason.LENGTH if np.isfinite(np.frombuffer(numbers, np.float32)).all() else FinishReason.ERROR
