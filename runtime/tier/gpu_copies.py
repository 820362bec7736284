"""GpuCopier: transfers on streams of their own, while steps run.

    store   compute stream   blocks -> staging        in the order of plans, so a later plan may change the blocks
            lane's stream    staging -> slots, sums   the slots are committed when a result finds that this has ended
    load    lane's stream    slots -> staging, sums, staging -> blocks, after the earlier plans on the compute stream

A lane is a stream with its own staging memory. Two lanes take turns in each direction, so that one copies while the
other's kernels run. Slots that are not pinned yet pass through a pinned buffer of the lane (a bounce). A thread of the
lane has others fill or empty the bounce. One kernel copies all small slots of a part.

Without a GPU, under Triton's interpreter, streams do nothing, and all ends at once."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.model_info import TierInfo
from runtime.kernels.tier.block_runs import gather_runs_triton, scatter_runs_triton
from runtime.kernels.tier.slot_copies import copy_slots_torch, copy_slots_triton
from runtime.kernels.tier.slot_sums import slot_sums_triton
from runtime.tier.copies import Batch, TierCopier
from runtime.tier.pinning import Pinned
from runtime.tier.region import Region
from runtime.tier.sums import key_sums
from runtime.worker.cpu.cores import available_cores
from runtime.worker.cuda_driver import call

_LANES = 2  # lanes for stores, and as many for loads
_MOST_COPIERS = 8  # threads that copy through bounces
# Smaller slots are copied by one kernel, larger ones one by one by the copy engine. Rows decode during most stores, and
# a kernel would take multiprocessors from them.
_LOAD_KERNEL_BYTES, _STORE_KERNEL_BYTES = 512 << 10, 64 << 10
_JOBS = 32  # jobs that a lane makes at a time
_interpreter = threading.Lock()  # Triton's interpreter runs one kernel at a time


class _Job:
    """A batch on its way, and pinned memory for its arguments and results."""

    batch: Batch
    work: Future[None] | None  # a thread's part; None without one

    def __init__(self, host: torch.Tensor, on_gpu: bool) -> None:
        """`host` has five words for each transfer."""
        self._host = host
        self.done = torch.cuda.Event() if on_gpu else None  # recorded after its last copy

    def arguments(self, rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Up to four rows of integers [n] on the device."""
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
    """A stream with staging memory, a thread for unpinned slots, and its copies in flight."""

    def __init__(self, device: torch.device, num_slots: int, slot_words: int, bounces: bool) -> None:
        """With `bounces` it can copy slots that are not pinned."""
        self._on_gpu, shape = device.type == "cuda", (num_slots, slot_words)
        self.staging = torch.zeros(shape, dtype=torch.int64, device=device)
        self.stream: Any = torch.cuda.Stream(device) if self._on_gpu else None
        self.bounce = torch.zeros(shape, dtype=torch.int64, pin_memory=self._on_gpu) if bounces else None
        self.copied: Any = torch.cuda.Event() if self._on_gpu else None  # after the last copy from the bounce
        self.thread = ThreadPoolExecutor(1, "tier-lane")
        self.work: Future[None] | None = None  # the last job's in the thread
        self.jobs: deque[_Job] = deque()  # first in, first ended
        self.free: deque[_Job] = deque()
        self._make_jobs()

    def _make_jobs(self) -> None:
        """Make jobs in one piece of memory: to pin some takes the driver's lock."""
        hosts = torch.zeros((_JOBS, 5 * len(self.staging)), dtype=torch.int64, pin_memory=self._on_gpu)
        self.free.extend(_Job(host, self._on_gpu) for host in hosts)

    def job(self, batch: Batch) -> _Job:
        """A job for a batch. Ended jobs are used again once their results have been read."""
        if not self.free:
            self._make_jobs()
        job = self.free.pop()
        job.batch, job.work = batch, None
        return job

    @property
    def is_working(self) -> bool:
        """True while the thread has jobs. The stream and the bounce then belong to it."""
        return self.work is not None and not self.work.done()

    def submit(self, job: _Job, work: Callable[..., None], *arguments: object) -> None:
        """Run a part of the job in the thread."""
        job.work = self.work = self.thread.submit(work, self, job, *arguments)

    def on(self) -> AbstractContextManager[Any]:
        """A context with kernels and copies on the lane's stream."""
        return _interpreter if self.stream is None else torch.cuda.stream(self.stream)

    def record(self, job: _Job) -> None:
        """The job's copies so far are all of the device's."""
        if job.done is not None:
            job.done.record(self.stream)


