"""Stores: which blocks and states go to the tier, and when.

A request's cached blocks are due when it leaves its slot, and every _FLUSH_TOKENS tokens before. They are stored once
the step that computed them is committed: its logits were finite. By then a block may have been evicted, and is left
out. A store holds nothing: the runners read a block before later plans reuse it (core/plan.py)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import Transfers
from runtime.core.request_state import RequestState
from runtime.core.states.snapshot_pool import Snapshot
from runtime.core.states.state_cache_manager import StateCacheManager
from runtime.tier.keys import KEY_BYTES, TierIndex, TierKeys, salt_number, split
from runtime.tier.region import RegionBusy

_FLUSH_TOKENS = 2048
_MOST_REFUSALS = 100  # plans in a row that find the index busy, after which a batch is left out
STATE = -1  # stands in Transfers in place of a KV group


@dataclass(slots=True)
class _Progress:
    """A request's leading blocks."""

    cached: int = 0
    due: int = 0  # that were due at some time


@dataclass(slots=True)
class _Due:
    """One request's blocks in a group, or a state's parts."""

    step_id: int  # the step that computed the last of them
    salt: int
    expires: float
    group: int
    hashes: list[bytes]  # each block's; for parts the hash of the block that ends the state's prefix; without, a touch
    blocks: list[int]  # rows for parts
    parts: list[int]  # 0 for blocks
    keys: bytes
    snapshot: Snapshot | None = None  # the snapshot that has the parts
    times_evicted: dict[int, int] = field(default_factory=dict)  # each block's when it was due

    def split_off(self, count: int) -> _Due:
        """Remove and return the first `count` ones."""
        keys, self.keys = self.keys[: count * KEY_BYTES], self.keys[count * KEY_BYTES :]
        hashes, self.hashes = self.hashes[:count], self.hashes[count:]
        blocks, self.blocks = self.blocks[:count], self.blocks[count:]
        parts, self.parts = self.parts[:count], self.parts[count:]
        return replace(self, hashes=hashes, blocks=blocks, parts=parts, keys=keys)


def transfers_of(
    numbers: Sequence[int], groups: Sequence[int], blocks: Sequence[int], parts: Sequence[int], keys: Sequence[bytes]
) -> Transfers:
    """Return the message with these columns."""
    first, second, third, fourth = (np.array(column, np.int32) for column in (numbers, groups, blocks, parts))
    return Transfers(first, second, third, fourth, b"".join(keys))


