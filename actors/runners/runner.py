"""The model-runner actor: one process per rank, around runtime.worker.runner.ModelRunner.

Steps do not go through Ray. A runner is a cache of the engine's state (C8): it is never restarted on its own, and it
ends with the socket to its engine."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from actors.ray.process import SWITCH_INTERVAL_S, ModelActor, freeze_garbage
from actors.runners.step_channel import serve_steps
from actors.wire.transport import Address, connect
from runtime.loading.resolve import resolve
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.shard import Shard
from runtime.spec.types import CallboardError
from runtime.spec.weight_parts import GroupInfo, WeightPart
from runtime.spec.weight_version import WeightVersion

if TYPE_CHECKING:
    from actors.runners.weight_parts import ActorPart, ObjectsPart
    from runtime.worker.extras import WeightUpdates
    from runtime.worker.runner import ModelRunner

logger = logging.getLogger(__name__)


class ModelRunnerActor(ModelActor):
    """The process of one rank. Its methods raise CallboardError if they fail."""

    # Beside `wait_for_exit`, a trainer's call that waits, the write of the last update, and other calls
    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0, "max_concurrency": 8}

    def join(self, config: EngineConfig, rank: int) -> bytes:
        """Become `rank` of a group. Returns the handle by which other ranks reach this one."""
        self._rank = rank
        with self._log.recording():
            from runtime.assembly.runner import build_runner
            from runtime.worker.sources import CheckpointSource

            self._log.note("libraries imported")
            path = resolve(config.model, config.revision, progress=False)
            self._runner: ModelRunner = build_runner(
                config, CheckpointSource(path), Shard(rank, config.tensor_parallel_size)
            )
        return self._runner.handle

    def load(self, handles: list[bytes]) -> ModelInfo:
        """Load this rank's share of the model. Returns the model, with the KV blocks that fit."""
        with self._log.recording():
            return self._runner.load(handles)

    def open(self, num_kv_blocks: int) -> ModelInfo:
        """Prepare for steps with `num_kv_blocks` KV blocks."""
        with self._log.recording():
            info = self._runner.open(num_kv_blocks)
        freeze_garbage()
        self._log.note("ready")
        return info

    def load_adapter(self, index: int, path: str, digest: str) -> None:
        """Load the adapter with this digest from a folder at an index, while steps continue."""
        self._runner.load_adapter(index, path, digest)

    def sleep(self) -> None:
        """Release memory. No plan may arrive until `wake`."""
        self._runner.sleep()

    def wake(self) -> None:
        """Prepare for plans again. All state of requests is lost."""
        self._runner.wake()

    def weights_connect(self, group: GroupInfo) -> None:
        """Join a trainer's NCCL group. Waits until all have joined."""
        self._updates.connect(group)

    def weights_disconnect(self) -> None:
        """Leave the trainer's group."""
        self._updates.disconnect()

    def weights_receive(self, part: WeightPart | ObjectsPart | ActorPart) -> None:
        """Stage the tensors of a part of an update, while steps continue."""
        from actors.runners.weight_parts import local_part

        self._updates.receive(local_part(part))

    def weights_check(self) -> bool:
        """Return True if the staged tensors are all of the model's."""
        return self._updates.check()

    def weights_apply(self, version: WeightVersion) -> str:
        """Take the staged weights, while no plan is computed. Returns the model's new fingerprint."""
        return self._runner.update_weights(version)

    def weights_keep(self) -> None:
        """Write the weights to the store of this node, while steps continue."""
        self._updates.keep()

    def weights_discard(self) -> None:
        """Drop the staged tensors. A `weights_receive` that waits ends with an error."""
        self._updates.discard()

    @property
    def _updates(self) -> WeightUpdates:
        updates = self._runner.updates
        if updates is None:
            raise CallboardError("This model runner keeps its weights; start it with weight_updates.")
        return updates

    def attach(self, address: Address) -> None:
        """Connect to the engine and serve its steps. When the connection ends, this process ends."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        engine = connect(address)

        def serve() -> None:
            try:
                serve_steps(engine, self._runner, self._rank)
            finally:
                logger.info("the engine is gone; this runner ends")
                os._exit(0)

        threading.Thread(target=serve, name="runner-step", daemon=True).start()
