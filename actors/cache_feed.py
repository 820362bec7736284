"""CacheFeed: the engine's side of what fronts know of its prefix cache and its load."""

from __future__ import annotations

from actors.messages import CacheUpdate
from runtime.core.engine_load import EngineLoad
from runtime.core.scheduler import Scheduler


class CacheFeed:
    """Makes the updates from which a front's `Router` follows one engine; used by its step thread alone.

    Updates are numbered from 1 on, whoever gets them. A snapshot has the number of the last update and all that is
    cached now: what has changed between the two is in the next update once more, which does no harm. The scheduler
    keeps note of changes from the first snapshot until `stop`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._cache = scheduler, scheduler.kv_cache.cache
        self._number = 0

    def stop(self) -> None:
        """Nobody follows the engine any more; who does again must begin with a snapshot."""
        self._cache.changes = None
        self._number += 1  # whoever goes on all the same finds a gap

    def snapshot(self) -> CacheUpdate:
        """All that is cached."""
        if self._cache.changes is None:
            self._cache.changes = {}
        return CacheUpdate(self._number, b"".join(self._cache.keys()), b"", EngineLoad.of(self._scheduler), True)

    def update(self) -> CacheUpdate:
        """What has come and gone since the last update; there must have been a snapshot."""
        changes, self._cache.changes = self._cache.changes, {}
        assert changes is not None, "the first update is a snapshot"
        self._number += 1
        added = b"".join([key for key, is_cached in changes.items() if is_cached])
        evicted = b"".join([key for key, is_cached in changes.items() if not is_cached])
        return CacheUpdate(self._number, added, evicted, EngineLoad.of(self._scheduler))