class Stores:
    """The stores that are due, and those in flight."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        index: TierIndex,
        keys: TierKeys,
        least_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """Prefixes shorter than `least_tokens` are not stored."""
        self._kv_cache, self._index, self._keys = kv_cache, index, keys
        self._size, self._clock = kv_cache.block_size, clock
        self._least = max(1, least_tokens // self._size)
        self._each = max(self._least, _FLUSH_TOKENS // self._size)
        self._progress: dict[RequestState, _Progress] = {}  # requests in slots that have cached blocks
        self._grown: dict[RequestState, None] = {}  # those with more blocks since the last plan
        self._due: deque[_Due] = deque()
        # An evicted block that is cached again, even by its old hash, may be computed by the next plan only.
        self._times_evicted = Counter[int]()
        self._in_flight: dict[int, bytes] = {}  # keys by numbers
        self._num_refusals = 0  # tries in a row
        self._spoilt: set[bytes] = set()  # keys in flight that are dropped afterwards

    # ---- due stores -------------------------------------------------------------------------------------------------

    def on_cached(self, state: RequestState) -> None:
        """A request's full blocks have entered the cache."""
        if (progress := self._progress.get(state)) is None:
            progress = self._progress[state] = _Progress()
        progress.cached = self._kv_cache.num_cacheable(state) // self._size
        self._grown[state] = None

    def on_plan(self, step_id: int) -> None:
        """A step is planned. Long requests' blocks are due with it."""
        for state in self._grown:
            progress = self._progress[state]
            if progress.cached - progress.due >= self._each:
                self._make_due(state, progress, step_id)
                self.touch(state, step_id)
        self._grown.clear()

    def on_evicted(self, blocks: list[int]) -> None:
        """These blocks leave the cache."""
        self._times_evicted.update(blocks)

    def leave(self, state: RequestState, step_id: int) -> None:
        """A request has left its slot. `step_id` is the last planned step."""
        if (progress := self._progress.pop(state, None)) is None:
            if not state.request.cache_ttl_s:
                return
            progress = _Progress(len(state.block_hashes))  # cached before; they get its lifetime
        self._grown.pop(state, None)
        if progress.cached > progress.due and progress.cached >= self._least:
            self._make_due(state, progress, step_id)

    def touch(self, state: RequestState, step_id: int) -> None:
        """A request uses its prefix, in all groups. The tier evicts its last blocks first, however it was stored."""
        if len(state.block_hashes) < self._least:
            return
        salt, ttl_s = salt_number(state.request.cache_salt), state.request.cache_ttl_s
        expires = self._clock() + ttl_s if ttl_s else 0.0
        for group in range(len(self._kv_cache.groups)):
            hashes = [state.block_hashes[i] for i in self._needed(state, group, 0, len(state.block_hashes))]
            keys = self._keys.block_keys(hashes, group)
            if self._due:  # after its own stores, which would be newer
                self._due.append(_Due(step_id, salt, expires, group, [], [], [], keys))
            else:
                self._index.touch(keys, expires)

    def _needed(self, state: RequestState, group: int, begin: int, end: int) -> Sequence[int]:
        """Return which of a request's blocks from `begin` to `end` later requests may need."""
        if (spec := self._kv_cache.groups[group]).window is None:
            return range(begin, end)
        size, prompt_end = self._size, (state.prompt_len - 1) // self._size  # a hit excludes a prompt's last token
        ends = [end, prompt_end] if begin < prompt_end < end else [end]  # it continues there, or after the prompt
        return sorted({i for at in ends for i in range(spec.num_dead_blocks(at * size, size), at)})

    def _make_due(self, state: RequestState, progress: _Progress, step_id: int) -> None:
        begin, end = progress.due, progress.cached
        progress.due = end
        salt, ttl_s = salt_number(state.request.cache_salt), state.request.cache_ttl_s
        expires = self._clock() + ttl_s if ttl_s else 0.0
        for group, cache in enumerate(self._kv_cache.caches):
            hashes = [state.block_hashes[i] for i in self._needed(state, group, begin, end)]
            found = [(h, block) for h in hashes if (block := cache.find(h)) is not None]
            if found:
                kept, blocks = [h for h, _ in found], [block for _, block in found]
                keys, parts = self._keys.block_keys(kept, group), [0] * len(kept)
                evicted = {block: self._times_evicted[block] for block in blocks}
                self._due.append(_Due(step_id, salt, expires, group, kept, blocks, parts, keys, None, evicted))
        if isinstance(self._kv_cache, StateCacheManager):
            snapshots = self._kv_cache.snapshots
            for block_hash in state.block_hashes[begin:end]:
                block = self._kv_cache.cache.find(block_hash)
                if block is not None and (snapshot := snapshots.find(block)) is not None:
                    keys = self._keys.state_keys(block_hash)
                    parts = list(range(len(keys) // KEY_BYTES))
                    hashes, rows = [block_hash] * len(parts), [snapshot.row] * len(parts)
                    self._due.append(_Due(step_id, salt, expires, STATE, hashes, rows, parts, keys, snapshot))

    def has_due(self, committed: int) -> bool:
        """Return True if a step can store something, as all up to `committed` are committed."""
        return bool(self._due) and self._due[0].step_id <= committed

    # ---- plans and results ------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Stores without a result."""
        return len(self._in_flight)

    def take(self, committed: int, most: int, next_number: Callable[[], int]) -> Transfers | None:
        """Return at most `most` stores for a plan, or None. All steps up to `committed` are committed."""
        numbers, groups, blocks, parts, taken_keys = list[int](), list[int](), list[int](), list[int](), list[bytes]()
        while most > 0 and self.has_due(committed):
            due = self._due[0] if len(self._due[0].blocks) > most else self._due.popleft()
            now = due.split_off(most) if due.blocks[most:] else due
            most -= len(now.blocks)
            try:
                reserved = self._reserved(now)
            except RegionBusy:  # another engine, for less than a millisecond
                self._num_refusals += 1
                if self._num_refusals % _MOST_REFUSALS:
                    self._due.appendleft(now)
                break
            self._num_refusals = 0
            for at, key in reserved:
                number = next_number()
                self._in_flight[number] = key
                numbers.append(number)
                groups.append(now.group)
                blocks.append(now.blocks[at])
                parts.append(now.parts[at])
                taken_keys.append(key)
        if not numbers:
            return None
        return transfers_of(numbers, groups, blocks, parts, taken_keys)

    def _reserved(self, due: _Due) -> list[tuple[int, bytes]]:
        """Return position and key of each entry that is still cached and has a place in the tier."""
        cache = self._kv_cache.caches[max(0, due.group)]
        keys = split(due.keys)
        if due.snapshot is not None:
            assert isinstance(self._kv_cache, StateCacheManager)
            is_kept = self._kv_cache.snapshots.find(due.snapshot.block) is due.snapshot
            kept = list(range(len(keys))) if is_kept else []
        else:
            pairs = enumerate(zip(due.blocks, due.hashes, strict=True))
            kept = [at for at, (block, h) in pairs if cache.find(h) == block and self._is_kept(due, block)]
        if len(kept) < len(keys):  # the device has evicted some; the tier may have them
            self._index.touch(due.keys, due.expires)
        if not kept:
            return []
        reserved = self._index.reserve(b"".join(keys[at] for at in kept), due.salt, due.expires).tolist()
        return [(at, keys[at]) for at, is_reserved in zip(kept, reserved, strict=True) if is_reserved]

    def _is_kept(self, due: _Due, block: int) -> bool:
        return due.times_evicted[block] == self._times_evicted[block]

    def end(self, number: int) -> bool:
        """A store has ended. Return False if its bytes count for nothing."""
        if (key := self._in_flight.pop(number, None)) is None:
            return False
        if key in self._spoilt:
            self._spoilt.discard(key)
            self._index.drop(key)
            return False
        return True

    def drop(self, keys: bytes) -> None:
        """These entries are spoilt: a value may not be finite."""
        spoilt, in_flight = split(keys), set(self._in_flight.values())
        self._spoilt.update(key for key in spoilt if key in in_flight)
        self._index.drop(b"".join(key for key in spoilt if key not in in_flight))

    def forget(self, is_lost: bool) -> None:
        """All that is due is gone. With `is_lost` the runners are gone, and what they were writing with them."""
        self._progress.clear()
        self._grown.clear()
        self._due.clear()
        if is_lost:
            self._index.drop(b"".join(self._in_flight.values()))
            self._in_flight.clear()
            self._spoilt.clear()
