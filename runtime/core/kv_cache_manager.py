"""The requests' block tables: which block holds which of a request's tokens, shared by equal prefixes, and the changes
that the next plan brings to the runners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from runtime.core.block_pool import BlockPool
from runtime.core.config import ModelInfo
from runtime.core.plan import EMPTY_TABLE, Int32s
from runtime.core.prefix_cache import PrefixCache, block_hash, root_hash
from runtime.core.request_state import NEVER, RequestState


class KVCacheManager:
    """Works on `RequestState.blocks`; the scheduler decides who gets blocks."""

    def __init__(self, info: ModelInfo, prefix_cache: bool) -> None:
        self._fingerprint, self._size, self._shares = info.fingerprint, info.block_size, prefix_cache
        self.cache = PrefixCache()
        self.pool = BlockPool(info.num_kv_blocks, self.cache.evict)
        self._writes: list[tuple[int | None, int, int]] = []  # slot, index in its table, block: not sent yet

    def reset(self) -> None:
        """The runners are gone, and with them what the blocks held."""
        self.cache.reset()
        self.pool.reset()
        self._writes = []

    def take_writes(self) -> Int32s:
        """What has changed since the last call: [3, n] slot, index in its table, block (StepPlan)."""
        writes, self._writes = self._writes, []
        return np.array(writes, np.int32).T.copy() if writes else EMPTY_TABLE

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._size)

    def num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a request lacks to hold so many tokens."""
        return max(0, self.blocks_for(num_tokens) - len(state.blocks))

    def open(self, state: RequestState) -> None:
        """A request has got a slot, with its cached prefix as blocks."""
        self._writes += [(state.slot, i, b) for i, b in enumerate(state.blocks)]
        if self._shares:
            state.next_block_end = (len(state.blocks) + 1) * self._size

    def close(self, state: RequestState, spoilt: bool = False) -> None:
        """A request leaves its slot; full blocks stay in the cache as long as nobody needs their place.

        Of one that failed (`spoilt`) none stays, not even what it shares: any of them may hold the value that is not
        finite, and would fail whoever comes with the same prefix."""
        if spoilt:
            self.pool.mark_spoilt(state.blocks)
        else:
            self.cache_full_blocks(state, move=False)
        self.pool.release(state.blocks)
        if self._writes:
            self._writes = [w for w in self._writes if w[0] != state.slot]

    def extend(self, state: RequestState, num_tokens: int) -> None:
        """Blocks for so many tokens in all; there must be as many available."""
        blocks, at = self.pool.allocate(self.num_missing(state, num_tokens)), len(state.blocks)
        self._writes += [(state.slot, at + i, b) for i, b in enumerate(blocks)]
        state.blocks += blocks

    def match_prefix(self, state: RequestState) -> list[int]:
        """Cached blocks of the request's known prefix; never its last token, which must be computed to sample, and none
        if log-probabilities of the prompt are wanted, which are not in the cache."""
        if not self._shares or state.prompt_logprobs is not None:
            return []
        num_full = (len(state.tokens) - 1) // self._size
        return self.cache.match_prefix(self._hash_blocks(state, num_full)[:num_full])

    def cache_full_blocks(self, state: RequestState, move: bool = True) -> None:
        """Put the request's newly full blocks into the cache.

        They may be matched from this step on, even by a row of the same step: runners store the K/V of all rows of a
        layer before any row attends. If another request got there first, this one moves to its block: one copy
        remains, and whoever holds a block holds its ancestors (block_pool.py)."""
        if state.next_block_end == NEVER:
            return
        size = self._size
        num_full = min(state.num_computed, len(state.tokens), state.num_final) // size
        block_hashes = self._hash_blocks(state, num_full)
        for at in range(state.next_block_end // size - 1, num_full):
            block = state.blocks[at]
            holder = self.cache.insert(block_hashes[at], block)
            if holder == block:
                self.pool.mark_cached(block)
            else:
                self.pool.acquire([holder])
                self.pool.release([block])
                state.blocks[at] = holder
                if move:
                    self._writes.append((state.slot, at, holder))
        state.next_block_end = max(state.next_block_end, (num_full + 1) * size)

    def find_faults(self, running: Sequence[RequestState]) -> list[str]:
        """One sentence for each block whose bookkeeping is wrong, and for each request that lacks blocks."""
        held = Counter(block for state in running for block in state.blocks)
        faults = self.pool.find_faults(held) + self.cache.find_faults(self.pool.is_cached)
        for state in running:
            if missing := self.num_missing(state, state.num_computed):
                faults.append(f"Request {state.request.request_id!r} lacks {missing} blocks of what is computed.")
        return faults

    def _hash_blocks(self, state: RequestState, num_blocks: int) -> list[bytes]:
        """The hashes of at least the request's first `num_blocks` blocks; only known tokens are hashed (C5)."""
        block_hashes, size = state.block_hashes, self._size
        parent = block_hashes[-1] if block_hashes else root_hash(self._fingerprint, state.request.cache_salt)
        for i in range(len(block_hashes), num_blocks):
            parent = block_hash(parent, state.tokens[i * size : (i + 1) * size])
            block_hashes.append(parent)
        return block_hashes
