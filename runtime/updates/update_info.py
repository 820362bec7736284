"""Weight updates' HTTP bodies, as parts. The field names are vLLM's (0.32).

    | update_info | part |
    | --- | --- |
    | names, dtype_names, shapes | the trainer broadcasts these tensors to its NCCL group |
    | the same and ipc_handles: one dict for each tensor | tensors in GPU memory, by the GPU's UUID |
    | the same, ipc_handles: one dict, tensor_sizes | tensors end to end in a uint8 buffer |
    | paths | safetensors files, or folders with such files |

A list is an update in several parts.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from runtime.base.types import CallboardError
from runtime.base.weight_parts import BroadcastPart, FilesPart, GroupInfo, IpcPart, TensorInfo, WeightPart
from runtime.updates.tensor_infos import integer, list_field, num_bytes, shown, tensor_infos, text
from runtime.updates.transports import ipc_handles

MAX_PARTS = 4096  # parts in one request
MAX_BUFFER_BYTES = 1 << 36
MAX_BUFFERS = 16
MAX_WORLD = 1 << 16
UNIQUE_ID_BYTES = 128
_MAX_PATHS, _MAX_PATH = 4096, 4096
_TENSOR_FIELDS = {"names", "dtype_names", "shapes", "packed"}
_IPC_FIELDS = _TENSOR_FIELDS | {"ipc_handles", "tensor_sizes"}
_GROUP_FIELDS = {
    "master_address", "master_port", "rank_offset", "world_size", "nccl_unique_id_b64", "packed",
    "packed_buffer_size_bytes", "packed_num_buffers",
}  # fmt: skip


def parts_of_json(update_info: object) -> list[WeightPart]:
    """Return the parts of `update_info`: an object, or a list of objects. Raises CallboardError."""
    if not isinstance(update_info, list):
        return [part_of_json(update_info)]
    if not 1 <= len(update_info) <= MAX_PARTS:
        raise CallboardError(f"update_info has {len(update_info)} parts; send 1 to {MAX_PARTS}.")
    return [part_of_json(info, f"update_info[{i}]") for i, info in enumerate(update_info)]


def part_of_json(update_info: object, where: str = "update_info") -> WeightPart:
    """Return the part that the fields of an object describe. Raises CallboardError."""
    info = _object(update_info, where)
    if "paths" in info:
        return files_part_of_json(info, where)
    if any(info.get(field) is not None for field in ("ipc_handles", "ipc_handles_pickled")):
        return ipc_part_of_json(info, where)
    return broadcast_part_of_json(info, where)


def files_part_of_json(update_info: dict[str, Any], where: str = "update_info") -> FilesPart:
    _check_fields(update_info, {"paths"}, where)
    paths = update_info["paths"]
    if not isinstance(paths, list) or not 1 <= len(paths) <= _MAX_PATHS:
        raise CallboardError(f"{where}.paths is {shown(paths)}; send a list of 1 to {_MAX_PATHS} paths.")
    return FilesPart([text(path, f"{where}.paths[{i}]", _MAX_PATH) for i, path in enumerate(paths)])


def broadcast_part_of_json(update_info: dict[str, Any], where: str = "update_info") -> BroadcastPart:
    """Return the tensors that the trainer is about to broadcast. Raises CallboardError."""
    info = _without_nulls(_object(update_info, where))
    _check_fields(info, _TENSOR_FIELDS, where)
    # The packing belongs to the group: a part with another packing would hang in NCCL.
    if info.get("packed", False) is not False:
        raise CallboardError(f"{where}.packed is {shown(info['packed'])}; send packed in init_info.")
    return BroadcastPart(tensor_infos(info, where))


def ipc_part_of_json(update_info: dict[str, Any], where: str = "update_info") -> IpcPart:
    """Return tensors in GPU memory; their handles are decoded and checked. Raises CallboardError."""
    info = _without_nulls(_object(update_info, where))
    if "ipc_handles_pickled" in info:
        raise CallboardError(
            f"{where}.ipc_handles_pickled can run code of its sender; send ipc_handles as JSON, with base64 for bytes."
        )
    _check_fields(info, _IPC_FIELDS, where)
    tensors, handles = tensor_infos(info, where), info.get("ipc_handles")
    is_packed = isinstance(handles, dict)
    if info.get("packed", is_packed) is not is_packed:
        raise CallboardError(
            f"{where}.packed is {shown(info['packed'])}; send true with one object as ipc_handles, false with a list."
        )
    if isinstance(handles, dict):
        _check_sizes(info, tensors, where)
        return IpcPart(tensors, [_handles(handles, tensors, f"{where}.ipc_handles", packed=True)], packed=True)
    if "tensor_sizes" in info:
        raise CallboardError(f"{where}.tensor_sizes is for packed tensors; send ipc_handles as one object with it.")
    found = list_field(info, "ipc_handles", where)
    if len(found) != len(tensors):
        raise CallboardError(f"{where}.ipc_handles has {len(found)} entries for {len(tensors)} names; send one each.")
    return IpcPart(
        tensors,
        [
            _handles(each, [tensor], f"{where}.ipc_handles[{i}]", packed=False)
            for i, (each, tensor) in enumerate(zip(found, tensors, strict=True))
        ],
    )


def has_group(init_info: object) -> bool:
    """Whether `init_info` is of an NCCL group. Updates over IPC or from files need none."""
    info = _object(init_info, "init_info")
    return any(info.get(field) is not None for field in _GROUP_FIELDS - {"packed"})


def group_of_init_info(init_info: object, rank_offset: int) -> GroupInfo:
    """Return how a runner joins the trainer's NCCL group.

    Args:
    init_info: the request's; its own `rank_offset` counts the ranks before all runners.
    rank_offset: runners before this one.

    Raises CallboardError."""
    info = _without_nulls(_object(init_info, "init_info"))
    _check_fields(info, _GROUP_FIELDS, "init_info")
    first = integer(info.get("rank_offset"), "init_info.rank_offset", 1, MAX_WORLD - 1)
    world_size = integer(info.get("world_size"), "init_info.world_size", 2, MAX_WORLD)
    if (rank := first + rank_offset) >= world_size:
        raise CallboardError(
            f"init_info.world_size is {world_size}, but a runner has rank {rank} in it; send the trainer's ranks and "
            "those of /get_world_size together."
        )
    packed = info.get("packed", False)
    if not isinstance(packed, bool):
        raise CallboardError(f"init_info.packed is {shown(packed)}; send true or false.")
    buffer_bytes = integer(
        info.get("packed_buffer_size_bytes", 1 << 30), "init_info.packed_buffer_size_bytes", 1, MAX_BUFFER_BYTES
    )
    num_buffers = integer(info.get("packed_num_buffers", 2), "init_info.packed_num_buffers", 1, MAX_BUFFERS)
    address, port, unique_id = _rendezvous(info)
    return GroupInfo(rank, world_size, address, port, unique_id, packed, buffer_bytes, num_buffers)


def _rendezvous(info: dict[str, Any]) -> tuple[str, int, bytes]:
    """A store's address and port, or the id of a group without a store."""
    fields = [field for field in ("master_address", "master_port") if field in info]
    if "nccl_unique_id_b64" not in info:
        if len(fields) < 2:
            raise CallboardError(
                "init_info.master_address and init_info.master_port are needed, unless nccl_unique_id_b64 is there."
            )
        address = text(info["master_address"], "init_info.master_address", 255)
        return address, integer(info["master_port"], "init_info.master_port", 1, 65535), b""
    if fields:
        raise CallboardError(f"init_info.nccl_unique_id_b64 replaces {fields[0]}; send one of both.")
    encoded = info["nccl_unique_id_b64"]
    try:
        unique_id = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        unique_id = b""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise CallboardError(
            f"init_info.nccl_unique_id_b64 does not have {UNIQUE_ID_BYTES} bytes; send NCCL's id as standard base64."
        )
    return "", 0, unique_id


