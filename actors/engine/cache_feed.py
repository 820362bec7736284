"""The updates by which fronts follow an engine's prefix cache and load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from actors.wire.link_messages import CacheUpdate
from runtime.core.scheduler import Scheduler
from runtime.policy.engine_load import EngineLoad


class CacheFeed:
    """Makes the updates with which a front's `Router` follows one engine. Only the step thread uses it.

    Updates are numbered from 1 on, the same for all followers. A snapshot has the number of the last update and the
    whole cache. The next update repeats the changes between the two, which is harmless. The scheduler records changes
    from the first snapshot until `stop`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._cache = scheduler, scheduler.kv_cache.cache
        self._number = 0

    def stop(self) -> None:
        """Record changes no longer: the last follower is gone. A new follower begins with a snapshot."""
        self._cache.pending_events = None
        self._number += 1  # a follower that continues regardless finds a gap

    def snapshot(self) -> CacheUpdate:
        """Return the whole cache, and record changes from now on."""
        if self._cache.pending_events is None:
            self._cache.pending_events = {}
        return CacheUpdate(self._number, b"".join(self._cache.keys()), b"", EngineLoad.of(self._scheduler), True)

    def update(self) -> CacheUpdate:
        """Return the changes since the last update. A snapshot must precede it."""
        changes, self._cache.pending_events = self._cache.pending_events, {}
        assert changes is not None, "the first update is a snapshot"
        self._number += 1
        added = b"".join([key for key, is_cached in changes.items() if is_cached])
        evicted = b"".join([key for key, is_cached in changes.items() if not is_cached])
        return CacheUpdate(self._number, added, evicted, EngineLoad.of(self._scheduler))


class Follower(Protocol):
    """A front's connection."""

    last_stream: int  # number of the last stream that the front submitted

    def send(self, message: CacheUpdate) -> None:
        """Queue a message without waiting."""
        ...


class Followers:
    """The connections that follow the engine. Each gets every change, in at most one update in EVERY_S.

    Without followers, changes are not recorded."""

    EVERY_S = 0.02

    def __init__(self, feed: CacheFeed, now: Callable[[], float]) -> None:
        self._feed, self._now = feed, now
        self._followers: set[Follower] = set()
        self._sent_at = 0.0
        self.are_behind = False  # set by the engine when there may be unsent changes

    def follow(self, follower: Follower, wanted: bool) -> None:
        """Start to follow, with a snapshot, or stop (`wanted` is False). A stop without a start is ignored."""
        if wanted:
            self._followers.add(follower)
            self._send(self._feed.snapshot(), follower)
            return
        self._followers.discard(follower)
        if not self._followers:
            self._feed.stop()

    def send_changes(self) -> float | None:
        """Send the changes if an update is due. Returns the seconds until it is due; None if none is pending."""
        if not self.are_behind or not self._followers:
            return None
        now = self._now()
        if (delay_s := self._sent_at + self.EVERY_S - now) > 0:
            return delay_s
        self._sent_at, self.are_behind = now, False
        update = self._feed.update()
        for follower in self._followers:
            self._send(update, follower)
        return None

    @staticmethod
    def _send(update: CacheUpdate, follower: Follower) -> None:
        update.last_stream = follower.last_stream
        follower.send(update)
