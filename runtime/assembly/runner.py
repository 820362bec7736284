"""build_runner: a ModelRunner with everything that Callboard plugs into one."""

from __future__ import annotations

from functools import partial

from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.compilation.ahead import kernels_ahead
from runtime.compilation.helper import KernelHelper
from runtime.features.adapter_weights import RunnerAdapters
from runtime.features.expert_recorder import ExpertRecorder
from runtime.features.grammar_state import GrammarState
from runtime.features.pooler import Pooler
from runtime.features.prompt_scorer import PromptScorer
from runtime.speculation.draft import row_lens
from runtime.tier.runner_tier import tier_of
from runtime.updates.runner_updates import RunnerUpdates
from runtime.worker.extras import RunnerExtras
from runtime.worker.gpu.mapped_memory import RunnerMemory
from runtime.worker.images import RunnerImages
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import ModelSource


def build_runner(
    config: EngineConfig,
    source: ModelSource,
    shard: Shard | None = None,
    is_draft: bool = False,
    helper: KernelHelper | None = None,  # compiles kernels; a runner on a GPU starts one if this is None
) -> ModelRunner:
    """A runner with all extras. See ModelRunner for the arguments and the errors."""
    return ModelRunner(config, source, shard, is_draft, runner_extras(config, is_draft, helper))


def runner_extras(config: EngineConfig, is_draft: bool, helper: KernelHelper | None = None) -> RunnerExtras:
    """All extras. A line can be left out: docs/architecture.md#optional-rooms."""
    return RunnerExtras(
        outputs=[
            PromptScorer.of,
            Pooler.of,
            *([ExpertRecorder.of] if config.routed_experts and not is_draft else []),
        ],
        masks=GrammarState.of,
        images=RunnerImages.of,
        tier=tier_of,
        adapters=RunnerAdapters.of,
        sleep_memory=RunnerMemory,
        updates=RunnerUpdates,
        kernels=partial(kernels_ahead, helper=helper),
        row_lens=row_lens(config, is_draft),
    )
