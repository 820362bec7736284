"""The model-runner actor: one process per rank, around runtime.worker.runner.ModelRunner.

Nothing per step goes through Ray. A runner is a cache of what the engine knows (C8): it is never restarted on its own,
and it ends with the socket to its engine.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from actors.executor import serve_steps
from actors.process import SWITCH_INTERVAL_S, ModelActor, freeze_garbage
from actors.transport import Address
from runtime.core.config import EngineConfig, ModelInfo
from runtime.loading.resolve import resolve

if TYPE_CHECKING:
    from runtime.worker.runner import ModelRunner

logger = logging.getLogger(__name__)


class ModelRunnerActor(ModelActor):
    """One rank."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0, "max_concurrency": 4}

    def load(self, config: EngineConfig, rank: int) -> ModelInfo:
        """Load this rank's share of the model; raises CallboardError if that fails."""
        self._rank = rank
        with self._log.heard():
            from runtime.worker.runner import ModelRunner
            from runtime.worker.sources import CheckpointSource

            self._log.note("libraries imported")
            path = resolve(config.model, config.revision, progress=False)
            self._runner: ModelRunner = ModelRunner(config, CheckpointSource(path), rank, config.tensor_parallel_size)
        freeze_garbage()
        self._log.note("ready")
        return self._runner.info

    def attach(self, address: Address) -> None:
        """Connect to the engine and serve its steps until it goes away; then this process ends."""

        sys.setswitchinterval(SWITCH_INTERVAL_S)

        def serve() -> None:
            try:
                serve_steps(address, self._runner, self._rank)
            finally:
                logger.info("the engine is gone; this runner ends")
                os._exit(0)

        threading.Thread(target=serve, name="runner-step", daemon=True).start()
