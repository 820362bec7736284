"""Whole engines and schedulers, with all extras, for tests that drive them by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.assembly.engine import extras_of
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.core.engine import EngineCore
from runtime.core.executor import Executor
from runtime.core.extra import Extra, Extras
from runtime.core.scheduler import Scheduler
from runtime.speculation.draft import DraftCore


def whole_scheduler(config: EngineConfig, info: ModelInfo, *more: Extra | None) -> Scheduler:
    """Return a scheduler with the extras of an engine, and before these `more`."""
    return Scheduler(config, info, with_extras(config, info, *more))


def with_extras(config: EngineConfig, info: ModelInfo, *more: Extra | None) -> Sequence[Extra]:
    """Return `more` and the extras of an engine."""
    return [*filter(None, more), *extras_of(config, info)]


def whole_draft(
    config: EngineConfig, info: ModelInfo, executor: Executor, ahead: int, keeps_grammars: bool = False
) -> DraftCore:
    """Return a draft core with all extras."""
    return DraftCore(config, info, executor, ahead, keeps_grammars, extras_of(config, info))


def replace_extra(core: EngineCore, new: Extra) -> None:
    """Put `new` in the place of an engine's extra of its class."""
    scheduler = core.scheduler
    others = [extra for extra in core.extras._all if not isinstance(new, type(extra))]
    new.attach(scheduler.kv_cache, scheduler.stats)
    core.extras = scheduler.extras = Extras([new, *others])
