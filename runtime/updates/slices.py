"""Slices: the parts of a checkpoint's tensors that a rank holds, and a checkpoint with newer tensors over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.loading.upload import Uploader
from runtime.quant.weight_format import Shape, SourceOver, TensorSource

Parts = tuple[Part | None, ...]  # one tensor's disjoint parts along one dimension; (None,) for all of it


class Slice(NamedTuple):
    """A part of a tensor."""

    part: Part | None  # None for the whole tensor
    values: torch.Tensor


@dataclass(slots=True)
class SliceSet:
    """Slices of several tensors, by the names in the checkpoint."""

    of: dict[str, list[Slice]] = field(default_factory=dict)
    dense: set[str] = field(default_factory=set)  # tensors that replace quantized weights
    seen: set[str] = field(default_factory=set)  # an update's tensors, including ones without a slice for this rank
    is_mapped: bool = False  # they lie in a file's pages, which may leave memory

    @property
    def nbytes(self) -> int:
        return sum(each.values.nbytes for slices in self.of.values() for each in slices)

    def add(self, other: SliceSet) -> SliceSet:
        """Take newer tensors. Returns the slices that they replace."""
        replaced = SliceSet({name: self.of[name] for name in self.of.keys() & other.of.keys()})
        self.dense -= other.of.keys()
        self.of |= other.of
        self.dense |= other.dense
        self.seen |= other.seen
        return replaced

    def all(self) -> Iterator[tuple[str, Slice]]:
        for name, slices in self.of.items():
            for each in slices:
                yield name, each


class Overlay(SourceOver):
    """A checkpoint with the tensors of updates over it.

    A tensor that an update brought whole is handed out without a copy, unless it is in a mapped file."""

    def __init__(self, checkpoint: TensorSource, layers: Sequence[SliceSet]) -> None:
        """`layers` has the updates, the oldest first."""
        super().__init__(checkpoint)
        self._slices: dict[str, list[Slice]] = {}
        self._dense, self._mapped = set[str](), set[str]()
        for layer in layers:
            self._slices |= layer.of
            self._dense = self._dense - layer.of.keys() | layer.dense
            self._mapped = self._mapped | layer.of.keys() if layer.is_mapped else self._mapped - layer.of.keys()
        self._uploader: Uploader | None = None

    def dtype(self, name: str) -> torch.dtype:
        if name in self._slices and name not in self._dense:  # a quantized weight's checks see its files
            return self._slices[name][0].values.dtype
        return super().dtype(name)

    def is_dense(self, name: str) -> bool:
        return name in self._dense

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        if name not in self._slices:
            return super().tensor(name, dtype, device, part)
        (own, values), device = _slice_with(name, self._slices[name], part), torch.device(device)
        if device.type == "cuda" and name in self._mapped:
            return self._uploaded(values.contiguous(), device).to(dtype)
        # A library's sums may depend on a weight's alignment, so a part is a separate tensor.
        needs_copy = values.shape != own.shape or name in self._mapped
        return values.to(device, dtype, non_blocking=True, copy=needs_copy).contiguous()

    def _uploaded(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        self._uploader = self._uploader or Uploader()
        out = torch.empty(values.shape, dtype=values.dtype, device=device)
        if values.nbytes:
            self._uploader.upload(values.reshape(-1).view(torch.uint8).numpy().data, out.view(-1).view(torch.uint8))
        return out


def _slice_with(name: str, slices: list[Slice], part: Part | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The slice that has a part of a tensor, and the part."""
    for own, values in slices:
        if own is None:
            return values, values if part is None else values.narrow(part.dim, part.start, part.stop - part.start)
        if part is not None and own.dim == part.dim and own.start <= part.start and part.stop <= own.stop:
            return values, values.narrow(part.dim, part.start - own.start, part.stop - part.start)
    raise CallboardError(f"Tensor {name} of an update lacks the part {part}; this is a bug in Callboard.")


class Recorder(SourceOver):
    """Records the parts that are read: a rank needs the same ones of an update."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)
        self._reads = defaultdict[str, set[Part | None]](set)

    @property
    def parts(self) -> dict[str, Parts]:
        """The parts that were read, by tensor."""
        return {name: merged(read, self.shape(name)) for name, read in self._reads.items()}

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        self._reads[name].add(part)
        return super().tensor(name, dtype, device, part)

    def blocks(
        self, name: str, num_bytes: int, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        self._reads[name].add(None)
        return super().blocks(name, num_bytes, device, part)


def merged(parts: Iterable[Part | None], shape: Shape) -> Parts:
    """Join overlapping parts of a tensor and neighbours."""
    given = [part for part in parts if part is not None]
    dims = {part.dim for part in given}
    if len(dims) != 1 or len(given) < len(list(parts)):
        return (None,)
    joined = list[Part]()
    for part in sorted(given):
        if joined and part.start <= joined[-1].stop:
            joined[-1] = joined[-1]._replace(stop=max(part.stop, joined[-1].stop))
        elif part.start < part.stop or not joined:
            joined.append(part)
    (dim,) = dims
    if joined[0].start == 0 and joined[0].stop == shape[dim]:
        return (None,)
    return tuple(joined)


def narrowed(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """A part of a whole tensor, as a view."""
    return tensor if part is None else tensor.narrow(part.dim, part.start, part.stop - part.start)


def parts_by_name(of: Mapping[str, Parts], name: str) -> Parts:
    """The recorded parts of a tensor; the whole if it was not read."""
    return of.get(name, (None,))
