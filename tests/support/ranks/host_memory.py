"""Memory that processes share, in place of GPUs' memory: for communicators under Triton's interpreter."""

import mmap
import os
import struct
from collections.abc import Sequence

import torch


class HostMemory:
    """`runtime.worker.ranks.peer_memory.Memory`, of processes of one user."""

    def __init__(self) -> None:
        self._maps: list[torch.Tensor] = []

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        fd = os.memfd_create("inboxes")
        os.ftruncate(fd, num_bytes)
        return self._map(fd), struct.pack("<II", os.getpid(), fd)

    def open(self, handle: bytes) -> int:
        return self._map(os.open("/proc/{}/fd/{}".format(*struct.unpack_from("<II", handle)), os.O_RDWR)).data_ptr()

    def free(self, own: torch.Tensor, opened: Sequence[int]) -> None:
        self._maps.clear()

    def _map(self, fd: int) -> torch.Tensor:
        self._maps.append(torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.int32))
        return self._maps[-1]
