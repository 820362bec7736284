"""Log-probabilities of prompts: which rows in flight bring some, and how they become whole again.

A prompt may take several steps, and a preemption starts it again; what came before it is dropped with its epoch (C3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.core.types import PromptLogprobs


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


def is_finite(scores: PromptLogprobs) -> bool:
    """False after a fault in the model, which a request without output shows nowhere else."""
    return bool(np.isfinite(np.frombuffer(scores.logprobs, np.float32)).all())
