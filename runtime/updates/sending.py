"""The trainer's side of weight updates over GPU memory: exports for IPC, and broadcasts over NCCL.

A trainer needs torch for it, but neither vLLM nor Ray:

    update = ipc_update_info(model.named_parameters(), packed=False)
    post("/update_weights", {"update_info": update})
    update.close()

    sender = NcclSender("10.0.0.1", world_size=1 + runners)
    post_in_a_thread("/init_weight_transfer_engine", {"init_info": sender.init_info})
    sender.connect()
    post_in_a_thread("/update_weights", {"update_info": nccl_update_info(tensors)})
    sender.send(tensors)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from runtime.base.types import CallboardError
from runtime.base.weight_parts import TensorInfo
from runtime.updates.tensor_infos import num_bytes
from runtime.updates.transports.ipc_handles import json_of
from runtime.updates.transports.nccl_library import Group, NcclGroup, library
from runtime.updates.transports.packing import cut, flat_bytes, info_of
from runtime.updates.transports.rendezvous import listening_socket, publish, serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from some builds

TIMEOUT_S = 300.0  # limit for the rendezvous, and for a broadcast without progress
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class IpcUpdate(dict[str, Any]):
    """An `update_info` for JSON. Its tensors stay in GPU memory until `close`."""

    tensors: list[torch.Tensor]

    def close(self) -> None:
        """Give up the tensors. Call it when the update has ended: handles do not keep memory."""
        self.tensors = []


def ipc_update_info(tensors: NamedTensors, packed: bool = False) -> IpcUpdate:
    """Return the body of an IPC update to runners on the tensors' GPU.

    The runners read the tensors' own memory, so it must not change before the reply.

    Args:
    packed: copy the tensors into one buffer; see `ipc_update_infos` for less memory."""
    named = [(name, tensor.detach().contiguous()) for name, tensor in tensors]
    if not named or any(not tensor.is_cuda for _, tensor in named):
        raise CallboardError("Only tensors of a GPU can be exported for IPC; move them there, or send them by files.")
    infos = [info_of(name, tensor) for name, tensor in named]
    update = IpcUpdate(described(infos))
    if packed:
        buffer = torch.cat([flat_bytes(tensor) for _, tensor in named])
        update.tensors = [buffer]
        update |= {"ipc_handles": _exported(buffer), "tensor_sizes": [num_bytes(info) for info in infos]}
    else:
        update.tensors = [tensor for _, tensor in named]
        update |= {"ipc_handles": [_exported(tensor) for tensor in update.tensors]}
    for device in {tensor.device for tensor in update.tensors}:
        torch.cuda.current_stream(device).synchronize()  # runners find the values that are there now
    return update


def ipc_update_infos(tensors: NamedTensors, buffer_bytes: int = 1 << 30) -> Iterator[IpcUpdate]:
    """Yield the parts of an update over IPC, each packed in a buffer, so that the copies take little memory.

    Send a part and close it before the next. A buffer exceeds its size by at most one tensor."""
    for chunk in cut(tensors, lambda item: _size(item[1]), buffer_bytes):
        yield ipc_update_info(chunk, packed=True)


def nccl_update_info(tensors: NamedTensors) -> dict[str, Any]:
    """Return the body of an update by `NcclSender.send`."""
    return described([info_of(name, tensor) for name, tensor in tensors])


def described(infos: Sequence[TensorInfo]) -> dict[str, Any]:
    return {
        "names": [info.name for info in infos],
        "dtype_names": [info.dtype for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


class NcclSender:
    """Rank 0 of a group with all runners, over torch's NCCL. Runners with vLLM can join it, too."""

    def __init__(
        self,
        master_address: str,
        world_size: int,
        master_port: int = 0,
        device: torch.device | None = None,
        *,
        packed: bool = True,
        buffer_bytes: int = 1 << 30,
        num_buffers: int = 2,
        timeout_s: float = TIMEOUT_S,
        make_group: Callable[[torch.device], Group] = NcclGroup,
        make_unique_id: Callable[[], bytes] | None = None,
    ) -> None:
        """Takes the port at once, so that `init_info` can be sent before `connect`.

        Args:
        master_address: of this node, as the runners reach it.
        world_size: this rank and all runners.
        master_port: 0 for a free one."""
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._address, self._world_size, self._timeout_s = master_address, world_size, timeout_s
        self._buffer_bytes, self._num_buffers = buffer_bytes if packed else None, num_buffers
        self._make_unique_id = make_unique_id
        self._listening = listening_socket(master_address, master_port)
        self._group = make_group(self._device)
        self._store: TCPStore | None = None  # runners watch it, so it stays open
        self.init_info: dict[str, Any] = {
            "master_address": master_address,
            "master_port": self._listening.getsockname()[1],
            "rank_offset": 1,
            "world_size": world_size,
            "packed": packed,
            "packed_buffer_size_bytes": buffer_bytes,
            "packed_num_buffers": num_buffers,
        }

    def connect(self) -> None:
        """Wait until all runners are connected. Raises CallboardError after the time limit."""
        deadline = time.monotonic() + self._timeout_s
        self._store = serve(self._listening, self._address, self._world_size, self._timeout_s)
        unique_id = self._make_unique_id() if self._make_unique_id is not None else library().unique_id()
        publish(self._store, unique_id)
        self._group.begin(unique_id, 0, self._world_size)
        self._until(self._group.is_ready, deadline)
        self._group.warm_up()
        self._until(self._group.is_ready, deadline)
        self._until(self._group.arrival(), deadline)

    def send(self, tensors: NamedTensors) -> None:
        """Broadcast tensors to all runners; returns when they are sent. The order is that of the update's `names`.

        The tensors may be made while they are sent. Raises CallboardError if the runners do not take them."""
        sending: deque[tuple[Callable[[], bool], Any]] = deque()  # broadcasts, each with the memory that it reads
        for chunk in cut((tensor.detach() for _, tensor in tensors), _size, self._buffer_bytes):
            if len(sending) == self._num_buffers:
                self._until(sending.popleft()[0])
            memory = self._group.joined(chunk)
            if memory.numel():
                self._group.broadcast(memory)
                self._until(self._group.is_ready)
                sending.append((self._group.arrival(), (memory, chunk)))
        while sending:
            self._until(sending.popleft()[0])

    def close(self) -> None:
        """Leave the group. Runners that still receive report an error."""
        self._group.abort()
        self._store = None

    def _until(self, is_done: Callable[[], bool], deadline: float = math.inf) -> None:
        pause, deadline = 2e-5, min(deadline, time.monotonic() + self._timeout_s)
        while not is_done():
            if time.monotonic() > deadline:
                self.close()
                raise CallboardError(
                    f"The runners took no weights for {self._timeout_s:g} s; look at their errors, and connect again."
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 5e-3)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _exported(tensor: torch.Tensor) -> dict[str, list[Any]]:
    """A tensor's handle, by its GPU's UUID."""
    _, (_, size, stride, offset, _, dtype, *rest) = reduce_tensor(tensor)
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return {uuid: json_of([list(size), list(stride), offset, str(dtype).removeprefix("torch."), *rest])}
