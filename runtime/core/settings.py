"""Settings: the fields of EngineConfig that the core reads."""

from __future__ import annotations

from typing import Protocol


class Settings(Protocol):
    """Part of EngineConfig, which describes each field."""

    @property
    def chunked_prefill(self) -> bool: ...
    @property
    def max_num_batched_tokens(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int | None: ...
    @property
    def pipeline_depth(self) -> int: ...
    @property
    def prefix_cache(self) -> bool: ...
