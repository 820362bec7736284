"""SnapshotPool: rows in the runners' state cache, for live requests and for prefix snapshots.

A model with recurrent states can continue a cached prefix only from the state at its end. A snapshot is such a state at
a multiple of chunk tokens, found by the cached KV block that ends there. Each live request holds one row, so snapshots
get the rows that are left. The least worthy one is evicted: it saves the fewest tokens, divided by its age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

NULL_ROW = 0  # padding's row; never allocated


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after a prefix."""

    row: int  # state cache row
    block: int  # the cached KV block that ends the prefix
    position: int  # tokens in the prefix
    parent: Snapshot | None  # the longest shorter prefix with a snapshot; it may be evicted
    last_use: int = 0  # the pool's clock when it was made or restored


class SnapshotPool:
    """Free rows, and the snapshots by their block."""

    def __init__(self, num_rows: int, on_change: Callable[[int, bool], None] = lambda block, is_kept: None) -> None:
        """`num_rows` include the null row. `on_change(block, is_kept)` is called when a block gets a snapshot or loses
        it."""
        self.num_rows, self._on_change = num_rows, on_change
        self.evictions = 0
        self.reset()

    def reset(self) -> None:
        """Free all rows, because the runners' memory is lost."""
        self._free = list(range(self.num_rows - 1, NULL_ROW, -1))
        self._by_block: dict[int, Snapshot] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def longest(self, blocks: list[int]) -> Snapshot | None:
        """Return the snapshot for the longest prefix of the cached `blocks`, or None."""
        found = self._by_block
        return next((found[block] for block in reversed(blocks) if block in found), None)

    def find(self, block: int) -> Snapshot | None:
        """Return the snapshot at this block, or None."""
        return self._by_block.get(block)

    def acquire(self, restored: Snapshot | None = None) -> int:
        """Return a row for a request that continues at the snapshot `restored`.

        Evicts a snapshot if no row is free. If that is the restored one itself, the request gets its row."""
        self._clock += 1
        if restored is not None:
            restored.last_use = self._clock
        if not self._free:
            others = [each for each in self._by_block.values() if each is not restored]
            self._evict(min(others, key=self._worth) if others else restored)
        return self._free.pop()

    def release(self, row: int) -> None:
        """Free the row of a request that has ended or is preempted."""
        self._free.append(row)

    def take(self, position: int, parent: Snapshot | None, reserved: int = 0) -> Snapshot | None:
        """Return a snapshot for a prefix with `position` tokens, with a row but without a block yet.

        None if all snapshots are worth more, or if fewer than `reserved` rows would remain for requests."""
        new = Snapshot(NULL_ROW, 0, position, parent, self._clock)
        if len(self._free) + len(self._by_block) <= reserved:
            return None
        if not self._free:
            worst = min(self._by_block.values(), key=self._worth)
            if self._worth(worst) >= self._worth(new):
                return None
            self._evict(worst)
        new.row = self._free.pop()
        return new

    def publish(self, snapshot: Snapshot) -> None:
        """The prefix is in the cache, and ends with the snapshot's block."""
        self._by_block[snapshot.block] = snapshot
        self._on_change(snapshot.block, True)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks have left the cache."""
        for block in blocks:
            if (snapshot := self._by_block.get(block)) is not None:
                self._remove(snapshot)

    def _worth(self, snapshot: Snapshot) -> float:
        """Tokens that it saves beyond the next shorter snapshot, divided by its age in requests."""
        parent = snapshot.parent
        while parent is not None and self._by_block.get(parent.block) is not parent:
            parent = parent.parent
        snapshot.parent = parent
        before = 0 if parent is None else parent.position
        return (snapshot.position - before) / (self._clock - snapshot.last_use + 1)

    def _evict(self, snapshot: Snapshot | None) -> None:
        assert snapshot is not None, "there are as many rows as slots"
        self.evictions += 1
        self._remove(snapshot)

    def _remove(self, snapshot: Snapshot) -> None:
        del self._by_block[snapshot.block]
        self._on_change(snapshot.block, False)
        self._free.append(snapshot.row)

    def find_faults(self, held: Iterable[int], pending: Iterable[int]) -> list[str]:
        """Return one sentence for each row in a wrong place. `held` are the requests' rows, `pending` the rows of
        snapshots without a block."""
        rows = [*self._free, *held, *pending, *(snapshot.row for snapshot in self._by_block.values())]
        if sorted(rows) == list(range(NULL_ROW + 1, self.num_rows)):
            return []
        return [f"Rows {sorted(rows)} of states are free, held or snapshots; there are {self.num_rows - 1}."]
