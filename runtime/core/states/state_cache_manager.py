"""StateCacheManager: block tables for a model with recurrent states, and snapshots of its states.

Tokens before `prompt_end`, the prompt's last token, are computed in chunks from multiples of `chunk` on. Later tokens
are computed one after another, with other last bits. Only the former are canonical: their keys, values and states equal
those for the same prefix in any other request (C5). So only they are cached, and every prompt row ends at a
multiple of `chunk` or reaches `prompt_end`.

Snapshots are taken within rows:

- at the last multiple of `chunk` in a prompt, where a conversation's next turn begins
- where another prompt has branched off: cached blocks reach further than the last snapshot
- every SPACING tokens in a long prompt, so that little is lost with a preemption or a runner
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.core.block_pool import EvictionOrder
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import EMPTY_TABLE
from runtime.core.request_state import NEVER, RequestState
from runtime.core.states.snapshot_pool import Snapshot, SnapshotPool

SPACING = 8192  # tokens between snapshots within a prompt


@dataclass(slots=True)
class _Record:
    """What a request in a slot has."""

    row: int  # state cache row
    restored: int  # row of the snapshot that it continues; 0 for none, or if it is its own row
    last: Snapshot | None  # its prefix's last snapshot
    branch: int  # position at which another prompt has branched off; 0 if unknown
    considered: int = 0  # position up to which snapshots were taken, or were not worth it


class StateCacheManager(KVCacheManager):
    """A KVCacheManager that also gives each request a row of the state cache."""

    def __init__(
        self, info: ModelInfo, prefix_cache: bool, max_chunk: int, max_num_seqs: int, order: EvictionOrder | None = None
    ) -> None:
        """Raises CallboardError if blocks do not divide chunks."""
        assert info.kv_cache is not None
        assert info.kv_cache.states is not None
        self.least_row = self._chunk = chunk = info.kv_cache.states.chunk
        if chunk % info.block_size and prefix_cache and info.block_size < info.max_model_len:
            raise CallboardError(f"block_size is {info.block_size}; for a model with states it must divide {chunk}.")
        self._max_num_seqs = max_num_seqs
        self._records: dict[RequestState, _Record] = {}
        self._pending: list[tuple[RequestState, Snapshot]] = []  # snapshots in the step that is being planned
        self._loading: list[Snapshot] = []  # snapshots that transfers write
        super().__init__(info, prefix_cache, max_chunk, order)
        self.snapshots = SnapshotPool(info.num_states, self.cache.note_snapshot)

    @property
    def num_snapshots(self) -> int:
        return len(self.snapshots)

    @property
    def num_evicted_snapshots(self) -> int:
        return self.snapshots.evictions

    def reset(self) -> None:
        super().reset()
        self.snapshots.reset()
        self._records.clear()
        self._pending.clear()
        self._loading.clear()

    def on_evict(self, blocks: list[int]) -> None:
        self.snapshots.drop(blocks)
        super().on_evict(blocks)

    def row_tokens(self, state: RequestState, count: int) -> int:
        """Round a row with `count` tokens down to a multiple of `chunk`, unless it reaches the prompt's last token.

        A row also ends where another prompt has branched off."""
        start, record = state.num_computed, self._records.get(state)
        end, prompt_end = start + count, state.prompt_len - 1
        if record is not None and start < record.branch < end:
            return record.branch - start
        return count if end > prompt_end else max(0, end // self._chunk * self._chunk - start)

    def match_prefix(self, state: RequestState) -> list[list[int]]:
        """Return the cached blocks before the longest prefix of the prompt with a snapshot."""
        blocks = self._matched(state)
        snapshot = self.snapshots.longest(blocks)
        return [[] if snapshot is None else blocks[: snapshot.position // self.block_size]]

    def _matched(self, state: RequestState) -> list[int]:
        return super().match_prefix(state)[0]

    def prefix_hashes(self, state: RequestState) -> list[bytes]:
        """Only blocks of the prompt may be a hit. Its output has other bits than the same tokens in a prompt."""
        return super().prefix_hashes(state)[: (state.prompt_len - 1) // self.block_size]

    def begin_load(self, position: int, parents: list[int]) -> Snapshot | None:
        """Return a snapshot for a transfer to write. It comes after the snapshots of `parents`, cached blocks.

        None if it is not worth its row."""
        parent, reserved = self.snapshots.longest(parents), self._max_num_seqs - len(self._records)
        if (snapshot := self.snapshots.take(position, parent, reserved)) is not None:
            self._loading.append(snapshot)
        return snapshot

    def end_load(self, snapshot: Snapshot, block: int | None) -> None:
        """A transfer has ended. The cached `block` has the snapshot from now on. Without one it is dropped."""
        self._loading.remove(snapshot)
        if block is None or block in self.snapshots:
            self.snapshots.release(snapshot.row)
        else:
            snapshot.block = block
            self.snapshots.publish(snapshot)

    def open(self, state: RequestState, hits: list[list[int]]) -> None:
        branch = len(self._matched(state)) * self.block_size // self._chunk * self._chunk
        restored = self.snapshots.longest(hits[0])
        row = self.snapshots.acquire(restored)
        source = 0 if restored is None or restored.row == row else restored.row
        begin = len(hits[0]) * self.block_size
        self._records[state] = _Record(row, source, restored, branch if branch > begin else 0, begin)
        super().open(state, hits)

    def state_rows(self, state: RequestState) -> tuple[int, int]:
        record = self._records[state]
        return record.row, record.restored

    def close(self, state: RequestState, spoilt: bool = False) -> None:
        super().close(state, spoilt)
        self.snapshots.release(self._records.pop(state).row)

    def cache_full_blocks(self, state: RequestState, move: bool = True) -> None:
        super().cache_full_blocks(state, move)
        if state.next_block_end > state.prompt_len - 1:
            state.next_block_end = NEVER
        self._take_snapshot(state)

    def num_cacheable(self, state: RequestState) -> int:
        return min(super().num_cacheable(state), state.prompt_len - 1)

    def _take_snapshot(self, state: RequestState) -> None:
        """Take a snapshot in the row that was just planned, at its last multiple of `chunk`, if it is worth one."""
        record, prompt_end = self._records[state], state.prompt_len - 1
        position = min(state.num_computed, prompt_end) // self._chunk * self._chunk
        if position <= record.considered:
            return
        record.considered = position
        before = 0 if record.last is None else record.last.position
        if position not in (prompt_end // self._chunk * self._chunk, record.branch) and position < before + SPACING:
            return
        block = state.tables[0][position // self.block_size - 1]
        is_known = block in self.snapshots or any(block == each.block for _, each in self._pending)
        if is_known or not self.pool.is_cached(block):
            return
        # Until the step is planned, its snapshots cannot be evicted for the requests that it admits.
        snapshot = self.snapshots.take(position, record.last, self._max_num_seqs - len(self._records))
        if snapshot is not None:
            record.last, snapshot.block = snapshot, block
            self._pending.append((state, snapshot))

    def take_snapshots(self) -> Int32s:
        if not self._pending:
            return EMPTY_TABLE
        taken = np.array([(state.slot, each.position, each.row) for state, each in self._pending], np.int32)
        for _, snapshot in self._pending:  # later steps find them
            self.snapshots.publish(snapshot)
        self._pending.clear()
        return np.ascontiguousarray(taken.T)

    def find_faults(self, running: Sequence[RequestState]) -> list[str]:
        faults = super().find_faults(running)
        held = [record.row for record in self._records.values()]
        pending = [*self._loading, *(snapshot for _, snapshot in self._pending)]
        return faults + self.snapshots.find_faults(held, (each.row for each in pending))
