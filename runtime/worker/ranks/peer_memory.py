"""PeerMemory: the communicator for ranks that are GPUs in one machine. Each rank writes into all others' memory.

The driver allocates this memory: torch's allocator may return memory without a handle. Each rank has one allocation, in
which the kernels have their inboxes (runtime.kernels.collectives.inboxes).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from runtime.base.types import CallboardError
from runtime.kernels.collectives.all_gather import all_gather_triton
from runtime.kernels.collectives.all_reduce import all_reduce_triton
from runtime.kernels.collectives.communicator import TIMEOUT_S
from runtime.kernels.collectives.inboxes import EMPTY_WORD, LOOKS_PER_S, NUM_INBOXES, NUM_PROGRAMS, STATE_WORDS, Inboxes
from runtime.worker.cuda_driver import call, words_at

_HANDLE = struct.Struct("<8sIIQQQ64s")  # mark, rank, size, process, its address, bytes of an inbox, Memory's handle
_MARK = b"cb-gpus "
_GRANULE = 2 << 20  # the driver puts smaller allocations on one page, and a handle names a page
_LEAST_BYTES = 256 << 10  # an inbox has room for operands with this size from all ranks
_MOST_BYTES = 32 << 20  # bytes in an inbox; longer operands are sent in pieces
_LAZY_ENABLE_PEER_ACCESS = 1


class Memory(Protocol):
    """Memory that other processes can reach."""

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        """Allocate memory [num_bytes / 4] int32. Returns it with a handle of at most 64 bytes. Raises OSError."""
        ...

    def open(self, handle: bytes) -> int:
        """The address in this process of memory that another process has allocated. Raises OSError."""
        ...

    def free(self, own: torch.Tensor, opened: Sequence[int]) -> None: ...


class _DriverHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)


class DriverMemory:
    """Memory of the CUDA driver on a device, in the context that torch has made."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._device = device

    def _enter(self) -> None:
        """Give this thread a context, which the driver's calls need. An actor runs calls in several threads."""
        torch.cuda.synchronize(self._device)

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        self._enter()
        address, handle = ctypes.c_uint64(), _DriverHandle()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return words_at(address.value, num_bytes, self._device), bytes(handle)

    def open(self, handle: bytes) -> int:
        self._enter()
        address = ctypes.c_uint64()
        by_value = _DriverHandle.from_buffer_copy(handle)
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
        return address.value

    def free(self, own: torch.Tensor, opened: Sequence[int]) -> None:
        self._enter()
        for address in opened:
            call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        call("cuMemFree_v2", ctypes.c_uint64(own.data_ptr()))


def inbox_bytes_of(size: int, max_bytes: int) -> int:
    """The bytes in one of a rank's NUM_INBOXES inboxes, for operands up to `max_bytes`."""
    wanted = max(size * _LEAST_BYTES, min(2 * max_bytes, _MOST_BYTES))
    return -(-wanted // _GRANULE) * _GRANULE


class PeerMemory:
    """A `Communicator` of processes with a GPU each; or several, or threads, on one."""

    def __init__(
        self,
        rank: int,
        size: int,
        inbox_bytes: int,
        device: torch.device,
        tree: bool = False,
        timeout_s: float = TIMEOUT_S,
        memory: Memory | None = None,  # DriverMemory
        num_programs: int = NUM_PROGRAMS,
    ) -> None:
        if tree and size not in (2, 4, 8):
            raise CallboardError(f"tensor_parallel_size is {size}, and sums as a tree are asked for; use 2, 4 or 8.")
        self.rank, self.size, self._device, self._timeout_s = rank, size, device, timeout_s
        self.op: Literal["sum", "tree"] = "tree" if tree else "sum"
        self._memory = memory or DriverMemory(device)
        try:
            self._own, handle = self._memory.allocate(NUM_INBOXES * inbox_bytes)
        except OSError as e:
            raise CallboardError(
                f"Rank {rank} finds no {NUM_INBOXES * inbox_bytes >> 20} MiB that its peers can write to "
                f"({e.strerror}); lower gpu_memory_utilization."
            ) from None
        self.handle = _HANDLE.pack(_MARK, rank, size, os.getpid(), self._own.data_ptr(), inbox_bytes, handle)
        self._opened: list[int] = []
        self._error = torch.zeros(
            1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )  # host and device can reach it
        self._inboxes = Inboxes(
            rank,
            size,
            inbox_bytes,
            addresses=torch.full((size,), self._own.data_ptr(), device=device),
            state=torch.zeros(num_programs, STATE_WORDS, dtype=torch.int32, device=device),
            num_looks=torch.zeros(1, dtype=torch.int32, device=device),
            error=self._error,
        )
        self._greet()  # compiles the kernel: it does not wait, given a limit of 0 looks and its own addresses
        self._inboxes.state.zero_()
        self._own.fill_(EMPTY_WORD)
        self.set_timeout(timeout_s)
        self._synchronize()

    def connect(self, handles: Sequence[bytes]) -> None:
        addresses = []
        for rank, handle in enumerate(handles):
            mark, its_rank, size, pid, address, inbox_bytes, memory_handle = _HANDLE.unpack(handle)
            if (mark, its_rank, size, inbox_bytes) != (_MARK, rank, len(handles), self._inboxes.inbox_bytes):
                raise CallboardError(
                    f"Rank {rank} of {self.size} gave a handle that does not fit this group; "
                    "start all ranks with the same settings."
                )
            if pid != os.getpid():
                try:
                    address = self._memory.open(memory_handle)
                except OSError as e:
                    raise CallboardError(
                        f"Rank {self.rank} cannot reach the memory of rank {rank} ({e.strerror}); their GPUs must be "
                        "peers (nvidia-smi topo -p2p w) and their processes in the same container."
                    ) from None
                self._opened.append(address)
            addresses.append(address)
        self._inboxes.addresses.copy_(torch.tensor(addresses))
        try:
            self._greet()
            self._synchronize()
        except RuntimeError as e:
            raise CallboardError(f"Rank {self.rank} cannot write to its peers' memory ({e}).") from None
        self.check()

    def _greet(self) -> None:
        self.all_max(torch.full((1,), self.rank, device=self._device))

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        all_reduce_triton(self._inboxes, partial, residual, self.op)

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        return all_reduce_triton(self._inboxes, partial, None, self.op)

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        return all_gather_triton(self._inboxes, x, wanted)

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        return all_reduce_triton(self._inboxes, keys, None, "max")

    def set_timeout(self, seconds: float) -> None:
        self._timeout_s = seconds
        self._inboxes.num_looks.fill_(int(seconds * LOOKS_PER_S))

    def check(self) -> None:
        if missing := int(self._error[0]):
            raise CallboardError(
                f"Rank {missing - 1} did not come within {self._timeout_s:g} s; all ranks must restart."
            )

    def close(self) -> None:
        self._memory.free(self._own, self._opened)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
