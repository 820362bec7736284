"""GpuCopier: transfers on streams of their own, while steps run.

    store   compute stream   blocks -> staging        in the order of plans, so a later plan may change the blocks
            lane's stream    staging -> slots, sums   the slots are committed when a result finds that this has ended
    load    lane's stream    slots -> staging, sums, staging -> blocks, after the earlier plans on the compute stream

A lane is a stream with its own staging memory. Two lanes take turns in each direction, so that one copies while the
other's kernels run. Threads copy slots that are not pinned yet, through a pinned buffer of the lane (a bounce).

Without a GPU, under Triton's interpreter, streams do nothing, and all ends at once."""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.model_info import TierInfo
from runtime.kernels.tier.block_runs import gather_runs_triton, scatter_runs_triton
from runtime.kernels.tier.slot_sums import slot_sums_triton
from runtime.tier.copies import Batch, TierCopier
from runtime.tier.pinning import Pinned
from runtime.tier.region import Region
from runtime.tier.sums import key_sums
from runtime.worker.cuda_driver import call

_LANES = 2  # lanes for stores, and as many for loads
_COPIERS = 4  # threads that copy through bounces


class _Job:
    """A batch on its way, and pinned memory for its arguments and results."""

    batch: Batch
    work: Future[None] | None  # a thread's part; None without one

    def __init__(self, most: int, on_gpu: bool) -> None:
        self._host = torch.zeros(4 * most, dtype=torch.int64, pin_memory=on_gpu)
        self.done = torch.cuda.Event() if on_gpu else None  # recorded after its last copy

    def arguments(self, rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Up to three rows of integers [n] on the device."""
        host = self._host[: rows.size].view(rows.shape)
        host.numpy()[:] = rows
        return host.to(device, non_blocking=True)

    @property
    def results(self) -> torch.Tensor:
        """Memory for one result of each transfer, [n] int64."""
        return self._host[-len(self.batch.numbers) :]

    @property
    def has_ended(self) -> bool:
        """True if a thread and the device have ended their copies."""
        return (self.work is None or self.work.done()) and (self.done is None or self.done.query())

    def wait(self) -> None:
        """Wait until it has ended."""
        if self.work is not None:
            self.work.exception()
        if self.done is not None:
            self.done.synchronize()


class _Lane:
    """A stream with staging memory, and its copies in flight."""

    def __init__(self, device: torch.device, num_slots: int, slot_words: int, bounces: bool) -> None:
        """With `bounces` it can copy slots that are not pinned."""
        self._on_gpu, shape = device.type == "cuda", (num_slots, slot_words)
        self.staging = torch.zeros(shape, dtype=torch.int64, device=device)
        self.stream: Any = torch.cuda.Stream(device) if self._on_gpu else None
        self.bounce = torch.zeros(shape, dtype=torch.int64, pin_memory=self._on_gpu) if bounces else None
        self.jobs: deque[_Job] = deque()  # first in, first ended
        self.free: deque[_Job] = deque()

    def job(self, batch: Batch) -> _Job:
        """A job for a batch. Ended jobs are used again once their results have been read."""
        job = self.free.pop() if self.free else _Job(len(self.staging), self._on_gpu)
        job.batch, job.work = batch, None
        return job

    def on(self) -> AbstractContextManager[Any]:
        """A context with kernels and copies on the lane's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Queue a copy between two addresses, on the device or pinned."""
        if self.stream is None:
            ctypes.memmove(to, source, num_bytes)
        else:
            addresses = ctypes.c_uint64(to), ctypes.c_uint64(source)
            call("cuMemcpyAsync", *addresses, ctypes.c_size_t(num_bytes), ctypes.c_void_p(self.stream.cuda_stream))

    def record(self, job: _Job) -> None:
        """The job's copies so far are all of the device's."""
        if job.done is not None:
            job.done.record(self.stream)


class GpuCopier(TierCopier):
    """Copies batches as large as a lane's staging."""

    def __init__(self, region: Region, info: TierInfo, rank: int, device: torch.device) -> None:
        super().__init__(region, info, rank)
        self._device = device
        self.pinned = Pinned(self.payload, device)

    def ready(self) -> None:
        self.pinned.begin()

    def _open(self, num_slots: int) -> None:
        bounces, self._most = not self.pinned.is_whole, max(1, num_slots // (2 * _LANES))
        make = (_Lane(self._device, self._most, self.info.slot_bytes // 8, bounces) for _ in range(2 * _LANES))
        self._lanes = list(make)
        self._store_lanes, self._load_lanes = cycle(self._lanes[:_LANES]), cycle(self._lanes[_LANES:])
        self._storer, self._loader = (ThreadPoolExecutor(1, f"tier-{name}") for name in ("stores", "loads"))
        self._copiers = ThreadPoolExecutor(_COPIERS, "tier-copies")
        self._last_load: Future[None] | None = None  # the last load in a thread
        self._build_kernels()

    @torch.inference_mode()
    def _build_kernels(self) -> None:
        """Copy a block of each layout to a slot and back."""
        start = torch.zeros(1, dtype=torch.int64, device=self._device)
        for runs in self._runs.values():
            first, slots = 0, self._lanes[0].staging[:1]
            for own in runs:
                gather_runs_triton(own, start, slots, first)
                scatter_runs_triton(own, start, slots, first, start == 0)
                first += own.size
            slot_sums_triton(slots, first)

    def _compute(self) -> Any:
        """The stream of this thread's steps; None without a GPU."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    # ---- stores -----------------------------------------------------------------------------------------------------

    def _store(self, batch: Batch) -> None:
        compute = self._compute()
        for part in batch.cut(self._most):
            lane, size = next(self._store_lanes), part.size
            job, slots = lane.job(part), lane.staging[: len(part.numbers)]
            unpinned = part.slots >= self.pinned.num_slots
            if unpinned.any():
                for earlier in list(lane.jobs):
                    earlier.wait()  # a thread may still read the bounce
            if compute is not None:
                compute.wait_stream(lane.stream)  # the staging is free
            first = 0
            for runs, starts in zip(part.runs, job.arguments(part.starts, self._device), strict=True):
                gather_runs_triton(runs, starts, slots, first)
                first += runs.size
            if compute is not None:
                lane.stream.wait_stream(compute)
            with lane.on():
                job.results.copy_(slot_sums_triton(slots, size), non_blocking=True)
                self._copy_slots(lane, part, unpinned, is_store=True)
            lane.record(job)
            if unpinned.any():
                job.work = self._storer.submit(self._copy_out, lane, job, unpinned)
            lane.jobs.append(job)

    @torch.inference_mode()
    def _copy_out(self, lane: _Lane, job: _Job, unpinned: NDArray[np.bool_]) -> None:
        """Copy from the bounce to the slots, in a thread."""
        if job.done is not None:
            job.done.synchronize()
        self._bounce(lane, job.batch, unpinned, is_store=True)

    # ---- loads ------------------------------------------------------------------------------------------------------

    def _load(self, batch: Batch) -> None:
        compute = self._compute()
        earlier_plans = None if compute is None else compute.record_event()
        for part in batch.cut(self._most):
            lane = next(self._load_lanes)
            job = lane.job(part)
            # The lanes belong to the thread until its last load has begun.
            if self.pinned.is_whole and (self._last_load is None or self._last_load.done()):
                self._copy_in(lane, job, part.slots < 0, earlier_plans)
            else:
                unpinned = part.slots >= self.pinned.num_slots
                job.work = self._last_load = self._loader.submit(self._copy_in, lane, job, unpinned, earlier_plans)
            lane.jobs.append(job)

    @torch.inference_mode()
    def _copy_in(self, lane: _Lane, job: _Job, unpinned: NDArray[np.bool_], earlier_plans: Any) -> None:
        """Queue a load's copies. A thread first fills the bounce."""
        batch, size, slots = job.batch, job.batch.size, lane.staging[: len(job.batch.numbers)]
        expected = self.region.sums(self.rank, batch.slots) ^ key_sums(batch.keys)
        if unpinned.any():
            if lane.stream is not None:
                lane.stream.synchronize()  # the bounce is free
            self._bounce(lane, batch, unpinned, is_store=False)
        with lane.on():
            if lane.stream is not None:
                lane.stream.wait_event(earlier_plans)
            arguments = np.concatenate((batch.starts, expected.view(np.int64)[None]))
            *starts, sums = job.arguments(arguments, self._device)
            self._copy_slots(lane, batch, unpinned, is_store=False)
            fits, first = slot_sums_triton(slots, size) == sums, 0
            for runs, own in zip(batch.runs, starts, strict=True):
                scatter_runs_triton(runs, own, slots, first, fits)
                first += runs.size
            job.results.copy_(fits.long(), non_blocking=True)
        lane.record(job)

    # ---- both -------------------------------------------------------------------------------------------------------

    def _copy_slots(self, lane: _Lane, batch: Batch, unpinned: NDArray[np.bool_], is_store: bool) -> None:
        """Queue copies between staging and the slots' pinned memory: their own, or rows of the bounce in their order.

        Slots lie in no order, so each takes a call of the driver; torch would take ten times as long. Neighbours in
        the bounce share one, with the rows' unused ends."""
        slot_bytes, num_bytes = self.info.slot_bytes, 8 * batch.size
        staging = lane.staging.data_ptr() + slot_bytes * np.arange(len(unpinned))
        pinned = self.payload.data_ptr() + slot_bytes * batch.slots
        if lane.bounce is not None:
            pinned[unpinned] = lane.bounce.data_ptr() + slot_bytes * np.arange(np.count_nonzero(unpinned))
        begins = np.flatnonzero(np.append(True, ~(unpinned[1:] & unpinned[:-1])))
        sizes = np.diff(begins, append=len(unpinned)) * slot_bytes - (slot_bytes - num_bytes)
        columns = (pinned, staging) if is_store else (staging, pinned)
        for to, source, size in zip(*(column[begins].tolist() for column in columns), sizes.tolist(), strict=True):
            lane.copy(to, source, size)

    def _bounce(self, lane: _Lane, batch: Batch, unpinned: NDArray[np.bool_], is_store: bool) -> None:
        """Copy between the bounce and slots, in several threads.

        A thread makes one call of numpy. With a call for each slot, it waits for the interpreter's lock each time."""
        assert lane.bounce is not None
        bounce, payload, slots, size = lane.bounce.numpy(), self.payload.numpy(), batch.slots[unpinned], batch.size

        def copy(rows: slice) -> None:
            if is_store:
                payload[slots[rows], :size] = bounce[rows, :size]
            else:
                np.take(payload, slots[rows], 0, bounce[rows], "clip")

        each = -(-len(slots) // _COPIERS)
        for _ in self._copiers.map(copy, [slice(at, min(at + each, len(slots))) for at in range(0, len(slots), each)]):
            pass

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for lane in self._lanes:
            while lane.jobs and lane.jobs[0].has_ended:
                self._finish(lane)

    def _finish(self, lane: _Lane) -> None:
        """The lane's first job has ended."""
        job = lane.jobs.popleft()
        batch, results = job.batch, job.results.numpy()
        if job.work is not None and (error := job.work.exception()) is not None:
            raise error
        is_store = lane in self._lanes[:_LANES]
        if is_store:
            sums = results.view(np.uint64) ^ key_sums(batch.keys)
            self.region.commit(self.rank, batch.slots, batch.keys, sums)
            are_loaded = [False] * len(results)
        else:
            are_loaded = ((results != 0) & self.region.has_keys(batch.slots, batch.keys)).tolist()
        for number, is_loaded in zip(batch.numbers, are_loaded, strict=True):
            self._end(number, is_store, is_loaded)
        lane.free.append(job)

    def _drain(self) -> None:
        for lane in self._lanes:
            while lane.jobs:
                lane.jobs[0].wait()
                self._finish(lane)

    def close(self) -> None:
        super().close()
        for thread in (self._storer, self._loader, self._copiers):
            thread.shutdown()
        self.pinned.close()
