"""Tier: loads prefixes from a tier that outlives the engine, and stores what the engine computes.

    admit A    2,000 of its tokens are in the tier: it is LOADING, and blocks are allocated for them
    plan k     loads 125 blocks                      other requests' rows
    plan k+1                                         other requests' rows
    result k   all 125 are loaded: they are cached blocks now, as if they had been computed here
    admit A    the ordinary way, with 2,000 tokens cached

A request waits while it loads, without a slot or blocks of its own. The loads hold the blocks until they end, also if
the request ends first. Each LOADING request has a free slot kept for it. A request loads once an admission: if a block
is damaged, or evicted again, it is computed.

A plan may have transfers alone. One is needed while a transfer is in flight, as its result reports the ends.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from runtime.base.model_info import ModelInfo
from runtime.base.types import FinishReason
from runtime.core.extra import Culprit, Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.plan import StepResult, Transfers
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.states.snapshot_pool import Snapshot
from runtime.core.states.state_cache_manager import StateCacheManager
from runtime.core.stats import EngineStats
from runtime.core.step import Step
from runtime.tier.costs import Costs, least_tokens
from runtime.tier.hits import Hit, TierHits, held_blocks
from runtime.tier.keys import TierIndex, TierKeys
from runtime.tier.stores import STATE, Stores, transfers_of

logger = logging.getLogger(__name__)

_MAX_LOSSES = 3  # losses of the runners in a row, with transfers in flight, after which the tier is off
_MAX_OWN_LOSSES = 2  # losses during a request's loads after which it is computed
_MIB = 1 << 20
_MAX_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Limits:
    """Most bytes in transfers of one rank."""

    loads: int  # a plan's, without rows
    loads_beside: int  # a plan's, with rows
    stores: int
    stores_beside: int
    stores_in_flight: int


_GPU = _Limits(1024 * _MIB, 256 * _MIB, 128 * _MIB, 64 * _MIB, 256 * _MIB)
_CPU = _Limits(64 * _MIB, 16 * _MIB, 32 * _MIB, 16 * _MIB, 64 * _MIB)  # copies are a part of the step
# Entries stored in a step with decoding rows and few prompt tokens. Small entries cost the host more time than the
# link: 200 entries with 320 KiB took 6 ms in the engine and the runner. A step on a GPU may take less.
_STORES_BESIDE, _FEW_TOKENS = 64, 512


class _Transfer(NamedTuple):
    """A slot that a load reads."""

    group: int  # STATE for a state
    block: int  # a state's row
    part: int
    at: int  # index in its table; a state's is the last one
    key: bytes


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks of a prefix that are on their way, for a request."""

    hit: Hit
    tables: list[list[int]]  # the hit's, with blocks that the load has allocated
    snapshot: Snapshot | None  # which the load writes
    num_cached: int  # blocks that the request has without it
    begun_at: float
    transfers: list[_Transfer]
    num_planned: int = 0
    num_ended: int = 0
    num_usable: int = 0  # leading blocks of the hit, before the first one that failed
    is_void: bool = False  # the bytes count for nothing
    waiting: list[RequestState] = field(default_factory=list)  # requests that wait for its end

    def __post_init__(self) -> None:
        self.num_usable = len(self.hit.hashes)


