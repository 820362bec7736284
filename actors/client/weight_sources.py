"""A weight update's parts, from what a trainer has: tensors, Ray objects, files, or an actor.

A trainer that is an actor can use `put_weights`, or `weight_list` and `weight_slices` in methods with the same purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.actor import ActorHandle

from actors.runners.weight_parts import Slice, pieces
from actors.wire.weight_calls import ActorPart, ObjectsPart, SentPart
from runtime.base.types import CallboardError
from runtime.base.weight_parts import FilesPart, TensorInfo
from runtime.updates.update_info import part_of_json

if TYPE_CHECKING:
    from collections.abc import Iterable

_OBJECT_BYTES = 256 << 20  # an object with several tensors: the object store needs room for two
_TWO_SIDED = ("GLOO", "NCCL")  # a trainer could join one rank for life, since a process has one such group

# A state dict; an object with one, or several; safetensors files or folders of them; an actor.
Source = Mapping[str, Any] | ray.ObjectRef | Sequence[ray.ObjectRef] | str | Path | Sequence[str | Path] | ActorHandle
Transport = Literal["objects", "ipc"]  # a state dict travels by Ray's object store, or by handles of its GPU memory


def parts_of(
    source: Source, transport: Transport, method: str, tensors: Iterable[tuple[str, str, Sequence[int]]] | None
) -> Iterator[SentPart]:
    """Yield an update's parts in order. Each needs its tensors only until the next is requested.

    An actor's `method` returns the tensors for a list of slices, as `weight_slices` does. `tensors` has what
    its `weight_list` returned; None calls it."""
    if isinstance(source, ActorHandle):
        if (two_sided := getattr(getattr(source, method), "_tensor_transport", None)) in _TWO_SIDED:
            text = f"The method {method!r} has tensor_transport={two_sided!r}, which serves one group of processes"
            raise CallboardError(f"{text}; leave it out, or take a one-sided one such as 'nixl'.")
        listed = ray.get(source.weight_list.remote()) if tensors is None else tensors
        infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in listed]
        yield ActorPart(source, method, infos)
    elif isinstance(source, Mapping) and transport == "ipc":
        from runtime.updates.sending import ipc_update_infos  # imports torch

        for update in ipc_update_infos(source.items()):  # a mapping for each tensor takes longer than the copy
            try:
                yield part_of_json(dict(update))
            finally:
                update.close()
    elif isinstance(source, Mapping):
        for piece in pieces(source, _OBJECT_BYTES):
            yield ObjectsPart([ray.put(piece)])
    elif isinstance(source, str | Path):
        yield FilesPart([os.path.abspath(source)])
    elif isinstance(source, ray.ObjectRef):
        yield ObjectsPart([source])
    elif isinstance(source, Sequence) and all(isinstance(item, ray.ObjectRef) for item in source):
        for ref in source:
            yield ObjectsPart([ref])
    elif isinstance(source, Sequence) and all(isinstance(item, str | Path) for item in source):
        yield FilesPart([os.path.abspath(str(path)) for path in source])
    else:
        kinds = "a dict of tensors, an ObjectRef of one, a path, or an actor"
        raise CallboardError(f"Weights cannot come from a {type(source).__name__}; pass {kinds}.")


def put_weights(tensors: Mapping[str, Any]) -> list[ray.ObjectRef]:
    """Put a state dict into Ray's object store, so that ranks map it without a copy; return objects of 256 MiB."""
    return [ray.put(piece) for piece in pieces(tensors, _OBJECT_BYTES)]


def weight_list(tensors: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of a state dict's tensors."""
    return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def weight_slices(tensors: Mapping[str, Any], slices: Sequence[Slice]) -> list[Any]:
    """Return a tensor for each slice (name, dimension, start, stop) of a state dict; dimension None means all."""
    found = []
    for name, dim, start, stop in slices:
        tensor = tensors[name].detach()
        found.append(tensor if dim is None else tensor.narrow(dim, start, stop - start).contiguous())
    return found
