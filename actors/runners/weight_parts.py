"""Parts of a weight update that cross processes: tensors in Ray's object store, and tensors that an actor has.

A client sends them through the engine to all ranks. Each rank turns them into parts (runtime/updates/parts.py), which
its process can read. Tensors travel as numpy arrays, because Ray maps these into the reader's memory without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from actors.ray.directory import plain_error
from actors.wire.weight_calls import ActorPart, ObjectsPart, SentPart
from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart, PullPart, WeightPart

if TYPE_CHECKING:
    import torch

Slice = tuple[str, int | None, int, int]  # tensor, dimension (None: the whole tensor), start, stop


class StoredTensor(NamedTuple):
    """A tensor of a dtype that numpy lacks, as bytes."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    array: np.ndarray  # its bytes, uint8 [n]


def local_part(part: SentPart) -> WeightPart:
    """Return the part as this process reads it. Raises CallboardError if its tensors are lost."""
    if isinstance(part, ObjectsPart):
        tensors: dict[str, torch.Tensor] = {}
        for value in _answer(lambda: ray.get(part.refs)):
            if not isinstance(value, Mapping):
                kind = type(value).__name__
                raise CallboardError(f"An object of the update is a {kind}; put a dict of tensors by name there.")
            tensors |= {name: as_tensor(array) for name, array in value.items()}
        return ArraysPart(tensors)
    if isinstance(part, ActorPart):
        method = getattr(part.trainer, part.method)

        def pull(slices: Sequence[Slice]) -> list[torch.Tensor]:
            return [as_tensor(array) for array in _answer(lambda: ray.get(method.remote(list(slices))))]

        return PullPart(part.tensors, pull)
    return part


def _answer(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RayError as e:
        raise CallboardError(f"The trainer's tensors cannot be read: {plain_error(e)}") from e


# ---- tensors as objects -------------------------------------------------------------------------------------------


def as_tensor(stored: Any) -> torch.Tensor:
    """Return a tensor over the memory of an array or a StoredTensor. It must not be written to."""
    import torch

    if isinstance(stored, torch.Tensor):
        return stored.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays in the object store are read-only
        if isinstance(stored, StoredTensor):
            if not stored.array.size:  # its strides may be any
                return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            return torch.from_numpy(stored.array).view(getattr(torch, stored.dtype)).reshape(stored.shape)
        return torch.from_numpy(np.asarray(stored, order="C"))


def stored(tensor: Any) -> np.ndarray | StoredTensor:
    """Return a torch tensor or an array in a form that Ray's object store maps without a copy."""
    if isinstance(tensor, np.ndarray | StoredTensor):
        return tensor
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() < 2:  # its strides may be any
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # bfloat16 and the 8-bit floats
        name = str(tensor.dtype).removeprefix("torch.")
        return StoredTensor(name, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy())


def pieces(tensors: Mapping[str, Any], most_bytes: int) -> Iterator[dict[str, np.ndarray | StoredTensor]]:
    """Yield the tensors in stored form, in dicts of at most `most_bytes` or one tensor."""
    piece: dict[str, np.ndarray | StoredTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        each = stored(tensor)
        num_bytes = each.array.nbytes if isinstance(each, StoredTensor) else each.nbytes
        if piece and size + num_bytes > most_bytes:
            yield piece
            piece, size = {}, 0
        piece[name] = each
        size += num_bytes
    if piece:
        yield piece
