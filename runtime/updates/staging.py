"""Staging: the memory in which the tensors of an update wait until they are applied."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from runtime.base.types import CallboardError
from runtime.loading.upload import Uploader
from runtime.quant.weight_format import Shape
from runtime.updates.model_tensors import Incoming, ModelTensors, Target, pieces_of
from runtime.updates.slices import Slice, SliceSet

logger = logging.getLogger(__name__)

_MARGIN = 512 << 20  # GPU bytes that remain free beyond the planned room


class StagingMemory:
    """Copies slices: to the device while there is room, else to host memory.

    On a GPU it has its own stream, so steps continue meanwhile."""

    def __init__(self, device: torch.device, room: int) -> None:
        """`room` has the bytes of the device that the memory plan keeps for updates."""
        self.device, self._room = device, room
        self._used, self._lock = 0, threading.Lock()  # device bytes
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._uploader: Uploader | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context in which this thread copies. At its end, all copies have ended."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a slice."""
        if not self._on_gpu:
            return view.detach().clone(memory_format=torch.contiguous_format).cpu()
        out = self._empty(view.shape, view.dtype)
        if not view.is_cuda and out.is_cuda and view.is_contiguous() and view.nbytes:
            self._uploader = self._uploader or Uploader()
            self._uploader.upload(view.reshape(-1).view(torch.uint8).numpy().data, out.view(-1).view(torch.uint8))
        else:
            out.copy_(view, non_blocking=view.is_cuda)
        return out

    def _empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        if self._used + size <= self._room or size + _MARGIN < torch.cuda.mem_get_info(self.device)[0]:
            try:
                out = torch.empty(shape, dtype=dtype, device=self.device)
            except torch.OutOfMemoryError:
                logger.info("an update of the weights waits in host memory: the GPU has no room for it")
            else:
                with self._lock:
                    self._used += size
                return out
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def release(self, slices: SliceSet) -> None:
        """The caller drops these copies."""
        size = sum(each.values.nbytes for _, each in slices.all() if each.values.is_cuda)
        with self._lock:
            self._used -= size

    def on_host(self, slices: SliceSet) -> SliceSet:
        """Return copies in plain host memory, which replace these slices."""
        self.release(slices)
        moved = {name: [each._replace(values=each.values.cpu()) for each in own] for name, own in slices.of.items()}
        return replace(slices, of=moved)


class Stage:
    """The tensors of an update's part, before all have arrived."""

    def __init__(self, tensors: ModelTensors, memory: StagingMemory, check: Callable[[], None]) -> None:
        """`check` raises CallboardError if the update was dropped."""
        self._tensors, self._memory, self._check = tensors, memory, check
        self.slices = SliceSet()

    def find(self, name: str, dtype: torch.dtype, shape: Shape) -> list[Incoming]:
        """The places of a tensor, which is noted as seen. Raises CallboardError if it does not fit the model."""
        self._check()
        found = self._tensors.find(name, dtype, shape)
        for target, _ in found:
            if target.name in self.slices.seen:
                raise CallboardError(f"The update brings tensor {name} twice in a part; send it once.")
            self.slices.seen.add(target.name)
        return found

    def check_all(self, announced: Iterable[tuple[str, torch.dtype, Shape]]) -> None:
        """Raise CallboardError if an announced tensor does not fit the model."""
        for name, dtype, shape in announced:
            self._tensors.find(name, dtype, shape)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Keep what this rank needs of a whole tensor."""
        self.keep_whole(self.find(name, tensor.dtype, tuple(tensor.shape)), tensor)

    def keep_whole(self, found: Iterable[Incoming], tensor: torch.Tensor) -> None:
        """Keep what this rank needs of a tensor with these places."""
        for target, i, view in pieces_of(found, tensor):
            self.keep(target, i, view)

    def keep(self, target: Target, index: int, view: torch.Tensor) -> None:
        """Keep the slice of a target's part by its index."""
        slices = self.slices.of.setdefault(target.name, [])
        slices.append(Slice(target.parts[index], self._memory.copy(view)))
        if target.is_dense:
            self.slices.dense.add(target.name)
