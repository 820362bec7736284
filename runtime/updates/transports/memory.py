"""Tensors in memory that this process reads: arrays of Ray's object store, and slices that their owner sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart, PullPart, TensorInfo
from runtime.updates.model_tensors import Incoming
from runtime.updates.staging import Stage

PULL_BYTES = 256 << 20  # size of slices that are requested at once


class ArraysReceiver:
    """Reads tensors of a part where they are."""

    def tensors(self, part: ArraysPart) -> Iterator[tuple[str, torch.Tensor]]:
        for name, array in part.tensors.items():
            yield name, array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


class _Wanted(NamedTuple):
    """A slice of a tensor as it is requested."""

    info: TensorInfo
    found: Sequence[Incoming]  # the tensor's places
    number: int  # index of its only target's part; -1 for the whole tensor
    part: Part | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.info.dtype)
        return math.prod(self.shape) * dtype.itemsize


def stage_pulled(part: PullPart, stage: Stage) -> None:
    """Request the slices that the rank needs from their owner, in batches, and stage them."""
    batch, size = list[_Wanted](), 0
    for info in part.tensors:
        for wanted in _wanted(info, stage.find(info.name, getattr(torch, info.dtype), tuple(info.shape))):
            if batch and size + wanted.nbytes > PULL_BYTES:
                _pull(part, batch, stage)
                batch, size = [], 0
            batch.append(wanted)
            size += wanted.nbytes
    if batch:
        _pull(part, batch, stage)


def _wanted(info: TensorInfo, found: Sequence[Incoming]) -> Iterator[_Wanted]:
    """One tensor's slices. A tensor with all experts is requested whole, and each expert's rows are cut later."""
    shape = tuple(info.shape)
    if any(place is not None for _, place in found):
        yield _Wanted(info, found, -1, None, shape)
        return
    for target, _ in found:
        for i, part in enumerate(target.parts):
            own = list(shape)
            if part is not None:
                own[part.dim] = part.stop - part.start
            yield _Wanted(info, found, i, part, tuple(own))


def _pull(part: PullPart, batch: Sequence[_Wanted], stage: Stage) -> None:
    slices = [(each.info.name, None, 0, 0) if each.part is None else (each.info.name, *each.part) for each in batch]
    found = part.pull(slices)
    if len(found) != len(batch):
        raise CallboardError(f"The trainer sent {len(found)} tensors for {len(batch)} slices; it must send one each.")
    for each, tensor in zip(batch, found, strict=True):
        got = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != each.shape or got != each.info.dtype:
            raise CallboardError(
                f"The trainer sent a slice of {each.info.name} as {got} {list(tensor.shape)}; it announced "
                f"{each.info.dtype} {list(each.shape)}."
            )
        if each.number < 0:
            stage.keep_whole(each.found, tensor)
        else:
            stage.keep(each.found[0].target, each.number, tensor)
