"""TierCopier: a rank's copies between its cache and the tier's region. On a CPU they are done within their step.

The engine has reserved a slot for each key that is stored. A load finds the slot by its key. After the copy it checks
the sum, and the slot's key again. So another process may take the slot meanwhile: the load is then damaged."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.model_info import ModelInfo, TierInfo
from runtime.core.plan import StepPlan, StepResult, Transfers
from runtime.kernels.tier.block_runs import BlockRuns, gather_runs_torch, scatter_runs_torch
from runtime.tier.acks import Acks
from runtime.tier.region import Region
from runtime.tier.sums import payload_sums
from runtime.worker.kv_cache import KVCache

_WAIT_S, _NAP_S = 2e-3, 5e-5  # a result without tokens waits for a transfer; between two looks
_STATE, _STATE_END = -1, -2  # layouts of a state's parts: all but the last, and the last


@dataclass(slots=True)
class Batch:
    """Transfers with one layout: one group's blocks, or equally long parts of states."""

    numbers: list[int]
    keys: bytes
    slots: NDArray[np.int64]  # [n]
    runs: list[BlockRuns]
    starts: NDArray[np.int64]  # [len(runs), n] each block's first word in the memory of its runs

    @property
    def size(self) -> int:
        """Words in a slot."""
        return sum(run.size for run in self.runs)

    def cut(self, most: int) -> Iterator[Batch]:
        """Batches of at most `most` transfers."""
        for at in range(0, len(self.numbers), most):
            to = at + most
            yield Batch(
                self.numbers[at:to], self.keys[16 * at : 16 * to], self.slots[at:to], self.runs, self.starts[:, at:to]
            )


