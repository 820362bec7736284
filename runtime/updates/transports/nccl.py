"""NcclReceiver: weights that a trainer broadcasts to the GPUs in its NCCL group.

It is compatible with vLLM's transfers (0.28 and later): the same rendezvous, the same warm-up, the same buffers.
Broadcasts have their own stream, so steps continue. While one buffer is copied, the next ones arrive."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.base.types import CallboardError
from runtime.base.weight_parts import BroadcastPart, GroupInfo, TensorInfo
from runtime.updates.tensor_infos import num_bytes
from runtime.updates.transports.nccl_library import Group, NcclGroup
from runtime.updates.transports.packing import cut, unpacked
from runtime.updates.transports.rendezvous import TrainerStore

logger = logging.getLogger(__name__)

JOIN_S = 300.0  # time limit until a group's ranks are connected; vLLM's trainers wait as long
_GRACE_S = 5.0  # time without progress that ends a transfer, after the trainer's store has closed
_LEFT = "The trainer was disconnected, and its transfer ended; connect it again."


class Wait:
    """Waits for a group, with small pauses. A wait ends with the trainer, or with the membership."""

    def __init__(self, left: threading.Event, store: TrainerStore | None = None) -> None:
        self._left, self.store = left, store

    def check(self, since: float = -math.inf) -> None:
        """Raise CallboardError if the rank has left, or if the trainer ended and nothing came since then.

        Args:
        since: time.monotonic() of the last progress."""
        if self._left.is_set():
            raise CallboardError(_LEFT)
        if self.store is not None and min(self.store.lost_s, time.monotonic() - since) > _GRACE_S:
            raise CallboardError(
                f"The trainer at {self.store.address} ended before its weights had arrived; "
                "start it again and connect it."
            )

    def until(self, is_done: Callable[[], bool], deadline: float = math.inf, late: str = "") -> None:
        """Return when `is_done`. Raises CallboardError with the text `late` after the deadline."""
        pause, start = 2e-5, time.monotonic()
        while not is_done():
            self.check(start)
            if time.monotonic() > deadline:
                raise CallboardError(late)
            time.sleep(pause)
            pause = min(1.5 * pause, 5e-3)
        # An abort ends the work on the stream, too, but its memory is not the trainer's.
        if self._left.is_set():
            raise CallboardError(_LEFT)


@dataclass(frozen=True, slots=True)
class _Membership:
    """This rank's place in a trainer's group, from the begin of `join` on."""

    info: GroupInfo
    group: Group
    left: threading.Event
    wait: Wait
    transfer: threading.Lock  # held from a part's first broadcast to the last

    def leave(self) -> None:
        self.left.set()
        self.group.abort()
        if self.wait.store is not None:
            self.wait.store.close()


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A buffer that the trainer fills."""

    memory: torch.Tensor
    tensors: Sequence[TensorInfo]
    has_arrived: Callable[[], bool]


class NcclReceiver:
    """Receives from one trainer at a time. One thread joins and receives; any thread may call `leave`."""

    def __init__(
        self,
        device: torch.device,
        make_group: Callable[[torch.device], Group] = NcclGroup,
        join_timeout_s: float = JOIN_S,
    ) -> None:
        self._device, self._make_group, self._join_timeout_s = device, make_group, join_timeout_s
        self._lock = threading.Lock()
        self._membership: _Membership | None = None

    def join(self, group: GroupInfo) -> None:
        """Join the trainer's group; returns when all ranks have. An earlier group is left.

        Raises CallboardError after the time limit, if the trainer's data are not vLLM's, or if `leave` is called."""
        self.leave()
        left = threading.Event()
        membership = _Membership(group, self._make_group(self._device), left, Wait(left), threading.Lock())
        with self._lock:
            self._membership = membership
        start = time.monotonic()
        try:
            self._connect(membership, start + self._join_timeout_s)
        except BaseException:
            self._drop(membership)
            raise
        logger.info("rank %d of a trainer's group of %d after %.1f s", group.rank, group.world_size,
                    time.monotonic() - start)  # fmt: skip

    def leave(self) -> None:
        """Leave the group. A `join`, or a receive that blocks, ends in its thread with CallboardError."""
        with self._lock:
            membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave()

    def tensors(self, part: BroadcastPart) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the trainer broadcasts, in the part's order.

        A tensor is valid until the next is requested. The stream that is current then must have all its reads. The
        broadcasts begin at the first request: check names and shapes before it.

        If a transfer fails, or is not read to its end, the group is left, because its ranks are out of step. Raises
        CallboardError."""
        with self._lock:
            membership = self._membership
        if membership is None:
            raise CallboardError("No trainer is connected; send init_weight_transfer_engine before update_weights.")
        if not membership.transfer.acquire(blocking=False):
            self._drop(membership)
            raise CallboardError("The last transfer was not read to its end; connect the trainer again.")
        try:
            yield from self._receive(membership, part.tensors)
        except BaseException:  # also if the caller reads no further
            self._drop(membership)
            raise
        membership.transfer.release()

    def _connect(self, membership: _Membership, deadline: float) -> None:
        info, wait, group = membership.info, membership.wait, membership.group
        unique_id = info.unique_id
        if not unique_id:
            wait.store = TrainerStore.join(
                info.master_address, info.master_port, info.world_size, self._join_timeout_s, wait.check
            )
            unique_id = wait.store.unique_id(deadline - time.monotonic(), wait.check)
        late = (
            f"Not all {info.world_size} ranks of the trainer's group joined within {self._join_timeout_s:g} s; "
            "check world_size, and that the trainer reaches this node."
        )
        group.begin(unique_id, info.rank, info.world_size)
        wait.until(group.is_ready, deadline, late)
        group.warm_up()
        wait.until(group.is_ready, deadline, late)
        wait.until(group.arrival(), deadline, late)

    def _receive(self, membership: _Membership, tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        info, wait, group = membership.info, membership.wait, membership.group
        chunks = deque(cut(tensors, num_bytes, info.buffer_bytes if info.packed else None))
        arriving: deque[_Arriving] = deque()
        while chunks or arriving:
            while chunks and len(arriving) < info.num_buffers:
                memory = _memory(group, sum(map(num_bytes, chunks[0])), is_needed=not arriving)
                if memory is None:
                    break
                arriving.append(self._begin(membership, memory, chunks.popleft()))
            buffer = arriving.popleft()
            wait.until(buffer.has_arrived)
            yield from unpacked(buffer.memory, buffer.tensors)
            group.follow()  # no broadcast overwrites the memory before the caller's copies have read it

    def _begin(self, membership: _Membership, memory: torch.Tensor, tensors: Sequence[TensorInfo]) -> _Arriving:
        group = membership.group
        if not memory.numel():  # NCCL ignores an empty broadcast
            return _Arriving(memory, tensors, lambda: True)
        group.broadcast(memory)
        membership.wait.until(group.is_ready)
        return _Arriving(memory, tensors, group.arrival())

    def _drop(self, membership: _Membership) -> None:
        """Leave a group, unless `join` has put another in its place."""
        with self._lock:
            if self._membership is membership:
                self._membership = None
        membership.leave()


def _memory(group: Group, size: int, *, is_needed: bool) -> torch.Tensor | None:
    """Memory for the next buffer. None if it must wait until other buffers are free."""
    try:
        return group.buffer(size)
    except torch.cuda.OutOfMemoryError:
        if not is_needed:
            return None
        raise CallboardError(
            f"The GPU has no room for a buffer of {size >> 20} MiB, which the trainer's weights need; "
            "lower packed_buffer_size_bytes or gpu_memory_utilization."
        ) from None
