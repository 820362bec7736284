"""The engine's side of what fronts know of its prefix cache and its load: what is told, and when to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from actors.wire.messages import CacheUpdate
from runtime.core.scheduler import Scheduler
from runtime.policy.engine_load import EngineLoad


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
        """The changes since the last update; there must have been a snapshot."""
        changes, self._cache.changes = self._cache.changes, {}
        assert changes is not None, "the first update is a snapshot"
        self._number += 1
        added = b"".join([key for key, is_cached in changes.items() if is_cached])
        evicted = b"".join([key for key, is_cached in changes.items() if not is_cached])
        return CacheUpdate(self._number, added, evicted, EngineLoad.of(self._scheduler))


class Follower(Protocol):
    """A front's connection, as far as it matters here."""

    last_stream: int  # the number of the last stream that it has submitted

    def send(self, message: CacheUpdate) -> None:
        """Does not wait."""
        ...


class Followers:
    """The connections that want to know, each told of every change, but at most once in EVERY_S. Where there are none,
    nothing is noted either."""

    EVERY_S = 0.02

    def __init__(self, feed: CacheFeed, now: Callable[[], float]) -> None:
        self._feed, self._now = feed, now
        self._followers: set[Follower] = set()
        self._told_at = 0.0
        self.are_behind = False  # set by the engine when there may be something that they have not been told

    def follow(self, follower: Follower, wanted: bool) -> None:
        """One begins, with a snapshot; or, without `wanted`, it ends, if it ever began."""
        if wanted:
            self._followers.add(follower)
            self._send(self._feed.snapshot(), follower)
            return
        self._followers.discard(follower)
        if not self._followers:
            self._feed.stop()

    def send_changes(self) -> float | None:
        """Tell them what has changed, if that may be now; else returns in how many seconds it may."""
        if not self.are_behind or not self._followers:
            return None
        now = self._now()
        if (delay_s := self._told_at + self.EVERY_S - now) > 0:
            return delay_s
        self._told_at, self.are_behind = now, False
        update = self._feed.update()
        for follower in self._followers:
            self._send(update, follower)
        return None

    @staticmethod
    def _send(update: CacheUpdate, follower: Follower) -> None:
        update.last_stream = follower.last_stream
        follower.send(update)
