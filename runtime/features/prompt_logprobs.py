"""Log-probabilities of prompts: a prompt may take several steps, and its parts are joined here.

A request may bring an output behind its prompt (`Request.prompt_len`), which is scored, too."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import astuple

from runtime.base.reports import PromptScores
from runtime.base.types import FinishReason, StepOutput
from runtime.core.extra import Extra, end_of
from runtime.core.request_state import RequestState
from runtime.core.step import ReportedRow


class PromptScoring(Extra):
    """Serves `prompt_logprobs`."""

    serves = frozenset({"prompt_logprobs"})
    reads = PromptScores

    def __init__(self) -> None:
        self._prompts: dict[RequestState, list[PromptScores]] = {}  # the parts of prompts that are not complete

    def on_add(self, state: RequestState) -> None:
        if state.params.prompt_logprobs is not None:
            state.reads_cache = False  # the cache holds no log-probabilities
            state.has_reports = True
            self._prompts[state] = []

    def on_report(self, row: ReportedRow, report: PromptScores, output: StepOutput) -> FinishReason:
        """Store a part of a prompt, a step's, and report the prompt if it is complete."""
        state = row.state
        if (parts := self._prompts.get(state)) is None:
            return FinishReason.NONE
        if not row.start:
            parts.clear()  # a preemption begins again (C3)
        parts.append(report)
        if row.start + row.num_tokens < len(state.request.token_ids):
            return FinishReason.NONE
        scores = PromptScores(*map(b"".join, zip(*map(astuple, parts), strict=True)))
        output.reports.append((state, scores))
        del self._prompts[state]
        if state.only_scores:
            return end_of(scores.logprobs)
        state.reads_cache = True
        state.params = replace(state.params, prompt_logprobs=None)  # a preemption need not score it again
        return FinishReason.NONE

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._prompts.pop(state, None)