class Tier(Extra):
    """Decides about loads and stores. Runners copy (runtime/tier/copies.py)."""

    def __init__(
        self,
        info: ModelInfo,
        index: TierIndex,
        clock: Callable[[], float] = time.time,
        prefill_rate: Callable[[], float] = lambda: 0.0,
        shortest: int | None = None,
    ) -> None:
        """`info` has a tier. `clock` returns time.time() seconds. `prefill_rate` returns the measured prompt tokens
        per second, 0 before the first estimate. Fewer tokens than `shortest` are neither loaded nor stored; None for
        the device's usual number."""
        assert info.tier is not None
        self._tier, self.index, self._clock = info.tier, index, clock
        self._least_tokens = least_tokens(info.device, shortest)
        self._limits = _CPU if info.device == "cpu" else _GPU
        self.costs = Costs(info.device, clock, prefill_rate)
        self._loading: dict[RequestState, _Load] = {}  # LOADING requests, and what they wait for
        self._has_loaded: set[RequestState] = set()  # waiting requests that do not load again
        self._losses = Counter[RequestState]()  # losses of the runners during a request's load
        self._live: list[_Load] = []  # that have not ended
        self._unplanned: deque[_Load] = deque()  # live loads with transfers that no plan has yet
        self._transfers: dict[int, tuple[_Load, int]] = {}  # loads in flight by their numbers
        self._arriving: dict[bytes, _Load] = {}  # key -> its load
        self._number = self._num_plans = 0  # the last transfer's; plans in flight
        self._planned = self._committed = 0  # last steps
        self._num_losses = 0  # losses in a row, with transfers in flight
        self._figures = {
            f"tier_{name}": 0.0
            for name in ("hit_tokens", "loaded_blocks", "stored_blocks", "loaded_bytes", "stored_bytes", "damaged")
        } | {"tier_saved_seconds": 0.0}

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        self._kv_cache, self._pool, self._size = kv_cache, kv_cache.pool, kv_cache.block_size
        self._keys = keys = TierKeys(self._tier, len(kv_cache.caches))
        self._hits = TierHits(kv_cache, self.index, keys)
        self._stores = Stores(kv_cache, self.index, keys, self._least_tokens, self._clock)
        kv_cache.on_cached, kv_cache.on_evicted = self._stores.on_cached, self._stores.on_evicted

    def stats(self) -> dict[str, float]:
        """Counters, but for `tier_loads_in_flight` and the region's bytes. Bytes are all ranks'."""
        region = self.index.figures()
        sizes = {"tier_used_bytes": region.used_bytes, "tier_size_bytes": region.total_bytes}
        return {**self._figures, **sizes, "tier_loads_in_flight": len(self._transfers)}

    @property
    def is_on(self) -> bool:
        """False once the runners were lost again and again with transfers in flight."""
        return self._num_losses < _MAX_LOSSES

    # ---- a request --------------------------------------------------------------------------------------------------

    def next_status(self, state: RequestState, hits: list[list[int]], num_slots: int) -> RequestStatus:
        if len(self._loading) >= num_slots:
            return RequestStatus.WAITING
        if (load := self._load_for(state, len(hits[0]))) is None:
            return RequestStatus.RUNNING
        load.waiting.append(state)
        self._loading[state] = load
        return RequestStatus.LOADING

    def _load_for(self, state: RequestState, num_cached: int) -> _Load | None:
        """Return the load that a request should wait for, perhaps a new one. It has `num_cached` blocks without it."""
        is_tried = state in self._has_loaded or self._losses[state] >= _MAX_OWN_LOSSES
        if is_tried or not state.reads_cache or not self.is_on:
            return None
        if (len(self._kv_cache.prefix_hashes(state)) - num_cached) * self._size < self._least_tokens:
            return None
        hit = self._hits.longest(state)
        num_tokens = (len(hit.hashes) - num_cached) * self._size
        num_bytes = hit.num_transfers * self._tier.slot_bytes
        if num_tokens < self._least_tokens or not num_bytes or not self.costs.is_worth(num_bytes, num_tokens):
            return None
        keys = chain((key for *_, key in hit.missing), hit.state_keys)
        load = next((self._arriving[key] for key in keys if key in self._arriving), None)
        if load is None and (load := self._begin(hit, num_cached)) is not None:
            self._has_loaded.add(state)
        return load

    def held(self) -> Set[RequestState]:
        return self._loading.keys()

    def on_queue(self, state: RequestState) -> None:
        self._stores.leave(state, self._planned)

    def on_dequeue(self, state: RequestState) -> None:
        self._has_loaded.discard(state)
        if (load := self._loading.pop(state, None)) is not None:  # it ends
            load.waiting.remove(state)
            if not load.waiting:
                self._cut(load)

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._losses.pop(state, None)
        self._stores.leave(state, self._planned)
        self._stores.touch(state, self._planned)
        if reason is FinishReason.ERROR and (hashes := state.block_hashes):
            # Values of its prefix may not be finite.
            keys = [self._keys.block_keys(hashes, group) for group in range(len(self._kv_cache.caches))]
            if self._tier.state_slots:
                keys.append(self._keys.first_part_keys(hashes))
            self._stores.drop(b"".join(keys))
            for load in self._live:
                load.is_void |= not set(load.hit.hashes).isdisjoint(hashes)

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        if self._transfers or self._stores.num_in_flight:
            self._num_losses += 1
            if not self.is_on:
                logger.warning("KV tier: off, as the runners were lost %d times while copying.", _MAX_LOSSES)
        self._losses.update(self._loading.keys())
        for load in self._live:
            self._let_go(load)
        self._stores.forget(is_lost=True)
        for each in (self._has_loaded, self._live, self._unplanned, self._transfers, self._arriving):
            each.clear()
        self._num_plans, self._committed = 0, self._planned
        return None

    def on_weights(self) -> None:
        self._stores.forget(is_lost=False)
        self._has_loaded.clear()
        for load in list(self._live):
            load.is_void = True
            self._let_go(load)
            self._cut(load)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def needs_plan(self) -> bool:
        has_stores = self._stores.has_due(self._committed) and self._stores.num_in_flight < self._most_in_flight
        in_flight = self._transfers or self._stores.num_in_flight
        return bool(self._unplanned) or (self.is_on and has_stores) or (bool(in_flight) and not self._num_plans)

    def on_plan(self, step: Step) -> None:
        self._num_plans += 1
        self._planned = step.step_id
        self._stores.on_plan(step.step_id)
        limits, decodes = self._limits, step.num_decoding > 0
        if self._unplanned:
            step.plan.loads = self._next_loads(self._count_in(limits.loads_beside if decodes else limits.loads))
        if self.is_on:
            is_short = decodes and step.num_prompt_tokens < _FEW_TOKENS
            most = self._count_in(limits.stores_beside if is_short else limits.stores)
            most = min(most, self._most_in_flight - self._stores.num_in_flight, _STORES_BESIDE if is_short else most)
            step.plan.stores = self._stores.take(self._committed, most, self._next_number)

    def on_result(self, step: Step, result: StepResult) -> None:
        self._num_plans -= 1
        self._committed = step.step_id
        if not (len(result.stored) or len(result.loaded) or len(result.damaged)):
            return
        num_bytes, figures, self._num_losses = self._tier.slot_bytes * self._tier.num_ranks, self._figures, 0
        for number in result.stored.tolist():
            if self._stores.end(number):
                figures["tier_stored_blocks"] += 1
                figures["tier_stored_bytes"] += num_bytes
        figures["tier_loaded_blocks"] += len(result.loaded)
        figures["tier_loaded_bytes"] += len(result.loaded) * num_bytes
        figures["tier_damaged"] += len(result.damaged)
        for numbers, is_damaged in ((result.loaded, False), (result.damaged, True)):
            for number in numbers.tolist():
                self._end(number, is_damaged)

    @property
    def _most_in_flight(self) -> int:
        return self._count_in(self._limits.stores_in_flight)

    def _count_in(self, num_bytes: int) -> int:
        """Return the transfers that have this size together."""
        return max(1, num_bytes // self._tier.slot_bytes)

    def _next_number(self) -> int:
        self._number = (self._number + 1) & _MAX_NUMBER
        return self._number

    # ---- loads ------------------------------------------------------------------------------------------------------

    def _begin(self, hit: Hit, num_cached: int) -> _Load | None:
        """Allocate blocks for a hit, and hold the cached ones. Return None if the pool is too small."""
        pool, kv_cache, tables = self._pool, self._kv_cache, [list(table) for table in hit.tables]
        held = [held_blocks(table) for table in tables]
        if len(hit.missing) > pool.num_available - pool.num_unheld(block for blocks in held for block in blocks):
            return None
        snapshot = None
        if hit.needs_state:
            assert isinstance(kv_cache, StateCacheManager)
            if (snapshot := kv_cache.begin_load(len(hit.hashes) * self._size, held[0])) is None:
                return None
        for blocks in held:
            pool.acquire(blocks)
            kv_cache.lent.update(blocks)
        new = pool.allocate(len(hit.missing))
        kv_cache.lent.update(new)
        transfers = list[_Transfer]()
        for (group, index, key), block in zip(hit.missing, new, strict=True):
            tables[group][index] = block
            transfers.append(_Transfer(group, block, 0, index, key))
        if snapshot is not None:
            last = len(hit.hashes) - 1
            transfers += [_Transfer(STATE, snapshot.row, part, last, key) for part, key in enumerate(hit.state_keys)]
        load = _Load(hit, tables, snapshot, num_cached, self._clock(), transfers)
        self._live.append(load)
        self._unplanned.append(load)
        self._arriving |= {transfer.key: load for transfer in transfers}
        return load

    def _next_loads(self, most: int) -> Transfers:
        """Return the next loads for a plan, the oldest request's first."""
        numbers, taken = list[int](), list[_Transfer]()
        while self._unplanned and len(taken) < most:
            load = self._unplanned[0]
            new = load.transfers[load.num_planned : load.num_planned + most - len(taken)]
            for at in range(load.num_planned, load.num_planned + len(new)):
                number = self._next_number()
                self._transfers[number] = load, at
                numbers.append(number)
            taken += new
            load.num_planned += len(new)
            if load.num_planned == len(load.transfers):
                self._unplanned.popleft()
        groups, blocks, parts, _, keys = zip(*taken, strict=True)
        self.index.touch(b"".join(keys))
        return transfers_of(numbers, groups, blocks, parts, keys)

    def _end(self, number: int, is_damaged: bool) -> None:
        """The transfer of a load has ended."""
        if (found := self._transfers.pop(number, None)) is None:
            return
        load, at = found
        load.num_ended += 1
        if is_damaged:
            self.index.drop(load.transfers[at].key)
            load.num_usable = min(load.num_usable, load.transfers[at].at)
        self._end_if_done(load)

    def _cut(self, load: _Load) -> None:
        """No request waits for a load: what no plan has yet is left out."""
        if rest := load.transfers[load.num_planned :]:
            self._unplanned.remove(load)
            del load.transfers[load.num_planned :]
            load.num_usable = min(load.num_usable, *(transfer.at for transfer in rest))
            for transfer in rest:
                self._forget(transfer.key, load)
            self._end_if_done(load)

    def _end_if_done(self, load: _Load) -> None:
        """Cache and release the usable blocks after the last transfer, and wake the requests."""
        if load.num_ended < len(load.transfers):
            return
        self._live.remove(load)
        for transfer in load.transfers:
            self._forget(transfer.key, load)
        kv_cache, hashes, end = self._kv_cache, load.hit.hashes, 0 if load.is_void else load.num_usable
        kv_cache.lent.subtract(block for table in load.tables for block in held_blocks(table))
        kv_cache.lent = +kv_cache.lent
        for group, table in enumerate(load.tables):
            first = min((transfer.at for transfer in load.transfers if transfer.group == group), default=end)
            if first < end:
                kv_cache.cache_blocks(group, table, first, hashes[first:end])
        if load.snapshot is not None:
            assert isinstance(kv_cache, StateCacheManager)
            is_whole = end == len(hashes)
            kv_cache.end_load(load.snapshot, load.tables[0][-1] if is_whole else None)
            end = end if is_whole else 0
        for table in load.tables:
            self._pool.release(held_blocks(table))
        if (num_tokens := (end - load.num_cached) * self._size) > 0:
            self.costs.observe(len(load.transfers) * self._tier.slot_bytes, load.begun_at)
            self._figures["tier_hit_tokens"] += num_tokens
            self._figures["tier_saved_seconds"] += max(0.0, self.costs.seconds_saved(num_tokens, load.begun_at))
        self._let_go(load)

    def _let_go(self, load: _Load) -> None:
        """The requests that wait for a load may be admitted."""
        for state in load.waiting:
            del self._loading[state]
            state.status = RequestStatus.WAITING
        load.waiting.clear()

    def _forget(self, key: bytes, load: _Load) -> None:
        if self._arriving.get(key) is load:
            del self._arriving[key]
