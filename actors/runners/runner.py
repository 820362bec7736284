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
from actors.runners.rank_weights import RankWeights
from actors.runners.step_channel import serve_steps
from actors.wire.transport import Address, connect
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.shard import Shard
from runtime.compilation.helper import KernelHelper
from runtime.loading.resolve import resolve

if TYPE_CHECKING:
    from runtime.worker.runner import ModelRunner

logger = logging.getLogger(__name__)


class ModelRunnerActor(RankWeights, ModelActor):
    """The process of one rank. Its methods raise CallboardError if they fail."""

    # Threads for `wait_for_exit`, a trainer's call that waits, the last update's write, and other calls
    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0, "max_concurrency": 8}

    def join(self, config: EngineConfig, rank: int) -> bytes:
        """Become `rank` of a group. Returns the handle by which other ranks reach this one."""
        self._rank = rank
        with self._log.recording():
            helper = KernelHelper.early(config)  # before torch loads
            from runtime.assembly.runner import build_runner
            from runtime.worker.sources import CheckpointSource

            self._log.note("libraries imported")
            path = resolve(config.model, config.revision, progress=False)
            self._runner: ModelRunner = build_runner(
                config, CheckpointSource(path), Shard(rank, config.tensor_parallel_size), helper=helper
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
