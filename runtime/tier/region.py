"""A cache of KV blocks and states in named files, owned by no process. It outlives all that use it.

`head` has the format, `slots` the index, `payload-<rank>` and `sums-<rank>` what each rank stores. The cache is
set-associative, so nothing is rebuilt after a death. A key selects two sets with 32 ways each, and takes the way that
was used longest ago. With one set a key, a long prefix would soon lose a block: sets fill unevenly.

A slot is READY if it has the key and all ranks' done bytes are set. A rank writes its payload, then its sum, then its
done byte, each in its own place. A death at any moment leaves a slot that is not READY. The checksum finds damaged
bytes, and late writes of a process that has lost its slot."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.base.errors import CallboardError
from runtime.tier.region_files import MAX_RANKS, SET, WAYS, descriptor, locks, map_file, open_files, wipe_files
from runtime.tier.sums import key_words

_GRACE_S = 5.0  # a reservation stays this long after its owner's end: runners that end later may still write
_IDLE_S = 600.0  # a salt's quota protects other salts' entries this long after their last use
_LEFT, _NEVER = 2, 9  # see _order_of
_LOCK_TRIES, _LOCK_PAUSE_S = 3, 0.0003  # a reservation takes the lock for less than a millisecond
_FULL_S = 10.0  # pause after the file system had no memory for a slot


class RegionBusy(CallboardError):
    """Another process has the region's lock."""


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """The region's READY entries and bytes, all ranks together."""

    used_bytes: int
    total_bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class Entries:
    """READY entries. All arrays are [n]."""

    slots: NDArray[np.int64]
    keys: NDArray[np.uint64]  # words [n, 2]
    salts: NDArray[np.uint64]
    used: NDArray[np.float64]  # time of the last use
    expires: NDArray[np.uint32]


