"""RunnerUpdates: new weights for a running model, on one rank.

An update is staged while steps go on, applied between two steps, and stored while later steps run. A tensor is
in the newest update, else in a stored one, else in the checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.types import CallboardError
from runtime.base.weight_parts import (
    ArraysPart,
    BroadcastPart,
    FilesPart,
    GroupInfo,
    IpcPart,
    PullPart,
    WeightPart,
)
from runtime.base.weight_version import WeightVersion
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import builder_beside
from runtime.models.weights import reader
from runtime.quant.weight_format import TensorSource
from runtime.updates.apply import apply_sections, taken
from runtime.updates.model_tensors import DRAFT_HEAD, HEAD_ROWS, TOWER, ModelTensors
from runtime.updates.random_weights import UndrawnTensors
from runtime.updates.slices import Overlay, Recorder, SliceSet
from runtime.updates.staging import Stage, StagingMemory
from runtime.updates.store import Stored, StoredSlices, WeightStore
from runtime.updates.transports.files import FilesReceiver
from runtime.updates.transports.memory import ArraysReceiver, stage_pulled
from runtime.worker.extras import UpdateParts, WeightsChanged
from runtime.worker.sources import CheckpointSource, DummySource, ModelSource

if TYPE_CHECKING:  # a process without a GPU needs neither
    from runtime.updates.transports.ipc import IpcReceiver
    from runtime.updates.transports.nccl import NcclReceiver

logger = logging.getLogger(__name__)

_TRIES = 5  # tries until all ranks read the same stored version
_DROPPED = "The update of the weights was dropped; begin another."


class RunnerUpdates:
    """The updates of a runner. `receive` runs in one thread while others run steps, `store` and `discard`."""

    def __init__(self, parts: UpdateParts) -> None:
        """Reads the store. All ranks of a group make theirs at the same time."""
        config, source = parts.config, parts.source
        self._parts, self._base = parts, _tensors_of(source, parts)
        self._device = parts.numerics.device
        self._store: WeightStore | None = None
        if config.weight_store is not None and isinstance(source, CheckpointSource):
            self._store = WeightStore(Path(config.weight_store), source.fingerprint, parts.spec.shard)
        stored = None if self._store is None else _agreed(self._store, parts.least)
        self.version = WeightVersion() if stored is None else stored.version
        self._layers: list[StoredSlices] = [] if stored is None else stored.layers
        self._newest: SliceSet | None = None  # applied and not stored yet
        self._staged = SliceSet()
        self._recorder, self._head_recorder = Recorder(self._overlay()), Recorder(self._overlay())
        self.source: ModelSource = source
        self.head_tensors: TensorSource | None = None
        if isinstance(source, CheckpointSource):
            self.source, self.head_tensors = source.with_tensors(self._recorder), self._head_recorder
        self.draft_head = ""
        self._receiving, self._storing, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._num_dropped = 0  # updates that were discarded; a receive that began before stages nothing
        self._ipc: IpcReceiver | None = None
        self._nccl: NcclReceiver | None = None

    def open(
        self, decoder: Decoder, max_model_len: int, room: int, changing: Callable[[], None], changed: WeightsChanged
    ) -> None:
        """The runner has loaded `source` into a decoder. `room` has the bytes of the device that it keeps for updates.

        `changing` is called before the decoder takes new weights, and `changed` afterwards."""
        parts, self._decoder, self._max_model_len = self._parts, decoder, max_model_len
        self._changing, self._changed = changing, changed
        dense = set[str]().union(*(layer.slices.dense for layer in self._layers))
        self._tensors = ModelTensors(
            parts.spec, parts.source.weight_map, parts.numerics, self._base, self._recorder.parts, dense,
            self._head_recorder.parts,
        )  # fmt: skip
        self._memory = StagingMemory(self._device, room)
        self._num_threads = torch.get_num_threads()

    # ---- a trainer's group ------------------------------------------------------------------------------------------

    def connect(self, group: GroupInfo) -> None:
        """Join the trainer's NCCL group. Waits until all have joined."""
        self._nccl_receiver().join(group)

    def disconnect(self) -> None:
        """Leave the trainer's group, if there is one."""
        if self._nccl is not None:
            self._nccl.leave()

    def _nccl_receiver(self) -> NcclReceiver:
        if self._device.type != "cuda":
            raise CallboardError("NCCL sends weights to GPUs, and this model is on a CPU; send files or arrays.")
        if self._nccl is None:
            from runtime.updates.transports.nccl import NcclReceiver

            self._nccl = NcclReceiver(self._device)
        return self._nccl

    def _ipc_receiver(self) -> IpcReceiver:
        if self._device.type != "cuda":
            raise CallboardError("CUDA IPC sends weights to GPUs, and this model is on a CPU; send files or arrays.")
        if self._ipc is None:
            from runtime.updates.transports.ipc import IpcReceiver

            self._ipc = IpcReceiver(self._device)
        return self._ipc

    # ---- an update --------------------------------------------------------------------------------------------------

    def receive(self, part: WeightPart) -> None:
        """Stage a part's tensors. Raises CallboardError, and then none is staged."""
        with self._receiving:
            start, num_dropped = time.perf_counter(), self._num_dropped

            def check() -> None:
                if self._num_dropped != num_dropped:
                    raise CallboardError(_DROPPED)

            stage = Stage(self._tensors, self._memory, check)
            try:
                with self._memory.stream():
                    self._stage(part, stage)
                with self._lock:
                    check()
                    replaced = self._staged.add(stage.slices)
            except BaseException:
                self._memory.release(stage.slices)
                raise
            self._memory.release(replaced)
        size, seconds = stage.slices.nbytes / (1 << 30), time.perf_counter() - start
        logger.info("weights: %.2f GiB of an update staged in %.2f s", size, seconds)

    def _stage(self, part: WeightPart, stage: Stage) -> None:
        if isinstance(part, PullPart):
            stage_pulled(part, stage)
            return
        if isinstance(part, FilesPart):
            files = FilesReceiver()
            stage.check_all(files.headers(part))
            tensors = files.tensors(part)
        elif isinstance(part, ArraysPart):
            tensors = ArraysReceiver().tensors(part)
        elif isinstance(part, IpcPart):
            tensors = self._ipc_receiver().tensors(part)
        else:
            tensors = self._nccl_receiver().tensors(part)
        if isinstance(part, IpcPart | BroadcastPart):
            stage.check_all((t.name, getattr(torch, t.dtype), tuple(t.shape)) for t in part.tensors)
        try:
            for name, tensor in tensors:
                stage.add(name, tensor)
        finally:  # after an error, a receiver leaves its trainer's group at once
            if isinstance(tensors, Generator):
                tensors.close()

    def check(self) -> bool:
        """True if the staged tensors are all of the model's. Raises CallboardError if they cannot be applied."""
        staged = self._staged
        if not staged.seen:
            raise CallboardError("The update has no tensor; send its weights before its end.")
        is_complete = self._tensors.is_complete(staged, self._applied())
        is_random = isinstance(self._parts.source, DummySource) and self._newest is None
        if is_random and not is_complete:
            raise CallboardError(
                f"The weights of this model are random, so its first update must have all tensors; it lacks "
                f"{self._tensors.missing(staged)}."
            )
        return is_complete

    def apply(self, version: WeightVersion) -> None:
        """Take the staged weights. No step runs meanwhile."""
        start, staged = time.perf_counter(), self._staged
        with self._storing:  # waits until the previous version is stored
            self._staged = SliceSet()
            newest = self._newest or SliceSet()
            self._memory.release(newest.add(staged))
            self._newest = newest
            self._apply(staged)
            self.version = version
        if self._ipc is not None:
            self._ipc.release()
        seconds = time.perf_counter() - start
        logger.info("weights: version %s applied in %.0f ms", version.name, 1e3 * seconds)

    def _apply(self, staged: SliceSet) -> None:
        parts, decoder, tensors = self._parts, self._decoder, self._tensors
        if torch.get_num_threads() != self._num_threads:  # it decides the order of additions
            torch.set_num_threads(self._num_threads)
        overlay = self._overlay()
        read = reader(overlay, tensors.locations, tensors.format_of, parts.source.weight_map, parts.numerics)
        sections = tensors.sections(staged)
        builder = builder_beside(decoder, tensors.format_of, read, self._max_model_len)
        self._changing()
        apply_sections(decoder, builder, sections)
        source = parts.source
        if isinstance(source, CheckpointSource):
            source = source.with_tensors(overlay)
        take = partial(taken, in_place=self._device.type == "cuda")
        self._changed(source if sections & {HEAD_ROWS, TOWER} else None, take)
        if parts.head is not None:
            self.draft_head = tensors.draft_head(staged)
            parts.head.follow(overlay if DRAFT_HEAD in sections else None, take)

    def store(self) -> None:
        """Write the applied weights to the store, and free the staged memory.

        Raises CallboardError if the store cannot be written; the weights then stay in the host's memory."""
        with self._storing:
            newest = self._newest
            if newest is None:
                return
            if self._store is None:
                self._newest = self._memory.on_host(newest)
                return
            try:
                self._layers = self._store.write(self.version, self._layers, newest)
            except CallboardError:
                self._newest = self._memory.on_host(newest)
                raise
            self._newest = None
            self._memory.release(newest)

    def discard(self) -> None:
        """Drop the staged tensors. A receive in another thread ends with an error."""
        with self._lock:
            self._num_dropped += 1
            self._memory.release(self._staged)
            self._staged = SliceSet()
        if self._receiving.acquire(blocking=False):
            if self._ipc is not None:
                self._ipc.release()
            self._receiving.release()
        elif self._nccl is not None:
            self._nccl.leave()

    def _overlay(self) -> Overlay:
        return Overlay(self._base, self._applied())

    def _applied(self) -> list[SliceSet]:
        """The updates that the runner serves, the oldest first."""
        return [*(layer.slices for layer in self._layers), *([] if self._newest is None else [self._newest])]


def _tensors_of(source: ModelSource, parts: UpdateParts) -> TensorSource:
    """The tensors of a checkpoint. Raises CallboardError if its weights cannot be updated."""
    states = parts.spec.states
    if isinstance(states, DeltaRuleSpec) and states.tiled:
        raise CallboardError(
            "weight_updates is on, but this GGUF file has the heads of states in another order than trainers; serve "
            "the model from safetensors files."
        )
    if isinstance(source, CheckpointSource):
        return source.checkpoint
    if isinstance(source, DummySource):
        return UndrawnTensors(source.spec, source.weight_map)
    raise CallboardError(f"weight_updates is on, but the weights of a {type(source).__name__} cannot be updated.")


def _agreed(store: WeightStore, least: Callable[[int], int]) -> Stored | None:
    """The stored version that all ranks read. Another engine may replace it meanwhile."""
    for _ in range(_TRIES):
        stored = store.read()
        number = 0 if stored is None else int((stored.version.identity or "0")[:12], 16) + 1
        if least(number) == -least(-number):
            return stored
    logger.warning("the ranks found different stored weights; they load the checkpoint")
    store.forget()
    return None
