"""build_runner: a ModelRunner with everything that Callboard plugs into one."""

from __future__ import annotations

from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.features.adapter_weights import RunnerAdapters
from runtime.features.expert_recorder import ExpertRecorder
from runtime.features.grammar_state import GrammarState
from runtime.features.mapped_memory import RunnerMemory
from runtime.features.pooler import Pooler
from runtime.features.prompt_scorer import PromptScorer
from runtime.speculation.draft import CATCH_UP
from runtime.updates.runner_updates import RunnerUpdates
from runtime.worker.extras import RunnerExtras
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import ModelSource


def build_runner(
    config: EngineConfig, source: ModelSource, shard: Shard | None = None, is_draft: bool = False
) -> ModelRunner:
    """A runner with all extras. See ModelRunner for the arguments and the errors."""
    reports_experts = config.routed_experts and not is_draft
    extras = RunnerExtras(
        outputs=(PromptScorer.of, Pooler.of, *([ExpertRecorder.of] if reports_experts else [])),
        masks=GrammarState.of,
        adapters=RunnerAdapters.of,
        sleep_memory=RunnerMemory,
        updates=RunnerUpdates.of,
        row_lens=_row_lens(config, is_draft),
    )
    return ModelRunner(config, source, shard, is_draft, extras)


def _row_lens(config: EngineConfig, is_draft: bool) -> tuple[int, ...]:
    """The frequent tokens per row under speculation, besides one. A model verifies a token with its draft
    tokens; a draft catches up with the model's tokens."""
    if is_draft:
        return CATCH_UP
    if config.draft is None:
        return ()
    most = MAX_DRAFT_TOKENS if config.num_draft_tokens is None else config.num_draft_tokens
    return tuple(range(2, most + 2))
