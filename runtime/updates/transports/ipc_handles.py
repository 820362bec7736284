"""IpcHandle: a tensor in another process's GPU memory, as plain data that is checked before memory is opened.

The values are the arguments for torch's `rebuild_cuda_tensor`, in its order, without its two classes:

    | value | type |
    | --- | --- |
    | tensor_size, tensor_stride | lists of integers, in elements |
    | tensor_offset | integer, in elements from the start of the storage |
    | dtype | torch's name, such as bfloat16 |
    | storage_device | integer; the receiver's own device replaces it |
    | storage_handle | bytes; null for a storage without memory |
    | storage_size_bytes, storage_offset_bytes | integers |
    | requires_grad | ignored |
    | ref_counter_handle, ref_counter_offset | bytes, integer |
    | event_handle, event_sync_required | bytes, boolean |

In JSON, bytes are base64 text.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from runtime.base.types import CallboardError
from runtime.base.weight_parts import TensorInfo
from runtime.updates.tensor_infos import DTYPE_BYTES, MAX_BYTES, dtype_name, integer, num_bytes, shape_of, shown

_DRIVER_HANDLE = 64  # bytes in the driver's memory and event handles
_MAX_HANDLE = 1 << 16  # bytes; torch's handle for an expandable segment lists the segment's pieces
_MAX_COUNTER = 10_000 - 1  # torch's reference-counter files have 10,000 places
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")
_BYTES_FIELDS = (5, 9, 11)
_UUID = re.compile(r"(?:gpu-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
MAX_GPUS = 1024  # a trainer's GPUs, by which a tensor has handles


class IpcHandle(NamedTuple):
    """See the module's table."""

    tensor_size: tuple[int, ...]
    tensor_stride: tuple[int, ...]
    tensor_offset: int
    dtype: str
    storage_device: int
    storage_handle: bytes | None
    storage_size_bytes: int
    storage_offset_bytes: int
    requires_grad: bool
    ref_counter_handle: bytes | None
    ref_counter_offset: int
    event_handle: bytes | None
    event_sync_required: bool | None

    @property
    def end_bytes(self) -> int:
        """Bytes in the storage up to the tensor's last element."""
        if 0 in self.tensor_size:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.tensor_size, self.tensor_stride, strict=True))
        return (self.tensor_offset + last + 1) * DTYPE_BYTES[self.dtype]


def uuid_of(text: object, where: str) -> str:
    """Return the UUID of a GPU without the prefix `GPU-`, in small letters."""
    match = _UUID.fullmatch(text.lower()) if isinstance(text, str) else None
    if match is None:
        raise CallboardError(f"{where} has the key {shown(text)}; use the UUID of a GPU as a key.")
    return match[1]


def json_of(values: Sequence[Any]) -> list[Any]:
    """The JSON form of a handle's values: bytes become base64 text."""
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in values]


def from_json(values: object, where: str) -> list[Any]:
    """Undo `json_of`. Bytes stay as they are. Raises CallboardError."""
    if not isinstance(values, list | tuple) or len(values) != len(IpcHandle._fields):
        raise CallboardError(f"{where} is {shown(values)}; send the {len(IpcHandle._fields)} values of an IPC handle.")
    decoded = list(values)
    for i in _BYTES_FIELDS:
        if isinstance(decoded[i], str):
            try:
                decoded[i] = base64.b64decode(decoded[i], validate=True)
            except (binascii.Error, ValueError):
                raise CallboardError(
                    f"{where}.{IpcHandle._fields[i]} is {shown(decoded[i])}; send bytes as base64 text."
                ) from None
    return decoded


def checked(values: Sequence[Any], where: str) -> IpcHandle:
    """Return these values' handle, after checks of types, sizes and the tensor's place in its storage.

    Raises CallboardError, which names the value."""
    if not isinstance(values, list | tuple) or len(values) != len(IpcHandle._fields):
        raise CallboardError(f"{where} is {shown(values)}; send the {len(IpcHandle._fields)} values of an IPC handle.")
    h = IpcHandle(*values)
    h = h._replace(
        tensor_size=shape_of(h.tensor_size, f"{where}.tensor_size"),
        tensor_stride=shape_of(h.tensor_stride, f"{where}.tensor_stride"),
        dtype=dtype_name(h.dtype, f"{where}.dtype"),
    )
    for field, most in (
        ("tensor_offset", MAX_BYTES),
        ("storage_device", MAX_GPUS),
        ("storage_size_bytes", MAX_BYTES),
        ("storage_offset_bytes", MAX_BYTES),
        ("ref_counter_offset", _MAX_COUNTER),
    ):
        integer(getattr(h, field), f"{where}.{field}", 0, most)
    if len(h.tensor_stride) != len(h.tensor_size):
        raise CallboardError(f"{where}.tensor_stride is {shown(h.tensor_stride)}; send a step for each size.")
    if h.end_bytes > h.storage_size_bytes:
        raise CallboardError(
            f"{where}.storage_size_bytes is {h.storage_size_bytes}, but the tensor ends at {h.end_bytes} bytes; "
            "send the size of the whole storage."
        )
    if h.storage_size_bytes:
        _check_memory(h, where)
    return h


def _check_memory(h: IpcHandle, where: str) -> None:
    """Check what opens memory: another process's handles, and a file of its reference counters."""
    handle = h.storage_handle
    if not isinstance(handle, bytes) or not _DRIVER_HANDLE <= len(handle) <= _MAX_HANDLE:
        raise CallboardError(f"{where}.storage_handle is {shown(handle)}; send the bytes that torch exports.")
    # The file's name comes from a client, and a count in it is decremented: no other file is opened.
    if not isinstance(h.ref_counter_handle, bytes) or not _COUNTER_FILE.fullmatch(h.ref_counter_handle[:128]):
        raise CallboardError(
            f"{where}.ref_counter_handle is {shown(h.ref_counter_handle)}; send the bytes that torch exports."
        )
    if not isinstance(h.event_sync_required, bool):
        raise CallboardError(f"{where}.event_sync_required is {shown(h.event_sync_required)}; send true or false.")
    if not isinstance(h.event_handle, bytes) or len(h.event_handle) not in (0, _DRIVER_HANDLE):
        raise CallboardError(f"{where}.event_handle is {shown(h.event_handle)}; send {_DRIVER_HANDLE} bytes.")
    if h.event_sync_required and not h.event_handle:
        raise CallboardError(f"{where}.event_handle is empty; send the event that the tensor needs.")


def check_tensor(h: IpcHandle, tensor: TensorInfo, where: str) -> None:
    """Check that a handle has the tensor that the update announces."""
    if h.tensor_size != tuple(tensor.shape) or h.dtype != tensor.dtype:
        raise CallboardError(
            f"{where} has {h.dtype} {list(h.tensor_size)}, but {tensor.name!r} is announced as {tensor.dtype} "
            f"{list(tensor.shape)}; send the handle of this tensor."
        )


def check_packed(h: IpcHandle, tensors: Sequence[TensorInfo], where: str) -> None:
    """Check that a handle has a buffer with room for all tensors, end to end."""
    if h.dtype != "uint8" or len(h.tensor_size) != 1 or h.tensor_stride != (1,):
        raise CallboardError(f"{where} has {h.dtype} {list(h.tensor_size)}; send a buffer of uint8 in one dimension.")
    if (total := sum(map(num_bytes, tensors))) > h.tensor_size[0]:
        raise CallboardError(
            f"{where} has a buffer of {h.tensor_size[0]} bytes, but the tensors have {total}; send a larger one."
        )
