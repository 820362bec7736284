"""The requests' block tables: the blocks with each request's tokens, which equal prefixes share.

The next plan sends the tables' changes to the runners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.kv_cache_spec import KVCacheSpec, KVGroupSpec
from runtime.base.model_info import ModelInfo
from runtime.core.block_pool import NULL_BLOCK, BlockPool, CachedBlock, EvictionOrder
from runtime.core.plan import EMPTY_TABLE
from runtime.core.prefix_cache import PrefixCache, hash_blocks, match_tables, root_hash
from runtime.core.request_state import NEVER, RequestState

_ONE_GROUP = (KVGroupSpec((), 1, 1, "float32"),)  # used if a model describes no groups


class _TableWrites(NamedTuple):
    """Changes of the runners' tables, one column a field."""

    slots: list[int]
    indices: list[int]  # indices in the slot's table
    blocks: list[int]


class KVCacheManager:
    """Maintains `RequestState.tables`; the scheduler decides which request gets blocks.

    Every KV cache group has its own table for each request, all equally long. A slot's table in a plan is
    the groups' tables one after another, each with room for the longest request.

    A window group's blocks are released when no later row can read them. Most are spent then (block_pool.py).
    Later prompts are likely to begin at a prompt's end, or where two prompts branched. The blocks that they would
    read are not spent. A hit needs all blocks in groups without a window, and the last blocks in the others."""

    least_row = 1  # tokens that a prompt row needs to make progress

    def __init__(self, info: ModelInfo, prefix_cache: bool, max_chunk: int, order: EvictionOrder | None = None) -> None:
        """No row has more than `max_chunk` tokens. Cached blocks are evicted in `order`."""
        self._fingerprint, self.block_size = info.fingerprint, info.block_size
        self.groups = info.kv_cache.groups if info.kv_cache is not None else _ONE_GROUP
        self._num_groups = len(self.groups)
        self._windows = [(i, group) for i, group in enumerate(self.groups) if group.window is not None]
        self._max_chunk = max_chunk = max(max_chunk, 3)  # two steps in flight, and the last known token again

        self._caps = [group.most_blocks(1 << 40, self.block_size, max_chunk) for _, group in self._windows]
        self._table_len = self.blocks_for(info.max_model_len)
        self._shares = prefix_cache
        # A head writes one position behind a row, and more if blocks are there: further ones go to the null block.
        self._num_ahead = int(info.head is not None)
        self.caches = [PrefixCache() for _ in self.groups]
        self.cache = self.caches[0]  # what the fronts follow
        self._group_of = [0] * info.num_kv_blocks  # KV group of each cached block
        self._branches: dict[RequestState, int] = {}  # blocks before which another prompt has branched off
        self.pool = BlockPool(info.num_kv_blocks, self.on_evict, order)
        self.lent = Counter[int]()  # blocks that transfers hold (runtime/tier), and how often
        self.on_cached: Callable[[RequestState], None] | None = None  # called when blocks of a request are cached
        self.on_evicted: Callable[[list[int]], None] | None = None  # called with blocks that leave the cache
        self._writes = _TableWrites([], [], [])  # not sent yet

    def reset(self) -> None:
        """Free all blocks and empty the cache, because the runners' memory is lost."""
        for cache in self.caches:
            cache.reset()
        self._branches.clear()
        self.lent.clear()
        self.pool.reset()
        self._writes = _TableWrites([], [], [])

    def use_weights(self, fingerprint: str, running: Sequence[RequestState]) -> None:
        """The model has another fingerprint: nothing that is cached may be found again (C5).

        The running requests keep their blocks, which do not enter the cache."""
        self._fingerprint = fingerprint
        self.pool.evict_unheld()
        for state in running:
            state.next_block_end = NEVER
            self.pool.mark_spoilt([block for table in state.tables for block in _held(table)])

    def on_evict(self, blocks: list[int]) -> None:
        """The content of these cached blocks is about to be overwritten."""
        if self.on_evicted is not None:
            self.on_evicted(blocks)
        if self._num_groups == 1:
            self.cache.evict(blocks)
            return
        for number, cache in enumerate(self.caches):
            cache.evict([block for block in blocks if self._group_of[block] == number])

    def take_writes(self) -> Int32s:
        """The changes since the last call: [3, n] slot, index in its table, block (StepPlan)."""
        if not self._writes.blocks:
            return EMPTY_TABLE
        writes, self._writes = self._writes, _TableWrites([], [], [])
        return np.array(writes, np.int32)

    def take_snapshots(self) -> Int32s:
        """The snapshots of states that the planned step takes (StepPlan); none without states."""
        return EMPTY_TABLE

    def state_rows(self, state: RequestState) -> tuple[int, int]:
        """Return a request's row in the state cache, and the row of the snapshot that it continues; 0 for none."""
        return 0, 0

    def row_tokens(self, state: RequestState, count: int) -> int:
        """Return how many of a prompt's next `count` tokens one row may compute."""
        return count

    def blocks_for(self, num_tokens: int) -> int:
        """Return the entries of a table that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks, in all groups, that a request with `num_tokens` tokens holds."""
        size = self.blocks_for(num_tokens)
        if not self._caps:
            return size * self._num_groups
        return size * (self._num_groups - len(self._caps)) + sum(min(size, cap) for cap in self._caps)

    def max_tokens(self) -> int:
        """Return the tokens of the longest request that fits the pool."""
        most = KVCacheSpec(self.groups).most_tokens(self.pool.num_blocks - 1, self.block_size, self._max_chunk)
        return most if most >= self._table_len * self.block_size else most - self._num_ahead

    @property
    def num_free_tokens(self) -> int:
        """Tokens for which one request can get blocks."""
        return self.pool.num_available // self._num_groups * self.block_size

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Return the blocks that a request lacks for `num_tokens` tokens."""
        if num_tokens <= state.capacity:
            return 0
        size = min(self.blocks_for(num_tokens + self._num_ahead), self._table_len)
        return self._num_groups * (size - len(state.tables[0]))

    def _capacity(self, size: int) -> int:
        """Tokens of rows for which a table of `size` entries has blocks."""
        return size * self.block_size - (self._num_ahead if size < self._table_len else 0)

    def room_with(self, hits: Sequence[list[int]]) -> int:
        """Return the most blocks that a waiting request can hold, its cached blocks `hits` included."""
        blocks = [block for table in hits for block in _held(table)]
        return self.pool.num_available - self.pool.num_unheld(blocks) + len(blocks)

    def open(self, state: RequestState, hits: list[list[int]]) -> None:
        """A request has a slot, and begins with the tables `hits` of cached blocks."""
        state.tables, state.num_blocks, size = hits, 0, len(hits[0])
        for number, table in enumerate(hits):
            blocks = _held(table)
            self.pool.acquire(blocks)
            state.num_blocks += len(blocks)
            self._write(state, number * self._table_len + size - len(blocks), blocks)
        state.num_computed, state.capacity = size * self.block_size, self._capacity(size)
        if self._windows and (branch := self._num_cached_without_windows(state)) > size:
            self._branches[state] = branch
        if self._shares and state.fills_cache:
            state.next_block_end = state.num_computed + self.block_size

    def close(self, state: RequestState, spoilt: bool = False) -> None:
        """A request leaves its slot. Its full blocks stay in the cache until they are evicted.

        With `spoilt` none stays, not even a shared one. Any of them may hold the value that is not finite, and would
        fail the next request with the same prefix."""
        if spoilt:
            for cache, table in zip(self.caches, state.tables, strict=True):
                found = map(cache.find, state.block_hashes) if self._windows else ()
                self.pool.mark_spoilt(
                    [*_held(table), *{block for block in found if block is not None}.difference(table)]
                )
        else:
            self.cache_full_blocks(state, move=False)
            self.free_below_windows(state)
        for table in state.tables:
            self.pool.release(_held(table))
        self._branches.pop(state, None)
        if state.slot in self._writes.slots:
            kept = [slot != state.slot for slot in self._writes.slots]
            self._writes = _TableWrites(*(list(compress(column, kept)) for column in self._writes))

    def extend(self, state: RequestState, num_tokens: int) -> None:
        """Give a request blocks for `num_tokens` tokens in all, which must be available."""
        if not (count := self.num_missing(state, num_tokens) // self._num_groups):
            return
        for group, table in enumerate(state.tables):
            blocks = self.pool.allocate(count)
            self._write(state, group * self._table_len + len(table), blocks)
            table += blocks
            state.num_blocks += count
            if self._num_ahead and len(table) < self._table_len:
                self._write(state, group * self._table_len + len(table), [NULL_BLOCK])
        state.capacity = self._capacity(len(state.tables[0]))

    def extend_if_free(self, state: RequestState, num_tokens: int) -> None:
        """Give a request blocks for `num_tokens` tokens in all, at most its longest, if they are free."""
        num_tokens = min(num_tokens, state.max_len)
        if 0 < self.num_missing(state, num_tokens) <= self.pool.num_available:
            self.extend(state, num_tokens)

    def free_below_windows(self, state: RequestState) -> None:
        """Free the blocks that no row reads any more which starts at `num_computed` or later, where tokens are final.

        Steps in flight may still read them: plans are executed in order, so the next holder writes them later. The row
        of the last known token may be planned again (RequestState.may_resample). With a prefix cache, rows after the
        last full block can read what they need, so that a later prompt can begin there."""
        start = min(state.num_computed, state.num_final)
        if state.may_resample or self._shares:
            start = min(start, len(state.tokens) - 1)
        if self._shares:
            start -= start % self.block_size
        for number, group in self._windows:
            table = state.tables[number]
            num_dead = group.num_dead_blocks(start, self.block_size)
            dead = _held(table[:num_dead])
            if not dead:
                continue
            kept = self._before_next_prompts(state, group)
            is_kept = [any(at in indices for indices in kept) for at in range(num_dead - len(dead), num_dead)]
            self.pool.release([block for block, keep in zip(dead, is_kept, strict=True) if not keep], spent=True)
            self.pool.release([block for block, keep in zip(dead, is_kept, strict=True) if keep])
            state.num_blocks -= len(dead)
            table[:num_dead] = [NULL_BLOCK] * num_dead

    def _before_next_prompts(self, state: RequestState, group: KVGroupSpec) -> list[range]:
        """Indices of the blocks that a group's windows see at the places where a later prompt is likely to begin."""
        ends, size = (self._branches.get(state, 0), state.prompt_len // self.block_size), self.block_size
        return [range(group.num_dead_blocks(end * size, size), end) for end in ends]

    def match_prefix(self, state: RequestState) -> list[list[int]]:
        """Return tables of cached blocks for a request's known prefix, without its last token, which must be
        computed."""
        if not self._shares or not state.reads_cache:
            return [[] for _ in self.groups]
        return match_tables(self.caches, self.groups, self.prefix_hashes(state), self.block_size)

    def _num_cached_without_windows(self, state: RequestState) -> int:
        """Return the blocks of the prefix that would be a hit without windows; 0 if all groups have one."""
        if len(self._windows) == self._num_groups or not self._shares or not state.reads_cache:
            return 0
        number = next(i for i, group in enumerate(self.groups) if group.window is None)
        return len(self.caches[number].match_prefix(self.prefix_hashes(state)))

    def prefix_hashes(self, state: RequestState) -> list[bytes]:
        """Return the hashes of the blocks that may be a hit: full ones before the last known token."""
        num_full = (len(state.tokens) - 1) // self.block_size
        return self._hash_blocks(state, num_full)[:num_full]

    def cache_full_blocks(self, state: RequestState, move: bool = True) -> None:
        """Put the request's newly full blocks into the cache.

        They may be matched from this step on, even by a row in the same step. For runners store a layer's K/V for all
        rows before any row attends. If another request has cached the same block first, this one moves to it: one copy
        remains. And a block's holder holds its ancestors (block_pool.py)."""
        size = self.block_size
        num_full = self.num_cacheable(state) // size
        if num_full * size < state.next_block_end:
            return
        first, block_hashes = state.next_block_end // size - 1, self._hash_blocks(state, num_full)
        for number, table in enumerate(state.tables):
            begin = first
            while begin < num_full and table[begin] == NULL_BLOCK:  # freed below a window
                begin += 1
            if begin < num_full:
                for at in self.cache_blocks(number, table, begin, block_hashes[begin:num_full]):
                    if move:
                        self._write(state, number * self._table_len + at, [table[at]])
        state.next_block_end = (num_full + 1) * size
        if self.on_cached is not None:
            self.on_cached(state)

    def cache_blocks(self, number: int, table: list[int], first: int, block_hashes: list[bytes]) -> list[int]:
        """Put one group's held blocks, from index `first` in a table on, into the cache.

        Returns the indices at which the table moves to another block, which was cached first."""
        moved = []
        blocks = table[first : first + len(block_hashes)]
        cached = self.caches[number].insert(block_hashes, blocks)
        parents = [table[first - 1] if first else NULL_BLOCK, *cached[:-1]]
        new: list[CachedBlock] = list(zip(blocks, block_hashes, parents, strict=False))
        if cached != blocks:
            new = [each for each, block in zip(new, cached, strict=True) if each[0] == block]
            for at, block in enumerate(cached, first):
                if block != table[at]:
                    self.pool.acquire([block])
                    self.pool.release([table[at]])
                    table[at] = block
                    moved.append(at)
        self.pool.mark_cached(new)
        if self._num_groups > 1:
            for block, _, _ in new:
                self._group_of[block] = number
        return moved

    def num_cacheable(self, state: RequestState) -> int:
        """Return how many leading tokens of a request have keys and values that any request may use."""
        return min(state.num_computed, len(state.tokens), state.num_final)

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states that are kept now."""
        return 0

    @property
    def num_evicted_snapshots(self) -> int:
        """Snapshots of states that were evicted so far."""
        return 0

    def find_faults(self, running: Sequence[RequestState]) -> list[str]:
        """Return one sentence for each block in a wrong place, and for each request without enough blocks."""
        held = Counter(block for state in running for table in state.tables for block in _held(table))
        held.update(self.lent)
        faults = self.pool.find_faults(held)
        for cache in self.caches:
            faults += cache.find_faults(self.pool.is_cached)
        for state in running:
            name, num_blocks = state.request.request_id, sum(len(_held(table)) for table in state.tables)
            is_uneven = any(self._capacity(len(table)) != state.capacity for table in state.tables)
            if state.capacity + self._num_ahead < state.num_computed or is_uneven:
                faults.append(f"Request {name!r} lacks blocks of its {state.num_computed} computed tokens.")
            if num_blocks != state.num_blocks:
                faults.append(f"Request {name!r} counts {state.num_blocks} blocks, but holds {num_blocks}.")
        return faults

    def _write(self, state: RequestState, at: int, blocks: list[int]) -> None:
        """The runners' table of a request has these blocks from index `at` on."""
        assert state.slot is not None
        self._writes.slots.extend([state.slot] * len(blocks))
        self._writes.indices.extend(range(at, at + len(blocks)))
        self._writes.blocks.extend(blocks)

    def _hash_blocks(self, state: RequestState, num_blocks: int) -> list[bytes]:
        """The hashes of at least the request's first `num_blocks` blocks; only known tokens are hashed (C5)."""
        block_hashes, size = state.block_hashes, self.block_size
        if len(block_hashes) < num_blocks:
            if block_hashes:
                parent = block_hashes[-1]
            else:
                parent = root_hash(self._fingerprint, state.request.cache_salt, state.request.adapter)
            first, end = len(block_hashes) * size, num_blocks * size
            block_hashes += hash_blocks(parent, state.tokens[first:end], size, state.request.images, first)
        return block_hashes


def _held(table: list[int]) -> list[int]:
    """The blocks of a table, without what was freed below a window: its first entries."""
    return table if not table or table[0] != NULL_BLOCK else [block for block in table if block != NULL_BLOCK]