class TierCopier(ABC):
    """A BlockCopier for one rank (worker/extras.py)."""

    def __init__(self, region: Region, info: TierInfo, rank: int) -> None:
        self.region, self.info, self.rank = region, info, rank
        self.payload = torch.from_numpy(region.payload(rank)).view(torch.int64)  # [num_slots, slot_words]
        self._acks: Acks | None = None  # None for one rank
        self._stored: deque[int] = deque()  # ended and not reported
        self._loaded: deque[tuple[int, bool]] = deque()  # this rank's ended loads, and whether it has loaded them
        # Two counts, since one thread starts transfers and perhaps another reports them
        self._num_started = self._num_reported = 0

    def describe(self, info: ModelInfo) -> ModelInfo:
        return replace(info, tier=self.info)

    def ready(self) -> None:  # noqa: B027
        """There is nothing to begin on a CPU."""

    def open(self, cache: KVCache, staging_bytes: int, handles: Sequence[bytes], barrier: Callable[[], None]) -> None:
        if len(handles) > 1:
            self._acks = Acks(Path(self.info.folder), self.rank, handles, barrier)
        words = self.info.slot_bytes // 8
        self._runs = {group: cache.runs(group) for group in range(len(cache.spec.groups))}
        if cache.states is not None:
            last = self.info.state_slots - 1
            self._runs |= {_STATE: [cache.states.runs(0, words)], _STATE_END: [cache.states.runs(last, words)]}
        self._open(staging_bytes // self.info.slot_bytes)

    def start(self, plan: StepPlan) -> None:
        if plan.stores is not None:
            self._begin(plan.stores, is_store=True)
        if plan.loads is not None:
            self._begin(plan.loads, is_store=False)

    def _begin(self, transfers: Transfers, is_store: bool) -> None:
        self._num_started += len(transfers.numbers)
        slots = self.region.slots_of(transfers.keys, ready=not is_store)
        for number in transfers.numbers[slots < 0].tolist():
            self._end(number, is_store, False)
        for batch in self._batches(transfers, slots):
            if is_store:
                self._store(batch)
            else:
                self._load(batch)

    def _batches(self, transfers: Transfers, slots: NDArray[np.int64]) -> Iterator[Batch]:
        layouts = np.where(transfers.parts == self.info.state_slots - 1, _STATE_END, _STATE)
        layouts = np.where(transfers.groups < 0, layouts, transfers.groups)
        keys = np.frombuffer(transfers.keys, "V16")
        for layout in np.unique(layouts[slots >= 0]).tolist():
            own = np.flatnonzero((layouts == layout) & (slots >= 0))
            blocks, runs = transfers.blocks[own].astype(np.int64), self._runs[layout]
            starts = np.stack([blocks * run.block for run in runs])
            if layout < 0:
                starts += transfers.parts[own].astype(np.int64) * (self.info.slot_bytes // 8)
            yield Batch(transfers.numbers[own].tolist(), keys[own].tobytes(), slots[own], runs, starts)

    def _end(self, number: int, is_store: bool, is_loaded: bool) -> None:
        """A transfer of this rank has ended."""
        if is_store:
            self._stored.append(number)
            return
        if self._acks is not None:
            self._acks.write(number, is_loaded)
        self._loaded.append((number, is_loaded))

    def report(self, result: StepResult, wait: bool) -> None:
        end = time.monotonic() + _WAIT_S if wait else 0.0
        while self._num_started > self._num_reported:
            self._poll()
            stored = [self._stored.popleft() for _ in range(len(self._stored))]
            loads = self._ended_loads()
            if stored or loads or time.monotonic() >= end:
                break
            time.sleep(_NAP_S)
        else:
            return
        self._num_reported += len(stored) + len(loads)
        result.stored = np.array(stored, np.int32)
        result.loaded, result.damaged = (
            np.array([number for number, is_loaded in loads if is_loaded == wanted], np.int32)
            for wanted in (True, False)
        )

    def _ended_loads(self) -> list[tuple[int, bool]]:
        """The loads that all ranks have ended, in this rank's order, and whether all have loaded them. Only rank 0's
        results are read, so other ranks do not wait."""
        found: list[tuple[int, bool]] = []
        while self._loaded:
            number, is_loaded = self._loaded[0]
            if self._acks is not None and self.rank == 0:
                outcome = self._acks.outcome(number)
                if outcome is None:
                    break
                is_loaded = outcome
            found.append((number, is_loaded))
            self._loaded.popleft()
        return found

    def reset(self) -> None:
        self._drain()
        self._stored.clear()
        self._loaded.clear()
        self._num_started = self._num_reported = 0
        if self._acks is not None:
            self._acks.clear()

    def close(self) -> None:
        """Leave the region."""
        self.reset()
        self.region.close()

    @abstractmethod
    def _open(self, num_slots: int) -> None:
        """Prepare for copies, with staging for up to `num_slots`."""

    @abstractmethod
    def _store(self, batch: Batch) -> None:
        """Begin to copy blocks to their slots, as earlier plans leave them."""

    @abstractmethod
    def _load(self, batch: Batch) -> None:
        """Begin to copy slots to blocks that earlier plans may still read."""

    @abstractmethod
    def _poll(self) -> None:
        """End the transfers with ended copies."""

    @abstractmethod
    def _drain(self) -> None:
        """Wait until all copies have ended."""


class CpuCopier(TierCopier):
    """Copies block by block, so that a block's bytes are in the processor's cache when they are added up."""

    def _open(self, num_slots: int) -> None:
        self._staging = torch.zeros((1, self.info.slot_bytes // 8), dtype=torch.int64)

    def _store(self, batch: Batch) -> None:
        sums = np.zeros(len(batch.numbers), np.uint64)
        for at, one in enumerate(batch.cut(1)):
            slot, first = self.payload[int(one.slots[0])].unsqueeze(0), 0
            for runs, starts in zip(one.runs, torch.from_numpy(one.starts), strict=True):
                gather_runs_torch(runs, starts, slot, first)
                first += runs.size
            sums[at] = payload_sums(slot[:, :first].numpy().view(np.uint8), one.keys)[0]
        self.region.commit(self.rank, batch.slots, batch.keys, sums)
        for number in batch.numbers:
            self._end(number, True, False)

    def _load(self, batch: Batch) -> None:
        for one in batch.cut(1):
            expected, size = self.region.sums(self.rank, one.slots), one.size
            found = self._staging[:, :size].numpy()
            np.copyto(found, self.payload[int(one.slots[0]), :size].numpy())
            fits = payload_sums(found.view(np.uint8), one.keys) == expected
            fits &= self.region.has_keys(one.slots, one.keys)
            first = 0
            for runs, starts in zip(one.runs, torch.from_numpy(one.starts), strict=True):
                scatter_runs_torch(runs, starts, self._staging, first, torch.from_numpy(fits))
                first += runs.size
            self._end(one.numbers[0], False, bool(fits[0]))

    def _poll(self) -> None:
        pass

    def _drain(self) -> None:
        pass
