"""EngineStats: the figures of one engine, for logs, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.base.types import MAX_MATCHED_TOKENS


@dataclass(slots=True)
class EngineStats:
    """Gauges of one moment, and counters that only rise.

    The step thread counts. Other threads read without a lock: each figure is right, together they may be a step apart.
    """

    running: int = 0  # requests that hold a slot
    waiting: int = 0  # requests without a slot
    waiting_tokens: int = 0
    steps: int = 0  # committed
    blocks_total: int = 0
    blocks_available: int = 0
    snapshots: int = 0  # prefix states that requests can continue; 0 for a model without states
    snapshots_evicted: int = 0
    preemptions: int = 0
    drafts: int = 0  # rows with draft tokens
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_MATCHED_TOKENS)
    prompt_tokens: int = 0  # prompt tokens in admitted requests
    prompt_tokens_cached: int = 0  # prompt tokens found in the prefix cache
    structured_lazy: int = 0  # outputs with a grammar, by the grammar's engine
    structured_eager: int = 0
    images_encoded: int = 0  # by each runner; images found in the pool are not among them

    @property
    def accepted_draft_tokens(self) -> int:
        """Draft tokens that the model sampled as well."""
        return sum(self.accepted_by_position)
