"""How tensors travel end to end in buffers of uint8, as vLLM's packed transfers have them.

A buffer ends with the first tensor that exceeds its size. So a buffer may exceed its size by almost one
tensor. Tensors follow each other without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from runtime.base.weight_parts import TensorInfo
from runtime.updates.tensor_infos import num_bytes

_T = TypeVar("_T")


def cut(items: Iterable[_T], size_of: Callable[[_T], int], buffer_bytes: int | None) -> Iterator[list[_T]]:
    """Yield the items of each buffer; each alone if `buffer_bytes` is None. Both ends make the same cuts."""
    chunk: list[_T] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += size_of(item)
        if buffer_bytes is None or size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def unpacked(buffer: torch.Tensor, tensors: Sequence[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a uint8 buffer [bytes], as views where their place allows it."""
    start = 0
    for tensor in tensors:
        size = num_bytes(tensor)
        yield tensor.name, tensor_at(buffer, start, tensor)
        start += size


def tensor_at(buffer: torch.Tensor, start: int, tensor: TensorInfo) -> torch.Tensor:
    piece, dtype = buffer[start : start + num_bytes(tensor)], torch_dtype(tensor.dtype)
    if piece.storage_offset() % dtype.itemsize or not piece.numel():
        piece = piece.clone()  # torch makes no view with another type at this place
    return piece.view(dtype).view(tensor.shape)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as uint8 [bytes]; a copy if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def torch_dtype(name: str) -> torch.dtype:
    """The type of a name that was checked against DTYPE_BYTES."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
