"""Requests with prefixes on disk wait until a keeper has copied them to RAM. From there the tier loads them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.core.extra import Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.request_state import RequestState
from runtime.core.stats import EngineStats
from runtime.tier.costs import Costs, least_tokens
from runtime.tier.disk.keeper import Disk
from runtime.tier.extra import Tier
from runtime.tier.hits import TierHits
from runtime.tier.keys import TierIndex, TierKeys, salt_number
from runtime.tier.place import host

logger = logging.getLogger(__name__)

_MOST_S = 30.0  # a request then goes on without the disk's blocks
_POLL_S = 0.001
_FIRST_RATE = 0.5e9  # bytes a second, while the disk's rate is unknown


class DiskIndex(Protocol):
    """The entries on disk (keeper.py)."""

    read_rate: float  # bytes per second, or 0 while it is unknown

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys are on disk [n]."""
        ...

    def request(self, keys: bytes, salt: int, expires: float = 0) -> int:
        """Request copies in RAM. Returns a number; 0 if the request is refused."""
        ...

    def has_ended(self, number: int) -> bool:
        """Return whether the request with this number has ended."""
        ...

    def restart(self) -> None:
        """Look for another region in RAM's place."""
        ...


class _Either:
    """Looks up entries in RAM and on disk."""

    def __init__(self, ram: TierIndex, disk: DiskIndex) -> None:
        self._ram, self._disk = ram, disk

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        return self._ram.find(keys) | self._disk.find(keys)


class _Read(NamedTuple):
    """A request to the keeper."""

    number: int
    begun_at: float
    num_bytes: int


class DiskReads(Extra):
    """Holds waiting requests while their prefixes are copied from disk, if this is quicker than to compute them."""

    def __init__(
        self,
        info: ModelInfo,
        ram: TierIndex,
        disk: DiskIndex,
        clock: Callable[[], float] = time.time,
        prefill_rate: Callable[[], float] = lambda: 0.0,
        shortest: int | None = None,
    ) -> None:
        """See `Tier` for the arguments."""
        assert info.tier is not None
        self._tier, self._ram, self._disk, self._clock = info.tier, ram, disk, clock
        self._least_tokens = least_tokens(info.device, shortest)
        self._costs = Costs(info.device, clock, prefill_rate, lambda: disk.read_rate or _FIRST_RATE)
        self._reads: dict[RequestState, _Read] = {}
        self._figures = {"tier_disk_tokens": 0.0, "tier_disk_bytes": 0.0}

    def restart(self) -> None:
        """Continue with fresh runners, which may have another region."""
        self._disk.restart()

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        keys = TierKeys(self._tier, len(kv_cache.caches))
        self._size, self._in_ram = kv_cache.block_size, TierHits(kv_cache, self._ram, keys)
        self._anywhere = TierHits(kv_cache, _Either(self._ram, self._disk), keys)

    def stats(self) -> dict[str, float]:
        return self._figures

    def on_queue(self, state: RequestState) -> None:
        if not state.reads_cache or len(state.tokens) < self._least_tokens:
            return
        hit = self._anywhere.longest(state)
        keys = np.array([*(key for *_, key in hit.missing), *hit.state_keys], "V16")
        keys = keys[~self._ram.find(keys.tobytes())]
        num_tokens = (len(hit.hashes) - len(self._in_ram.longest(state).hashes)) * self._size
        num_bytes = len(keys) * self._tier.slot_bytes
        if not num_bytes or num_tokens < self._least_tokens or not self._costs.is_worth(num_bytes, num_tokens):
            return
        ttl_s = state.request.cache_ttl_s
        expires = self._clock() + ttl_s if ttl_s else 0.0
        if number := self._disk.request(keys.tobytes(), salt_number(state.request.cache_salt), expires):
            self._reads[state] = _Read(number, self._clock(), num_bytes)
            self._figures["tier_disk_tokens"] += num_tokens
            self._figures["tier_disk_bytes"] += num_bytes * self._tier.num_ranks

    def held(self) -> Set[RequestState]:
        for state, read in list(self._reads.items()):
            if self._disk.has_ended(read.number) or self._clock() - read.begun_at > _MOST_S:
                del self._reads[state]
                self._costs.observe(read.num_bytes, read.begun_at)
        return self._reads.keys()

    def on_dequeue(self, state: RequestState) -> None:
        self._reads.pop(state, None)

    def on_idle(self) -> None:
        if self._reads:
            time.sleep(_POLL_S)


def disk_reads_of(
    config: EngineConfig, tier: Tier, info: ModelInfo, prefill_rate: Callable[[], float]
) -> DiskReads | None:
    """Return the reads from the disk that the settings name, or None. An obstacle is one line of the log."""
    if config.kv_tier_folder is None or info.tier is None or info.tier.host != host():
        return None
    try:
        disk = Disk(info.tier, Path(config.kv_tier_folder))
    except (CallboardError, OSError) as e:
        logger.warning("KV tier on disk: off. %s", e)
        return None
    return DiskReads(info, tier.index, disk, time.time, prefill_rate)
