"""Grammars, as the engine sees them: outputs that a runner holds to a grammar or a budget of reasoning.

Runners make and run the matchers (grammar_state.py). A row is planned again if its matcher is not ready yet. A request
fails alone if its grammar cannot continue.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.base.model_info import ModelInfo
from runtime.base.reports import GrammarSamples, all_of
from runtime.base.types import CallboardError, FinishReason
from runtime.core.extra import Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.core.stats import EngineStats
from runtime.core.step import Step


class Grammars(Extra):
    """Serves `grammar` and `thinking`."""

    serves = frozenset({"grammar", "thinking"})

    def __init__(self, info: ModelInfo) -> None:
        self._has_eos = bool(info.eos_token_ids)

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        self._stats = stats

    def on_add(self, state: RequestState) -> None:
        if state.params.grammar or state.params.thinking:
            if not self._has_eos:
                raise CallboardError(
                    "This model has no end-of-sequence token; structured output needs one to end with."
                )
            state.may_resample = True

    def on_result(self, step: Step, result: StepResult) -> None:
        for samples in _samples(result):
            self._stats.structured_lazy += samples.begun[0]
            self._stats.structured_eager += samples.begun[1]

    def without_sample(self, state: RequestState, result: StepResult, at: int) -> FinishReason:
        state.failure = ""
        for samples in _samples(result):
            if at in samples.deferred:
                return FinishReason.NONE
            state.failure = state.failure or samples.failures.get(at, "")
        return FinishReason.GRAMMAR if state.failure else FinishReason.ERROR


def _samples(result: StepResult) -> Iterator[GrammarSamples]:
    return all_of((report for _, report in result.reports), GrammarSamples)
