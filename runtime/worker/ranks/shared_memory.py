"""SharedMemory: the communicator for ranks that are processes on one machine and compute on its CPU.

Each rank writes a buffer with two halves, which take turns, and a word that counts its operations. For an operation, a
rank copies its operand into one half, counts, waits until all others have counted, and reads their halves.

A half is overwritten two operations later. By then all ranks have begun the operation between, so they have read the
half. Counting is enough because an x86's stores become visible in their order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import struct
import time
from collections.abc import Iterator, Sequence

import torch

from runtime.base.types import CallboardError
from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.kernels.collectives.communicator import TIMEOUT_S

_HANDLE = struct.Struct("<8sIIIIQ")  # mark, rank, size, process, its descriptor of the buffer, bytes in a half
_MARK = b"cb-ranks"
_HEADER_BYTES, _OPERATION_AT = 128, 64  # the count is at 0, and the halves' operations are at 64
_OPERATION = struct.Struct("<4sQQ")  # name, bytes, operations before it
_SPINS = 200  # polls of a rank's count, some 10 us, before the kernel waits: another process may need the core
_NAP_S = 0.1  # the longest sleep between two checks of a rank's process
_MAX_COUNT = 1 << 32

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL_WAITERS = 202, 0, 1, (1 << 31) - 1
_futex = ctypes.CDLL(None).syscall


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Number, word, operation, value, time limit. Other arguments are not used.
_futex.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_TimeSpec))


class _Buffer:
    """One rank's buffer, mapped into this process."""

    def __init__(self, fd: int, half_bytes: int) -> None:
        self.memory = mmap.mmap(fd, _HEADER_BYTES + 2 * half_bytes)
        self.count = ctypes.c_uint32.from_buffer(self.memory)
        self._address = ctypes.addressof(self.count)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.halves = whole[_HEADER_BYTES:].chunk(2)

    def publish(self, half: int, operation: bytes, data: torch.Tensor, count: int) -> None:
        """Fill a half, count, then wake waiting ranks. Only the owner calls it."""
        self.halves[half][: len(data)] = data
        at = _OPERATION_AT + half * _OPERATION.size
        self.memory[at : at + _OPERATION.size] = operation
        self.count.value = count
        _futex(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL_WAITERS, None)

    def operation(self, half: int) -> bytes:
        at = _OPERATION_AT + half * _OPERATION.size
        return self.memory[at : at + _OPERATION.size]

    def has_counted(self, count: int) -> bool:
        """True if the owner has counted to `count`. It may be one further, but not two."""
        return (self.count.value - count) % _MAX_COUNT < 2

    def sleep(self, seen: int, seconds: float) -> None:
        """Wait until the owner publishes, unless the count has changed from `seen`."""
        limit = _TimeSpec(0, int(seconds * 1e9))
        _futex(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, ctypes.byref(limit))


