"""SchedulerStats: what a scheduler has counted since it began."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.core.plan import MAX_DRAFT_TOKENS


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only rise; the step thread counts, others read without a lock."""

    preemptions: int = 0
    drafts: int = 0  # rows whose draft tokens were verified
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    prompt_tokens: int = 0  # of admitted requests
    prompt_tokens_cached: int = 0  # of these, found in the prefix cache
    structured_lazy: int = 0  # outputs bound to a grammar, by the engine that serves it
    structured_eager: int = 0

    @property
    def accepted_draft_tokens(self) -> int:
        """Draft tokens that were right."""
        return sum(self.accepted_by_position)
