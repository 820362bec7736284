"""The answers of prompts beside tokens: log-probabilities, which become whole again here, and vectors (pooling.py).

A prompt may take several steps, and a preemption starts it again; what came before it is dropped with its epoch (C3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.spec.types import FinishReason, PromptLogprobs


class ScoredRow(NamedTuple):
    """A planned row of a request whose prompt's log-probabilities are still wanted."""

    state: RequestState
    epoch: int
    num_targets: int  # prompt tokens that it scores
    is_last: bool  # it reaches the last known token: with its result, all are there


def collect_prompt_logprobs(result: StepResult, rows: list[ScoredRow]) -> list[tuple[RequestState, PromptLogprobs]]:
    """Keep what the step's rows brought; returns the requests whose prompts are scored whole, and forgets theirs."""
    complete: list[tuple[RequestState, PromptLogprobs]] = []
    at = 0
    for state, epoch, num, is_last in rows:
        if state.epoch == epoch and state.prompt_logprobs is not None:
            state.prompt_logprobs.append(result.prompt_logprobs(at, num, state.params.prompt_logprobs or 0))
            if is_last:
                complete.append((state, PromptLogprobs(*map(b"".join, zip(*state.prompt_logprobs, strict=True)))))
                state.prompt_logprobs = None
                if state.params.max_tokens:
                    state.params = replace(state.params, prompt_logprobs=None)  # a preemption need not score it again
        at += num
    return complete


def collect_vectors(
    result: StepResult, samples: list[tuple[RequestState, int, Any]]
) -> list[tuple[RequestState, bytes]]:
    """The vectors of the step's pooled requests; those that were preempted meanwhile have none."""
    rows = zip(result.pooled_rows.tolist(), result.pooled, strict=True)
    found = ((*samples[row][:2], vector) for row, vector in rows)
    return [(state, vector.tobytes()) for state, epoch, vector in found if state.epoch == epoch]


def ended_with_prompts(
    scores: list[tuple[RequestState, PromptLogprobs]], vectors: list[tuple[RequestState, bytes]]
) -> list[tuple[RequestState, FinishReason]]:
    """The requests that want no more than these. Numbers that are not finite are a fault in the model, which a request
    without output shows nowhere else."""
    found = [(state, columns.logprobs) for state, columns in scores if state.only_scores] + vectors
    is_finite = (np.isfinite(np.frombuffer(numbers, np.float32)).all() for _, numbers in found)
    reasons = (FinishReason.LENGTH if finite else FinishReason.ERROR for finite in is_finite)
    return [(state, reason) for (state, _), reason in zip(found, reasons, strict=True)]
