"""A group of CPU processes that broadcasts over sockets, in the place of NCCL's. The id of the group has a port."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import torch

from runtime.base.types import CallboardError
from runtime.updates.transports.packing import flat_bytes
from runtime.updates.transports.unique_id import NUM_BYTES

_listening: dict[int, socket.socket] = {}


def make_unique_id() -> bytes:
    """Listen for the group's ranks, and return the port as an id."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    _listening[port] = listening
    return str(port).encode().ljust(NUM_BYTES, b"\xff")


class SocketGroup:
    """A rank of such a group. Rank 0 sends at once; others receive in a thread, in the order of their buffers."""

    def __init__(self, device: torch.device) -> None:
        self._peers: list[socket.socket] = []
        self._buffers: queue.SimpleQueue[tuple[torch.Tensor, threading.Event]] = queue.SimpleQueue()
        self._last = threading.Event()
        self._last.set()
        self._rank, self.is_aborted, self.num_follows, self.most_waiting = 0, False, 0, 0
        self._num_waiting = 0

    def begin(self, unique_id: bytes, rank: int, world_size: int) -> None:
        port = int(unique_id.rstrip(b"\xff"))
        self._rank = rank
        if rank == 0:
            self._peers = [_listening[port].accept()[0] for _ in range(world_size - 1)]
        else:
            self._peers = [socket.create_connection(("127.0.0.1", port))]
            threading.Thread(target=self._receive, daemon=True).start()

    def is_ready(self) -> bool:
        if self.is_aborted:
            raise CallboardError("The trainer was disconnected, and its transfer ended; connect it again.")
        return True

    def warm_up(self) -> None:
        self.broadcast(torch.zeros(4, dtype=torch.uint8))

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def joined(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([flat_bytes(piece) for piece in pieces])

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self._rank == 0:
            for peer in self._peers:
                peer.sendall(buffer.numpy().tobytes())
            return
        self._last = threading.Event()
        self._num_waiting += 1
        self.most_waiting = max(self.most_waiting, self._num_waiting)
        self._buffers.put((buffer, self._last))

    def arrival(self) -> Callable[[], bool]:
        last = self._last

        def has_arrived() -> bool:
            self.is_ready()
            return last.is_set()

        return has_arrived

    def follow(self) -> None:
        self.num_follows += 1

    def abort(self) -> None:
        self.is_aborted = True
        for peer in self._peers:
            peer.close()

    def _receive(self) -> None:
        while True:
            buffer, arrived = self._buffers.get()
            view, start = memoryview(buffer.numpy()), 0
            while start < len(view):
                try:
                    count = self._peers[0].recv_into(view[start:])
                except OSError:
                    return
                if count == 0:
                    return  # a kernel of NCCL would wait, too
                start += count
            self._num_waiting -= 1
            arrived.set()