class GpuCopier(TierCopier):
    """Copies batches as large as a lane's staging."""

    def __init__(self, region: Region, info: TierInfo, rank: int, device: torch.device) -> None:
        super().__init__(region, info, rank)
        self._device, self._lanes = device, list[_Lane]()
        self._num_copiers = min(_MOST_COPIERS, available_cores())
        self._copiers = ThreadPoolExecutor(self._num_copiers, "tier-copies")
        self.pinned = Pinned(self.payload, device, region.num_backed)

    def ready(self) -> None:
        self.pinned.finish()

    def _open(self, num_slots: int) -> None:
        bounces, self._most = not self.pinned.is_whole, max(1, num_slots // (2 * _LANES))
        make = (_Lane(self._device, self._most, self.info.slot_bytes // 8, bounces) for _ in range(2 * _LANES))
        self._lanes = list(make)
        self._store_lanes, self._load_lanes = cycle(self._lanes[:_LANES]), cycle(self._lanes[_LANES:])
        self._build_kernels()

    @torch.inference_mode()
    def _build_kernels(self) -> None:
        """Copy a block of each layout to a slot, from there to the host, and back."""
        start, lane = torch.zeros(1, dtype=torch.int64, device=self._device), self._lanes[0]
        host = torch.zeros(lane.staging.shape[1], dtype=torch.int64, pin_memory=self._device.type == "cuda")
        address = torch.full((1,), host.data_ptr(), device=self._device)
        for runs in self._runs.values():
            first, slots = 0, lane.staging[:1]
            for own in runs:
                gather_runs_triton(own, start, slots, first)
                first += own.size
            for to_host in (True, False):
                if self._uses_kernel(first, to_host):
                    copy_slots_triton(slots, address, first, to_host)
            slot_sums_triton(slots, first)
            first = 0
            for own in runs:
                scatter_runs_triton(own, start, slots, first, start == 0)
                first += own.size
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # `host` ends here

    def _compute(self) -> Any:
        """The stream of this thread's steps; None without a GPU."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _places(self, lane: _Lane, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each slot's pinned memory, and the slots that are not pinned. These have the bounce's first rows."""
        is_bounced = slots >= self.pinned.num_slots
        unpinned, places = slots[is_bounced], self.payload.data_ptr() + slots * self.info.slot_bytes
        if len(unpinned):
            assert lane.bounce is not None
            places[is_bounced] = lane.bounce.data_ptr() + np.arange(len(unpinned)) * self.info.slot_bytes
        return places, unpinned

    @staticmethod
    def _uses_kernel(size: int, to_host: bool) -> bool:
        """Return True if one kernel copies slots with `size` words, and not the copy engine."""
        return 8 * size < (_STORE_KERNEL_BYTES if to_host else _LOAD_KERNEL_BYTES)

    def _copy(self, lane: _Lane, places: NDArray[np.int64], on_device: torch.Tensor, size: int, to_host: bool) -> None:
        """Copy between staging and host memory, on the lane's stream. `on_device` has the places, too."""
        slots = lane.staging[: len(places)]
        if self._uses_kernel(size, to_host) and self.pinned.is_mapped:
            copy_slots_triton(slots, on_device, size, to_host)
        elif lane.stream is None:
            copy_slots_torch(slots, on_device, size, to_host)
        else:
            stream, num_bytes = ctypes.c_void_p(lane.stream.cuda_stream), ctypes.c_size_t(8 * size)
            for i, host in enumerate(places.tolist()):
                pair = slots.data_ptr() + i * self.info.slot_bytes, host
                target, source = map(ctypes.c_uint64, pair[::-1] if to_host else pair)
                call("cuMemcpyAsync", target, source, num_bytes, stream)

    # ---- stores -----------------------------------------------------------------------------------------------------

    def _store(self, batch: Batch) -> None:
        compute = self._compute()
        for part in batch.cut(self._most):
            lane, size = next(self._store_lanes), part.size
            job, slots = lane.job(part), lane.staging[: len(part.numbers)]
            places, unpinned = self._places(lane, part.slots)
            self.pinned.note_copy(is_load=False, is_bounced=len(unpinned) > 0)
            if len(unpinned) and lane.work is not None:
                lane.work.exception()  # the thread may still read the bounce
            with lane.on():
                *starts, on_device = job.arguments(np.concatenate((part.starts, places[None])), self._device)
            if compute is not None:
                compute.wait_stream(lane.stream)  # the staging is free
            first = 0
            for runs, own in zip(part.runs, starts, strict=True):
                gather_runs_triton(runs, own, slots, first)
                first += runs.size
            if compute is not None:
                lane.stream.wait_stream(compute)
            with lane.on():
                job.results.copy_(slot_sums_triton(slots, size), non_blocking=True)
                self._copy(lane, places, on_device, size, to_host=True)
            lane.record(job)
            if len(unpinned):
                lane.submit(job, self._copy_out, unpinned)
            lane.jobs.append(job)

    @torch.inference_mode()
    def _copy_out(self, lane: _Lane, job: _Job, unpinned: NDArray[np.int64]) -> None:
        """Copy from the bounce to the slots, in a thread."""
        if job.done is not None:
            job.done.synchronize()
        self._bounce(lane, unpinned, job.batch.size, is_store=True)

    # ---- loads ------------------------------------------------------------------------------------------------------

    def _load(self, batch: Batch) -> None:
        compute = self._compute()
        earlier_plans = None if compute is None else compute.record_event()
        for part in batch.cut(self._most):
            lane = next(self._load_lanes)
            job = lane.job(part)
            is_pinned = bool(part.slots.max() < self.pinned.num_slots)
            self.pinned.note_copy(is_load=True, is_bounced=not is_pinned)
            if is_pinned and not lane.is_working:
                self._copy_in(lane, job, earlier_plans)
            else:
                lane.submit(job, self._copy_in, earlier_plans)
            lane.jobs.append(job)

    @torch.inference_mode()
    def _copy_in(self, lane: _Lane, job: _Job, earlier_plans: Any) -> None:
        """Queue a load's copies. A lane's thread first fills the bounce, while the other lane's goes to the device."""
        batch, size, slots = job.batch, job.batch.size, lane.staging[: len(job.batch.numbers)]
        expected = self.region.sums(self.rank, batch.slots) ^ key_sums(batch.keys)
        places, unpinned = self._places(lane, batch.slots)
        if len(unpinned):
            if lane.copied is not None:
                lane.copied.synchronize()  # the bounce is free
            self._bounce(lane, unpinned, size, is_store=False)
        with lane.on():
            arguments = np.concatenate((batch.starts, expected.view(np.int64)[None], places[None]))
            *starts, sums, on_device = job.arguments(arguments, self._device)
            self._copy(lane, places, on_device, size, to_host=False)
            if lane.stream is not None:
                lane.copied.record(lane.stream)
                lane.stream.wait_event(earlier_plans)
            fits, first = slot_sums_triton(slots, size) == sums, 0
            for runs, own in zip(batch.runs, starts, strict=True):
                scatter_runs_triton(runs, own, slots, first, fits)
                first += runs.size
            job.results.copy_(fits.long(), non_blocking=True)
        lane.record(job)

    def _bounce(self, lane: _Lane, unpinned: NDArray[np.int64], size: int, is_store: bool) -> None:
        """Copy between the bounce's first rows and slots, in several threads."""
        assert lane.bounce is not None
        rows, payload = lane.bounce[: len(unpinned)].numpy(), self.payload.numpy()
        cuts = pairwise(np.linspace(0, len(unpinned), self._num_copiers + 1).astype(int).tolist())
        shares = [(unpinned[begin:end], rows[begin:end]) for begin, end in cuts if begin < end]
        for _ in self._copiers.map(partial(_copy_share, payload, size, is_store), shares):
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
        if job.work is not None:
            job.work.result()
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
        for threads in (*(lane.thread for lane in self._lanes), self._copiers):
            threads.shutdown()
        self.pinned.close()


def _copy_share(
    payload: NDArray[np.int64], size: int, is_store: bool, share: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> None:
    """Copy slots to the bounce's rows, or with `is_store` back. Numpy copies them all without Python's lock."""
    slots, rows = share
    if is_store:
        payload[:, :size][slots] = rows[:, :size]
    else:
        np.take(payload, slots, 0, out=rows, mode="clip")  # other modes copy twice
