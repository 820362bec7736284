"""The whole engine: the core with all extras that a configuration wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import MAX_DRAFT_TOKENS, MAX_MATCHED_TOKENS
from runtime.core.engine import EngineCore
from runtime.core.executor import Executor
from runtime.core.extra import Extra
from runtime.features.adapter_table import AdapterTable
from runtime.features.expert_reports import ExpertReports
from runtime.features.grammars import Grammars
from runtime.features.images import Images
from runtime.features.pooled_prompts import PooledPrompts
from runtime.features.prompt_logprobs import PromptScoring
from runtime.policy.admission import Admission
from runtime.policy.branch_eviction import BranchEviction
from runtime.policy.isolation import Isolation
from runtime.policy.queue_sizes import QueueSizes
from runtime.policy.static_batching import ShortestJobFirst, StaticBatching
from runtime.policy.step_pacing import StepPacing
from runtime.speculation.choose_k import Drafter, Speculation
from runtime.speculation.draft_client import FIRST_ROUND_US, FIRST_ROW_US, DraftClient
from runtime.speculation.head_drafter import HeadDrafter
from runtime.speculation.ngram import PAST_TOKENS, Ngram
from runtime.tier.disk.reads import DiskReads, disk_reads_of
from runtime.tier.extra import Tier
from runtime.tier.place import SharedRegion


def extras_of(config: EngineConfig, info: ModelInfo) -> list[Extra]:
    """Return the extras that need no clock, for an engine or a draft model."""
    extras: list[Extra] = [
        QueueSizes(),
        Admission(),
        Isolation(),
        BranchEviction(),
        AdapterTable(config.max_loras),
        Grammars(info),
        PromptScoring(),
        PooledPrompts(info),
        Images(info, config),
    ]
    if config.routed_experts:
        extras.append(ExpertReports(info))
    if config.batching == "static":
        extras.append(StaticBatching())
    if config.policy == "sjf":
        extras.append(ShortestJobFirst())
    return extras


def build_engine(
    config: EngineConfig,
    info: ModelInfo,
    executor: Executor,
    speculation: Speculation | None = None,
    pacing: StepPacing | None = None,
    tier: Tier | None = None,
) -> EngineCore:
    """Return an engine with all extras.

    Without `speculation` it drafts no tokens. Without `pacing` a step takes as many prompt tokens as it can hold. By
    default the `tier` is the one that the runners have opened."""
    tiers = _tiers_of(config, info, pacing) if tier is None else [tier]
    timed: Sequence[Extra | None] = (speculation, pacing, *tiers)
    return EngineCore(config, info, executor, [*filter(None, timed), *extras_of(config, info)])


def _tiers_of(config: EngineConfig, info: ModelInfo, pacing: StepPacing | None) -> Sequence[Extra | None]:
    if info.tier is None:
        return ()

    def prefill_rate() -> float:
        return 0.0 if pacing is None else pacing.prefill_rate

    tier = Tier(info, SharedRegion(info.tier), time.time, prefill_rate)
    return tier, disk_reads_of(config, tier, info, prefill_rate)


def use_fresh_runners(core: EngineCore, executor: Executor, info: ModelInfo) -> None:
    """Continue with runners behind `executor`, which have described themselves as `info`."""
    if (tier := core.extras.get(Tier)) is not None and isinstance(tier.index, SharedRegion):
        tier.index.attach(info.tier)
    if (reads := core.extras.get(DiskReads)) is not None:
        reads.restart()
    core.recover(executor)


def speculation_of(config: EngineConfig, info: ModelInfo, clock: Callable[[], float]) -> Speculation | None:
    """Return the speculation that the settings want, or None. A draft model has yet to be attached."""
    if config.draft is None:
        return None
    drafter: Drafter
    if info.head is not None:
        drafter = HeadDrafter(info.head)
    else:
        drafter = DraftClient(info.vocab_size, clock) if config.has_draft_model else _matches(config, info)
    round_us, row_us = (FIRST_ROUND_US, FIRST_ROW_US) if config.has_draft_model else (0.0, 0.0)
    latency_us = info.latency_us + round_us
    return Speculation(drafter, config.num_draft_tokens, info.step_us, latency_us, clock, row_us)


def _matches(config: EngineConfig, info: ModelInfo) -> Ngram:
    most = MAX_DRAFT_TOKENS if info.num_states else MAX_MATCHED_TOKENS
    return Ngram(PAST_TOKENS if config.prefix_cache else 0, most)


def draft_client_of(core: EngineCore) -> DraftClient | None:
    """Return the engine's side of a draft model, or None if it has none."""
    speculation = core.extras.get(Speculation)
    client = speculation.drafter if speculation is not None else None
    return client if isinstance(client, DraftClient) else None