class SharedMemory:
    """A `Communicator` for one user's processes on one machine, or for threads."""

    def __init__(
        self,
        rank: int,
        size: int,
        max_bytes: int,  # operand in one piece; longer operands are sent in several
        tree: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if platform.machine() != "x86_64":
            raise CallboardError(
                f"tensor_parallel_size is {size}, and this machine is {platform.machine()}; ranks on CPUs need an "
                "x86-64 machine."
            )
        self.rank, self.size, self._tree, self._timeout_s = rank, size, tree, timeout_s
        self._half_bytes = -(-max_bytes // 64) * 64
        memory = os.memfd_create("callboard-rank")  # memory without a file; it ends with the last process that has it
        os.ftruncate(memory, _HEADER_BYTES + 2 * self._half_bytes)
        self.handle = _HANDLE.pack(_MARK, rank, size, os.getpid(), memory, self._half_bytes)
        self._buffers: list[_Buffer] = []
        self._descriptors = [memory]
        self._processes: list[select.poll] = []  # readable when the process has ended
        self._error: CallboardError | None = None
        self._count = 0

    def connect(self, handles: Sequence[bytes]) -> None:
        own = _HANDLE.unpack(self.handle)
        for rank, handle in enumerate(handles):
            mark, its_rank, size, pid, fd, half_bytes = _HANDLE.unpack(handle)
            if (mark, its_rank, size, half_bytes) != (_MARK, rank, self.size, own[-1]) or len(handles) != size:
                raise CallboardError(
                    f"Rank {rank} of {self.size} gave a handle that does not fit this group; "
                    "start all ranks with the same settings."
                )
            try:
                self._watch(pid)
                peer = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            except OSError as e:
                raise CallboardError(
                    f"Rank {rank} cannot be reached ({e.strerror}); its process {pid} must live on this machine, in "
                    "the same container and of the same user."
                ) from None
            self._buffers.append(_Buffer(peer, half_bytes))
            os.close(peer)
        self.all_max(torch.zeros(1, dtype=torch.int64))  # all ranks have opened this rank's buffer

    def _watch(self, pid: int) -> None:
        process = os.pidfd_open(pid)
        self._descriptors.append(process)
        self._processes.append(select.poll())
        self._processes[-1].register(process, select.POLLIN)

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        flat = residual.view(-1)
        for start, partials in self._exchange(partial, b"sum"):
            flat[start : start + len(partials[0])].add_(sum_partials_torch(partials, self._tree))

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(partial)
        flat = out.view(-1)
        for start, partials in self._exchange(partial, b"sum"):
            flat[start : start + len(partials[0])] = sum_partials_torch(partials, self._tree)
        return out

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(self.size, x.numel())
        for start, parts in self._exchange(x, b"all"):
            torch.stack(parts, out=out[:, start : start + len(parts[0])])
        return out.view(self.size, *x.shape).transpose(0, 1).reshape(len(x), self.size * x.shape[1])

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        for start, parts in self._exchange(keys, b"max"):
            torch.amax(torch.stack(parts), 0, out=keys[start : start + len(parts[0])])
        return keys

    def set_timeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._error = CallboardError(f"Rank {self.rank} has left its group.")
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _exchange(self, x: torch.Tensor, name: bytes) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Exchange the flat operand in pieces. Yields the start of each and the ranks' pieces, valid until the next."""
        flat = x.reshape(-1)
        most = max(1, self._half_bytes // x.element_size())
        for start in range(0, len(flat), most):
            self.check()
            piece = flat[start : start + most]
            half, num_bytes = self._count & 1, len(piece) * piece.element_size()
            operation = _OPERATION.pack(name, num_bytes, self._count)
            self._count += 1
            self._buffers[self.rank].publish(half, operation, piece.view(torch.uint8), self._count)
            for rank, buffer in enumerate(self._buffers):
                self._wait_for(rank, buffer)
                if buffer.operation(half) != operation:
                    self._fail(f"Rank {rank} is at another operation than rank {self.rank}; all ranks must restart.")
            yield start, [buffer.halves[half][:num_bytes].view(x.dtype).to(x.device) for buffer in self._buffers]

    def _wait_for(self, rank: int, buffer: _Buffer) -> None:
        for _ in range(_SPINS):
            if buffer.has_counted(self._count):
                return
        deadline = time.monotonic() + self._timeout_s
        while True:
            # Check the reasons to fail before the count: a rank may have counted just before it ended.
            has_ended, is_late = self._processes[rank].poll(0), time.monotonic() > deadline
            seen = buffer.count.value
            if buffer.has_counted(self._count):
                return
            if has_ended:
                self._fail(f"The process of rank {rank} has ended; all ranks must restart.")
            if is_late:
                self._fail(f"Rank {rank} did not come within {self._timeout_s:g} s; all ranks must restart.")
            buffer.sleep(seen, _NAP_S)

    def _fail(self, sentence: str) -> None:
        self._error = CallboardError(sentence)
        raise self._error
