"""Trainers on a GPU, for processes of `tests.support.updates.trainers`. Each sends JSON, as over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from runtime.updates.sending import NcclSender, described, ipc_update_info, ipc_update_infos, nccl_update_info
from runtime.updates.tensor_infos import num_bytes
from runtime.updates.transports.ipc_handles import json_of
from runtime.updates.transports.packing import cut, flat_bytes, info_of


def weights(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Tensors of all kinds that checkpoints have, the same on each device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    drawn = {
        "embed": draw(1000, 512).bfloat16(),
        "flags": draw(7).to(torch.uint8),  # the next tensor is at an odd place in a buffer
        "norm": draw(512),
        "scale": draw(1)[0],
        "empty": draw(0, 4),
        "fp8": draw(640, 512).to(torch.float8_e4m3fn),
        "half": draw(33, 65).half(),
    }
    moved = {name: tensor.to(device) for name, tensor in drawn.items()}
    flat = draw(4096).to(device)  # two tensors in one storage, as sharded trainers have them
    moved |= {"flat.a": flat[:1024].view(32, 32), "flat.b": flat[1024:4096].view(64, 48)}
    moved["columns"] = draw(130, 70).to(device).T
    return moved


def export(connection: Connection, packed: bool, num_updates: int) -> None:
    """Export one update after another. At last, send the bytes that are allocated besides the weights."""
    tensors, allocated = weights(0, "cuda"), torch.cuda.memory_allocated()
    for seed in range(num_updates):
        for name, tensor in weights(seed, "cuda").items():
            tensors[name].copy_(tensor)
        del tensor
        for update in ipc_update_infos(tensors.items()) if packed else [ipc_update_info(tensors.items())]:
            connection.send(json.dumps(update))
            connection.recv()  # the reply
            update.close()
    torch.cuda.ipc_collect()
    connection.send(torch.cuda.memory_allocated() - allocated)
    connection.recv()


def export_pieces(connection: Connection, buffer_bytes: int) -> None:
    """Export one buffer for several parts, as vLLM's packed transfers do."""
    tensors = weights(1, "cuda")
    allocated = torch.cuda.memory_allocated()
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device="cuda")
    _, (_, size, stride, offset, _, _, *rest) = reduce_tensor(buffer)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handle = {uuid: json_of([list(size), list(stride), offset, "uint8", *rest])}
    for chunk in cut(tensors.items(), lambda item: item[1].numel() * item[1].element_size(), buffer_bytes // 8):
        infos = [info_of(name, tensor) for name, tensor in chunk]
        joined = torch.cat([flat_bytes(tensor) for _, tensor in chunk])
        buffer[: joined.numel()].copy_(joined)
        torch.cuda.synchronize()
        sizes = {"tensor_sizes": [num_bytes(info) for info in infos]}
        connection.send(json.dumps(described(infos) | sizes | {"ipc_handles": handle}))
        connection.recv()
    connection.send(None)
    connection.recv()  # the end of the update
    del buffer, joined
    torch.cuda.ipc_collect()
    connection.send(torch.cuda.memory_allocated() - allocated)
    connection.recv()


def broadcast(
    connection: Connection, seeds: Sequence[int], first_tensors: int | None, options: dict[str, Any], gpu: int = 1
) -> None:
    """Connect from the second GPU, and send weights of each seed, or only the first tensors of them."""
    torch.cuda.set_device(gpu)
    sender = NcclSender("127.0.0.1", 2, device=torch.device("cuda", gpu), timeout_s=120, **options)
    connection.send(json.dumps(sender.init_info))
    sender.connect()
    connection.send(json.dumps(nccl_update_info(weights(0).items())))
    for seed in seeds:
        connection.recv()
        sender.send([*weights(seed, f"cuda:{gpu}").items()][:first_tensors])
    connection.send("sent")
    connection.recv()