class Region:
    """An open region. Any number of processes may use it at once. Keys are bytes, 16 for each of n keys."""

    def __init__(self, folder: Path, head: int, num_slots: int, slot_bytes: int, num_ranks: int) -> None:
        """Use `open` instead. `head` is the descriptor with the shared lock that shows the region's use."""
        self.folder, self.num_slots, self.slot_bytes, self.num_ranks = folder, num_slots, slot_bytes, num_ranks
        self._num_sets = num_slots // WAYS
        sets = np.memmap(folder / "slots", SET, "r+", shape=(self._num_sets,)).view(np.ndarray)
        self._low, self._high, self._salt, self._used = sets["low"], sets["high"], sets["salt"], sets["used"]
        self._start, self._pid, self._expires = sets["start"], sets["pid"], sets["expires"]
        self._ranks_done, self._has_pages = sets["done"], sets["has_pages"]
        self._done = self._ranks_done.view("<u8")  # two words a way
        self._all_done = np.frombuffer(bytes([1] * num_ranks + [0] * (MAX_RANKS - num_ranks)), "<u8")
        self.files = [  # payload files
            os.open(folder / f"payload-{rank}", os.O_RDWR) for rank in range(num_ranks)
        ]
        self._open_files = [head, *self.files]
        self._payloads = [map_file(file).reshape(num_slots, slot_bytes) for file in self.files]
        self._sums = [np.memmap(folder / f"sums-{rank}", "<u8", "r+").view(np.ndarray) for rank in range(num_ranks)]
        self._full_until = 0.0

    @classmethod
    def open(cls, folder: Path, layout: str, num_slots: int | None, slot_bytes: int, num_ranks: int) -> Region:
        """Attach to the region in `folder`, or create it. Its slots are a multiple of 32; see `num_slots`.

        A region of another size or layout, or a damaged one, is replaced unless a process uses it. If only the size
        differs and it is in use, it is attached as it is. Without `num_slots` the size is kept, and a new region takes
        half the free space.

        Raises:
            CallboardError: There is too little memory, the folder cannot be used, or has another layout."""
        assert slot_bytes % 8 == 0, slot_bytes
        assert 1 <= num_ranks <= MAX_RANKS, num_ranks
        return cls(folder, *open_files(folder, layout, num_slots, slot_bytes, num_ranks), slot_bytes, num_ranks)

    def close(self) -> None:
        """Leave the region. Arrays of `payload` remain valid."""
        while self._open_files:
            os.close(self._open_files.pop())

    @staticmethod
    def wipe(folder: Path) -> None:
        """Delete the region and free its memory at once, although processes have it mapped. To them all is a miss."""
        wipe_files(folder)

    # ---- look-ups ---------------------------------------------------------------------------------------------------

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys are READY [n]."""
        _, _, ready, _ = self._look_up(keys)
        return ready

    def slots_of(self, keys: bytes, ready: bool) -> NDArray[np.int64]:
        """Return each key's slot if it is READY, or with `ready` False if it is reserved; otherwise -1 [n]."""
        sets, ways, is_ready, is_there = self._look_up(keys)
        return np.where(is_ready if ready else is_there & ~is_ready, ways * self._num_sets + sets, -1)

    def has_keys(self, slots: NDArray[np.int64], keys: bytes) -> NDArray[np.bool_]:
        """Return which slots have these keys now [n]. Checked after a copy, since slots are given away."""
        ways, sets = np.divmod(slots, self._num_sets)
        words = key_words(keys)
        fits: NDArray[np.bool_] = (self._low[sets, ways] == words[:, 0]) & (self._high[sets, ways] == words[:, 1])
        return fits & (slots >= 0)

    def payload(self, rank: int) -> NDArray[np.uint8]:
        """Return the rank's bytes of all slots [num_slots, slot_bytes]. Write only to reserved slots."""
        return self._payloads[rank]

    def sums(self, rank: int, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the checksums that the rank has committed [n]."""
        found: NDArray[np.uint64] = self._sums[rank][slots]
        return found

    def entries(self) -> Entries:
        """Return the READY entries, those used longest ago first."""
        at = np.nonzero(self._are_done(self._done))
        order = np.argsort(self._used[at], kind="stable")
        at = sets, ways = at[0][order], at[1][order]
        keys = np.stack([self._low[at], self._high[at]], 1)
        return Entries(ways * self._num_sets + sets, keys, self._salt[at], self._used[at], self._expires[at])

    def figures(self) -> RegionFigures:
        """Count entries and bytes."""
        entries = int(self._are_done(self._done).sum())
        slot = self.slot_bytes * self.num_ranks
        return RegionFigures(entries * slot, self.num_slots * slot, entries)

    @property
    def num_backed(self) -> int:
        """Slots up to the last way that has memory in a set. Sets fill their first ways first."""
        ways = np.flatnonzero(self._has_pages.any(0))
        return (int(ways[-1]) + 1) * self._num_sets if ways.size else 0

    # ---- changes ----------------------------------------------------------------------------------------------------

    def touch(self, keys: bytes, expires: float = 0) -> None:
        """Set the last use of keys to now, and with `expires` at least this time until which they are kept.

        Keys are READY or reserved by this process. A prefix loses its last blocks first."""
        sets, ways, ready, is_there = self._look_up(keys)
        counts = is_there & (ready | self._are_own(sets, ways))
        at = sets[counts], ways[counts]
        self._used[at] = time.time() - 1e-6 * np.arange(np.count_nonzero(counts))
        if expires:
            self._expires[at] = np.maximum(self._expires[at], int(expires))

    def reserve(self, keys: bytes, salt: int, expires: float = 0) -> NDArray[np.bool_]:
        """Give keys a slot to be written; return which ones have got it [n].

        The others are present or reserved already, or find no way to take. Those present are touched.

        Raises:
            RegionBusy: Another process reserves now."""
        words = key_words(keys)
        taken = np.zeros(len(words), np.bool_)
        self.touch(keys, expires)  # entries that are present have just been computed again
        with self._try_lock() as has_lock:
            if not has_lock:
                raise RegionBusy("Another process reserves slots of this region now; try again.")
            sets, rest = self._sets_of(words), np.arange(len(words))
            while rest.size:  # the first key that chooses a place gets it
                places, may = self._places(sets[rest], words[rest], salt)
                is_over = ~may
                is_over[np.unique(places, return_index=True)[1]] = True
                now = np.flatnonzero(is_over & may)
                taken[rest[now]] = self._take(places[now], words[rest[now]], salt, int(expires))
                rest = rest[~is_over]
        return taken

    def commit(self, rank: int, slots: NDArray[np.int64], keys: bytes, sums: NDArray[np.uint64]) -> None:
        """Set the rank's sums and done bytes, after its payloads. A slot that has another key by now is left out."""
        has = self.has_keys(slots, keys)
        self._sums[rank][slots[has]] = sums[has]
        ways, sets = np.divmod(slots[has & self.has_keys(slots, keys)], self._num_sets)
        self._ranks_done[sets, ways, rank] = 1

    def drop(self, keys: bytes) -> None:
        """Free the slots that have these keys, READY or reserved by this process. They are a miss from now on."""
        sets, ways, ready, is_there = self._look_up(keys)
        goes = is_there & (ready | self._are_own(sets, ways))
        self._free(sets[goes], ways[goes])

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _look_up(
        self, keys: bytes
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return each key's set and way, whether it is READY, and whether it is there."""
        words = key_words(keys)
        pairs, all_keys = self._sets_of(words), np.arange(len(words))
        side, ways = np.divmod((self._low[pairs] == words[:, :1, None]).reshape(-1, 2 * WAYS).argmax(1), WAYS)
        sets = pairs[all_keys, side]
        is_there = (self._low[sets, ways] == words[:, 0]) & (self._high[sets, ways] == words[:, 1])
        ready = is_there & self._are_done(self._done[sets, ways])
        return sets, ways, ready, is_there

    def _are_done(self, done: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which ways [..., 2] have all ranks' done bytes. Two comparisons are quicker than `all`."""
        are_done: NDArray[np.bool_] = (done[..., 0] == self._all_done[0]) & (done[..., 1] == self._all_done[1])
        return are_done

    def _sets_of(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return both sets of each key [n, 2]."""
        return (words % np.uint64(self._num_sets)).astype(np.int64)

    def _order_of(
        self, pairs: NDArray[np.int64], salt: int, now: float
    ) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
        """Return how late each way of the sets [n, 2] is taken for an entry with this salt, both [n, 2 * WAYS].

        The first number decides, then the second. Ways up to _LEFT are without entry. Those with _NEVER stay."""

        def ways_of(field: NDArray[Any]) -> NDArray[Any]:
            return field[pairs].reshape(len(pairs), 2 * WAYS, *field.shape[2:])

        until, used, has_pages = ways_of(self._expires), np.nan_to_num(ways_of(self._used)), ways_of(self._has_pages)
        is_free = (ways_of(self._low) == 0) & (ways_of(self._high) == 0)
        is_ready = ~is_free & self._are_done(ways_of(self._done))
        is_left = ~is_free & ~is_ready & ~(np.abs(now - used) <= _GRACE_S)
        is_left[is_left] = ~self._are_alive(ways_of(self._pid)[is_left], ways_of(self._start)[is_left])
        is_mine = ways_of(self._salt) == salt
        over_quota = (is_mine & ~is_free).sum(1, keepdims=True) >= WAYS
        is_kept = ~is_free & (until > now)
        is_kept &= is_kept.sum(1, keepdims=True) <= WAYS  # more lifetimes than for half of the ways count for nothing
        order = np.full(is_free.shape, 3, np.int8)
        for number, ways in (  # the last one that fits counts; `np.select` takes four times as long
            (4, is_kept),
            (5, over_quota & ~is_mine & (now - used < _IDLE_S)),
            (_NEVER, ~is_ready),
            (_LEFT, is_left & (has_pages != 0)),
            (1, is_free & (now >= self._full_until)),
            (0, is_free & (has_pages != 0)),
        ):
            order = np.where(ways, np.int8(number), order)
        num_taken = np.repeat((~is_free).reshape(-1, 2, WAYS).sum(2), WAYS, 1)
        return order, np.where(is_free, num_taken, np.fmin(used, now))  # sets are filled evenly

    def _places(
        self, pairs: NDArray[np.int64], words: NDArray[np.uint64], salt: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return set * WAYS + way that each key should take, and whether it may be taken, both [n]."""
        all_keys = np.arange(len(pairs))
        order, used = self._order_of(pairs, salt, time.time())
        is_same = (self._low[pairs] == words[:, :1, None]) & (self._high[pairs] == words[:, 1:, None])
        is_same = is_same.reshape(order.shape)
        order[is_same & (order == _LEFT)] = -1  # it would be there twice
        best = np.where(order == order.min(1, keepdims=True), used, np.inf).argmin(1)
        may: NDArray[np.bool_] = (order[all_keys, best] < _NEVER) & ~(is_same & (order > _LEFT)).any(1)
        side, ways = np.divmod(best, WAYS)
        return pairs[all_keys, side] * WAYS + ways, may

    def _take(self, places: NDArray[np.int64], words: NDArray[np.uint64], salt: int, expires: int) -> NDArray[np.bool_]:
        """Reserve different places for keys; return which have memory. The lock is held."""
        sets, ways = np.divmod(places, WAYS)
        has_pages: NDArray[np.bool_] = self._has_pages[sets, ways] != 0
        for i in np.flatnonzero(~has_pages).tolist():
            has_pages[i] = self._give_pages(int(sets[i]), int(ways[i]))
        sets, ways, pid = sets[has_pages], ways[has_pages], os.getpid()
        self._done[sets, ways] = 0  # before all else: from here on the old entry is a miss
        self._pid[sets, ways], self._start[sets, ways] = pid, _own_start_time(pid)
        self._salt[sets, ways], self._expires[sets, ways], self._used[sets, ways] = salt, expires, time.time()
        self._low[sets, ways], self._high[sets, ways] = words[has_pages].T
        return has_pages

    def _free(self, sets: NDArray[np.int64], ways: NDArray[np.int64]) -> None:
        self._done[sets, ways] = 0
        self._low[sets, ways] = self._high[sets, ways] = 0

    def _give_pages(self, index: int, way: int) -> bool:
        """Allocate a slot's memory in the files. Without it, a write would end the process."""
        try:
            for file in self.files:
                os.posix_fallocate(file, (way * self._num_sets + index) * self.slot_bytes, self.slot_bytes)
        except OSError:
            self._full_until = time.time() + _FULL_S
            return False
        self._has_pages[index, way] = 1
        return True

    def _are_own(self, sets: NDArray[np.int64], ways: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which slots were reserved by this process [n]."""
        pid = os.getpid()
        is_own: NDArray[np.bool_] = (self._pid[sets, ways] == pid) & (self._start[sets, ways] == _own_start_time(pid))
        return is_own

    @staticmethod
    def _are_alive(pids: NDArray[np.uint32], starts: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return which processes are alive [n]."""
        now = {pid: start_time(pid) for pid in set(pids.tolist())}
        pairs = zip(pids.tolist(), starts.tolist(), strict=True)
        return np.array([now[pid] == start != 0 for pid, start in pairs], np.bool_)

    @contextlib.contextmanager
    def _try_lock(self) -> Iterator[bool]:
        """Hold the region's lock, or yield False if another has it. A stopped process does not hold up others."""
        # Opened anew, so that threads and forked children lock each other out, too.
        with descriptor(f"/proc/self/fd/{self.files[0]}", os.O_RDWR) as file:
            is_locked = locks(file, fcntl.LOCK_EX)
            for _ in range(_LOCK_TRIES):
                if not is_locked:
                    time.sleep(_LOCK_PAUSE_S)
                    is_locked = locks(file, fcntl.LOCK_EX)
            try:
                yield is_locked
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too


def start_time(pid: int) -> int:
    """Return a process's start time in the kernel's ticks, modulo 2^32; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19]) % 2**32


@lru_cache(1)
def _own_start_time(pid: int) -> int:
    """`start_time` of this process, a system call less. A forked child has another `pid`."""
    return start_time(pid)
