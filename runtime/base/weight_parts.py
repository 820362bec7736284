"""A weight update's parts as plain data: which tensors a trainer sends, and how a rank gets them.

An update is a sequence of parts. Names and layouts are the checkpoint's. Tensors that no part names keep their values.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TensorInfo(msgspec.Struct, array_like=True, frozen=True):
    """A tensor as the trainer announces it."""

    name: str  # the checkpoint's name
    dtype: str  # torch's name, such as bfloat16
    shape: tuple[int, ...]


class FilesPart(msgspec.Struct, tag="files", frozen=True):
    """Safetensors files, or folders of them, at these paths on the runner's node."""

    paths: list[str]


class IpcPart(msgspec.Struct, tag="ipc", frozen=True):
    """Tensors in a trainer's GPU memory, on the same machine.

    `handles[i]` has, by GPU UUID, the arguments for torch's `rebuild_cuda_tensor` for tensor i, without its
    classes. With `packed`, there is one handle: a uint8 buffer with the tensors end to end."""

    tensors: list[TensorInfo]
    handles: list[dict[str, list[Any]]]
    packed: bool = False


class BroadcastPart(msgspec.Struct, tag="nccl", frozen=True):
    """Tensors that rank 0 of the NCCL group broadcasts in this order, packed into buffers or one by one."""

    tensors: list[TensorInfo]


class ArraysPart(msgspec.Struct, tag="arrays", frozen=True):
    """Tensors in this process's memory, by name: torch tensors or numpy arrays, as Ray's object store gives them."""

    tensors: dict[str, Any]


class PullPart(msgspec.Struct, tag="pull", frozen=True):
    """Tensors that a rank requests by slices from their owner.

    `pull(slices)` returns one tensor for each slice (name, dim, start, stop), in order; `dim` is None for a whole
    tensor."""

    tensors: list[TensorInfo]
    pull: Any


WeightPart = FilesPart | IpcPart | BroadcastPart | ArraysPart | PullPart


class GroupInfo(msgspec.Struct, frozen=True):
    """How a rank joins a trainer's NCCL group. Rank 0 is the trainer."""

    rank: int  # this runner's rank in the group
    world_size: int
    master_address: str = ""  # a TCPStore's address; empty with a unique id
    master_port: int = 0
    unique_id: bytes = b""  # NCCL's id, 128 bytes; empty with a store
    packed: bool = False
    buffer_bytes: int = 1 << 30  # size of a packed buffer
    num_buffers: int = 2
