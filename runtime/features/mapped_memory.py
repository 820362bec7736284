"""Memory of a GPU that can be given back while tensors in it, and CUDA graphs that read them, keep their addresses.

Each segment that torch's allocator asks for is a range of addresses, reserved once, and memory of the driver that is
mapped there. To give the memory back is to unmap it; later, other memory is mapped at the same addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runtime.worker.cuda_driver import call, words_at
from runtime.worker.gpu.graph_runner import no_garbage_collection

_GRANULE = 2 << 20  # bytes that the driver maps at least
_ON_DEVICE, _PINNED, _READ_AND_WRITE = 1, 1, 3  # a kind of location, of memory, and of access

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(slots=True)
class _Segment:
    size: int  # bytes
    is_mapped: bool = True
    is_used: bool = True  # a tensor is in it
    host: torch.Tensor | None = None  # what it had when it was given back


class Segments:
    """The segments of one pool of torch's allocator, by their addresses."""

    def __init__(self, device_index: int) -> None:
        self._location = _Location(_ON_DEVICE, device_index)
        self.all: dict[int, _Segment] = {}

    def allocate(self, size: int, *_: object) -> int:
        """A new segment's address; 0, which torch reports as too little memory, if there is none."""
        size, address = -(-size // _GRANULE) * _GRANULE, ctypes.c_uint64()
        try:
            call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), *(ctypes.c_uint64(0),) * 3)
        except OSError:
            return 0
        try:
            self._map(address.value, size)
        except OSError:
            call("cuMemAddressFree", address, ctypes.c_size_t(size))
            return 0
        self.all[address.value] = _Segment(size)
        return address.value

    def free(self, address: int, *_: object) -> None:
        """Torch needs a segment no more."""
        segment = self.all.pop(address)
        if segment.is_mapped:
            call("cuCtxSynchronize")  # something may still be computed with it
            self.unmap(address, segment)
        call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(segment.size))

    def map(self, address: int, segment: _Segment) -> None:
        """Let a segment have memory again. Raises OSError if there is none."""
        self._map(address, segment.size)
        segment.is_mapped = True

    def unmap(self, address: int, segment: _Segment) -> None:
        """Give a segment's memory back."""
        call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(segment.size))
        segment.is_mapped = False

    def _map(self, address: int, size: int) -> None:
        handle, at, length = ctypes.c_uint64(), ctypes.c_uint64(address), ctypes.c_size_t(size)
        properties, access = _Properties(_PINNED, 0, self._location), _Access(self._location, _READ_AND_WRITE)
        call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), ctypes.c_uint64(0))
        try:
            call("cuMemMap", at, length, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            call("cuMemRelease", handle)  # the memory is there for as long as it is mapped
        try:
            call("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))
        except OSError:
            call("cuMemUnmap", at, length)  # else nothing could ever be mapped there again
            raise


class MappedMemory:
    """A pool of torch's allocator on a GPU, whose memory can be given back and taken again.

    One thread uses it at a time, and none while it is away."""

    def __init__(self, device: torch.device, keeps_content: bool) -> None:
        """With `keeps_content`, the host keeps, in pinned memory, what is in it when it is given back for the first
        time; it must not change any more. Without, what comes back has no meaning."""
        self._device, self._keeps_content = device, keeps_content
        self._segments = Segments(device.index or 0)
        callbacks = _ALLOCATE(self._segments.allocate), _FREE(self._segments.free)
        allocate, free = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in callbacks)
        allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pool = torch.cuda.MemPool(allocator)
        # Torch may call them after the last tensor is gone, and as late as in the end of the process.
        _keep_for_ever((callbacks, allocator))

    @contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates on the device meanwhile is in this memory; to be used once.

        Torch calls `Segments` with a lock held that freeing a tensor takes, too: garbage that another thread collects
        would keep Python's lock from them."""
        with no_garbage_collection(), torch.cuda.use_mem_pool(self._pool, self._device):
            yield
        torch.cuda.synchronize(self._device)
        for found in torch.cuda.memory_snapshot(self._pool.id):
            segment = self._segments.all.get(found["address"])
            if segment is not None and segment.is_used and not found["active_size"]:
                segment.is_used = False  # torch keeps it for a tensor that will not come
                self._segments.unmap(found["address"], segment)

    def for_graphs(self) -> tuple[int, int]:
        """The pool by which CUDA graphs have their memory here. No graph may outlive it: it never goes."""
        _keep_for_ever(self._pool)
        return self._pool.id

    def give_back(self) -> None:
        """Unmap it; nothing that is already away."""
        torch.cuda.synchronize(self._device)
        mapped = [(address, segment) for address, segment in self._segments.all.items() if segment.is_mapped]
        for address, segment in mapped:
            if self._keeps_content and segment.host is None:
                segment.host = torch.empty(segment.size // 4, dtype=torch.int32, pin_memory=True)
                segment.host.copy_(words_at(address, segment.size, self._device), non_blocking=True)
        torch.cuda.synchronize(self._device)
        for address, segment in mapped:
            self._segments.unmap(address, segment)

    def take_again(self) -> None:
        """Map what is away, and begin to copy its content; `torch.cuda.synchronize` waits for it. Raises OSError if
        there is not so much memory. The thread must have asked torch for something on the device before."""
        for address, segment in self._segments.all.items():
            if segment.is_used and not segment.is_mapped:
                self._segments.map(address, segment)
                if segment.host is not None:
                    words_at(address, segment.size, self._device).copy_(segment.host, non_blocking=True)


class RunnerMemory:
    """All that a runner gives back while it sleeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights = MappedMemory(device, keeps_content=True)
        self.graphs = MappedMemory(device, keeps_content=True)  # little: some kernels count in theirs
        self.cache = MappedMemory(device, keeps_content=False)

    def give_back(self) -> None:
        """Unmap what is not away."""
        for part in (self.weights, self.graphs, self.cache):
            part.give_back()
        torch.cuda.empty_cache()

    def take_again(self) -> None:
        """Map all; raises OSError if there is not so much memory, and then all is away as before."""
        torch.cuda.synchronize(self._device)
        try:
            for part in (self.weights, self.graphs, self.cache):
                part.take_again()
        except OSError:
            self.give_back()
            raise


def _keep_for_ever(x: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