def _handles(given: object, tensors: list[TensorInfo], where: str, *, packed: bool) -> dict[str, list[Any]]:
    """One tensor's or buffer's handles, by GPU UUID."""
    if not isinstance(given, dict) or not 1 <= len(given) <= ipc_handles.MAX_GPUS:
        raise CallboardError(f"{where} is {shown(given)}; send an object from the UUID of a GPU to a handle.")
    handles = {}
    for key, values in given.items():
        uuid = ipc_handles.uuid_of(key, where)
        decoded = ipc_handles.from_json(values, f"{where}.{key}")
        handle = ipc_handles.checked(decoded, f"{where}.{key}")
        if packed:
            ipc_handles.check_packed(handle, tensors, f"{where}.{key}")
        else:
            ipc_handles.check_tensor(handle, tensors[0], f"{where}.{key}")
        handles[uuid] = decoded
    return handles


def _check_sizes(info: dict[str, Any], tensors: list[TensorInfo], where: str) -> None:
    """`tensor_sizes` follow from shapes and types, so another value shows a mistake of the trainer."""
    sizes = list_field(info, "tensor_sizes", where)
    if len(sizes) != len(tensors):
        raise CallboardError(f"{where}.tensor_sizes has {len(sizes)} entries for {len(tensors)} names; send one each.")
    for i, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        if size != num_bytes(tensor):
            raise CallboardError(
                f"{where}.tensor_sizes[{i}] is {shown(size)}; {tensor.dtype} {list(tensor.shape)} has "
                f"{num_bytes(tensor)} bytes."
            )


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CallboardError(f"{where} is {shown(value)}; send an object.")
    return value


def _without_nulls(info: dict[str, Any]) -> dict[str, Any]:
    """A client's dataclass has null for fields without a value."""
    return {field: value for field, value in info.items() if value is not None}


def _check_fields(info: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(map(str, info.keys() - known)):
        raise CallboardError(f"{where} has the unknown field {shown(unknown[0])}; use {', '.join(sorted(known))}.")
