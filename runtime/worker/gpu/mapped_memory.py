"""RunnerMemory: GPU memory that sleep gives back while its tensors, and CUDA graphs, keep their addresses.

Each segment of torch's allocator is an address range, reserved once, with the driver's memory mapped there. Memory
that is given back is unmapped. Later, other memory is mapped at the same addresses.
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
_ON_DEVICE, _PINNED, _READ_AND_WRITE = 1, 1, 3  # kinds: location, memory, access

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
    host: torch.Tensor | None = None  # its content when it was given back
    is_stale: bool = True  # `host` lacks its content


class Segments:
    """The segments in one pool of torch's allocator, by address."""

    def __init__(self, device_index: int) -> None:
        self._location = _Location(_ON_DEVICE, device_index)
        self.all: dict[int, _Segment] = {}

    def allocate(self, size: int, *_: object) -> int:
        """A new segment's address; 0 on failure, which torch reports as too little memory."""
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
        """Torch does not need this segment any more."""
        segment = self.all.pop(address)
        if segment.is_mapped:
            call("cuCtxSynchronize")  # kernels may still use it
            self.unmap(address, segment)
        call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(segment.size))

    def map(self, address: int, segment: _Segment) -> None:
        """Map memory at a segment again. Raises OSError."""
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
            call("cuMemRelease", handle)  # the mapping keeps the memory
        try:
            call("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))
        except OSError:
            call("cuMemUnmap", at, length)  # else later mappings there would fail
            raise


class MappedMemory:
    """A pool of torch's allocator on a GPU. Its memory can be given back and taken again.

    One thread uses it at a time, and none while it is given back."""

    def __init__(self, device: torch.device, keeps_content: bool) -> None:
        """With `keeps_content`, the host copies the content to pinned memory when it is given back for the first time.
        After `content_changed` it does so again. Without `keeps_content`, the content is lost."""
        self._device, self._keeps_content = device, keeps_content
        self._segments = Segments(device.index or 0)
        callbacks = _ALLOCATE(self._segments.allocate), _FREE(self._segments.free)
        allocate, free = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in callbacks)
        allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pool = torch.cuda.MemPool(allocator)
        # Torch may call them until the process ends.
        _keep_for_ever((callbacks, allocator))

    @contextmanager
    def use(self) -> Iterator[None]:
        """A context in which this thread allocates on the device from this memory. Used once.

        Torch calls `Segments` with a lock held that freeing a tensor also takes. Garbage collection in another thread
        would wait for it with Python's lock held, so it is off."""
        with no_garbage_collection(), torch.cuda.use_mem_pool(self._pool, self._device):
            yield
        torch.cuda.synchronize(self._device)
        for found in torch.cuda.memory_snapshot(self._pool.id):
            segment = self._segments.all.get(found["address"])
            if segment is not None and segment.is_used and not found["active_size"]:
                segment.is_used = False  # torch keeps it for later tensors, but there will be none
                self._segments.unmap(found["address"], segment)

    def for_graphs(self) -> tuple[int, int]:
        """The id of the pool for CUDA graphs. Graphs must not outlive the pool, so it lives for ever."""
        _keep_for_ever(self._pool)
        return self._pool.id

    def content_changed(self) -> None:
        """The content has changed since it was copied."""
        for segment in self._segments.all.values():
            segment.is_stale = True

    def give_back(self) -> None:
        """Unmap the memory that is still mapped."""
        torch.cuda.synchronize(self._device)
        mapped = [(address, segment) for address, segment in self._segments.all.items() if segment.is_mapped]
        for address, segment in mapped:
            if self._keeps_content and segment.is_stale:
                if segment.host is None:
                    segment.host = torch.empty(segment.size // 4, dtype=torch.int32, pin_memory=True)
                segment.host.copy_(words_at(address, segment.size, self._device), non_blocking=True)
                segment.is_stale = False
        torch.cuda.synchronize(self._device)
        for address, segment in mapped:
            self._segments.unmap(address, segment)

    def take_again(self) -> None:
        """Map the memory again, and begin to copy its content; `torch.cuda.synchronize` waits for it. Raises OSError if
        there is too little memory. The thread must have used torch on the device before."""
        for address, segment in self._segments.all.items():
            if segment.is_used and not segment.is_mapped:
                self._segments.map(address, segment)
                if segment.host is not None:
                    words_at(address, segment.size, self._device).copy_(segment.host, non_blocking=True)


class RunnerMemory:
    """The memory that a runner gives back while it sleeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights = MappedMemory(device, keeps_content=True)
        self.graphs = MappedMemory(device, keeps_content=True)  # little: some kernels count in theirs
        self.cache = MappedMemory(device, keeps_content=False)

    def weights_changed(self) -> None:
        """The weights have changed since memory was last given back."""
        self.weights.content_changed()

    def give_back(self) -> None:
        """Unmap the memory that is still mapped."""
        for part in (self.weights, self.graphs, self.cache):
            part.give_back()
        torch.cuda.empty_cache()

    def take_again(self) -> None:
        """Map all of it. Raises OSError if there is too little memory, and then all is unmapped."""
        torch.cuda.synchronize(self._device)
        try:
            for part in (self.weights, self.graphs, self.cache):
                part.take_again()
        except OSError:
            self.give_back()
            raise


def _keep_for_ever(x: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
