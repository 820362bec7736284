"""IpcReceiver: weights in the GPU memory of a trainer's process, on the same GPU.

A trainer exports its memory, and this process maps it. Torch counts the mappings in a file, and the trainer's allocator
keeps mapped memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from runtime.base.types import CallboardError
from runtime.base.weight_parts import IpcPart
from runtime.updates.transports.ipc_handles import IpcHandle, check_packed, check_tensor, checked
from runtime.updates.transports.packing import torch_dtype, unpacked
from runtime.worker.cuda_driver import call

_EXPANDABLE = b"e"  # second byte in torch's handles of expandable segments
_DRIVER_HANDLE = 64


class IpcReceiver:
    """Maps a trainer's memory. One thread receives at a time."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device(device.type, index)
        self._buffer: tuple[IpcHandle, torch.Tensor] | None = None  # the last exported buffer of packed tensors

    def tensors(self, part: IpcPart) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a part's tensors, in its order, as views of the trainer's memory.

        A tensor is valid until the next is requested. The stream that is current then must have all its reads. At the
        end this waits for that stream, because the trainer may write its memory after the reply.

        Raises CallboardError, before anything is yielded, if a handle is faulty or belongs to other GPUs."""
        uuid = gpu_uuid(self._device)
        handles = [_handle_for(uuid, by_uuid, i) for i, by_uuid in enumerate(part.handles)]
        if part.packed:
            check_packed(handles[0], part.tensors, "ipc_handles")
        else:
            for i, (handle, tensor) in enumerate(zip(handles, part.tensors, strict=True)):
                check_tensor(handle, tensor, f"ipc_handles[{i}]")
        mapped: list[torch.Tensor] = []  # until the last copy has ended: then the trainer's allocator may reuse them
        try:
            if part.packed:
                yield from unpacked(self._packed(handles[0]), part.tensors)
                return
            for handle, tensor in zip(handles, part.tensors, strict=True):
                mapped.append(self._map(handle, tensor.name))
                yield tensor.name, mapped[-1]
        finally:
            torch.cuda.current_stream(self._device).synchronize()
            mapped.clear()

    def release(self) -> None:
        """Unmap the trainer's buffer of packed tensors. Call it when an update ends."""
        self._buffer = None

    def _packed(self, handle: IpcHandle) -> torch.Tensor:
        """The buffer of packed tensors. One export may have several parts, and has one mapping: torch counts down when
        a mapping ends, but up only at the export."""
        handle = handle._replace(storage_device=0)
        if self._buffer is None or self._buffer[0] != handle:
            self._buffer = None
            self._buffer = (handle, self._map(handle, "the packed tensors"))
        return self._buffer[1]

    def _map(self, h: IpcHandle, name: str) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device):
                tensor: torch.Tensor = rebuild_cuda_tensor(
                    torch.Tensor,
                    torch.Size(h.tensor_size),
                    h.tensor_stride,
                    h.tensor_offset,
                    torch.storage.TypedStorage,
                    torch_dtype(h.dtype),
                    self._device.index,
                    h.storage_handle,
                    h.storage_size_bytes,
                    h.storage_offset_bytes,
                    False,  # requires_grad
                    h.ref_counter_handle,
                    h.ref_counter_offset,
                    h.event_handle,
                    h.event_sync_required,
                )
        except RuntimeError as e:
            reason = str(e).split("\n", 1)[0].rstrip(" .")
            raise CallboardError(
                f"The trainer's memory of {name} cannot be mapped ({reason}); it must keep its tensors until the reply."
            ) from None
        self._check_range(h, tensor, name)
        return tensor

    def _check_range(self, h: IpcHandle, tensor: torch.Tensor, name: str) -> None:
        """Check that a storage lies within the memory that was mapped: a read behind it would end this process."""
        handle = h.storage_handle
        if not h.storage_size_bytes or handle is None or _is_expandable(handle):
            return  # the driver knows only the pieces of an expandable segment
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        address = tensor.untyped_storage().data_ptr()
        try:
            call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        except OSError:
            return
        if not base.value <= address or address + h.storage_size_bytes > base.value + size.value:
            raise CallboardError(
                f"The handle of {name} has storage_offset_bytes {h.storage_offset_bytes} and storage_size_bytes "
                f"{h.storage_size_bytes}, but its memory has {size.value} bytes; send the values that torch exports."
            )


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, without the prefix `GPU-`."""
    return str(torch.cuda.get_device_properties(device).uuid).lower().removeprefix("gpu-")


def _handle_for(uuid: str, by_uuid: Mapping[str, Sequence[Any]], index: int) -> IpcHandle:
    """The handle for this GPU."""
    for key, values in by_uuid.items():
        if key.lower().removeprefix("gpu-") == uuid:
            return checked(values, f"ipc_handles[{index}]")
    raise CallboardError(
        f"ipc_handles[{index}] is for the GPUs {', '.join(by_uuid)}, but this runner has {uuid}; export the tensors on "
        "the runner's GPU, or send them by NCCL."
    )


def _is_expandable(handle: bytes) -> bool:
    return len(handle) > _DRIVER_HANDLE and handle[1:2] == _EXPANDABLE
