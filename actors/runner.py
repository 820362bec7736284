"""The model-runner actor: one process per rank, around runtime.worker.runner.ModelRunner.

Nothing per step goes through Ray. A runner is a cache of what the engine knows (C8): it is never restarted on its own,
and it ends with the socket to its engine.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from actors.environment import freeze_garbage
from actors.executor import serve_steps
from actors.transport import Address
from runtime.core.config import EngineConfig, ModelInfo
from runtime.loading.resolve import resolve

if TYPE_CHECKING:
    from runtime.worker.runner import ModelRunner

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # a thread that a step waits for must not wait 5 ms for another to give up the GIL


class StartupLog(logging.Handler):
    """Keeps what is logged, with the time at which it was."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = time.monotonic()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While the runtime's logs are listened to."""
        runtime_log = logging.getLogger("runtime")
        runtime_log.setLevel(logging.INFO)
        runtime_log.addHandler(self)
        yield
        runtime_log.removeHandler(self)

    def note(self, text: str) -> None:
        self.lines.append(f"{time.monotonic() - self._start:6.1f} s  {text}")


class ModelRunnerActor:
    """One rank. Its methods run in a few threads (REMOTE), since `wait_for_exit` never returns."""

    REMOTE: ClassVar[dict[str, Any]] = {"max_restarts": 0, "max_concurrency": 4}

    def __init__(self) -> None:
        self._phases = StartupLog()

    def load(self, config: EngineConfig, rank: int) -> ModelInfo:
        """Load this rank's share of the model; raises CallboardError if that fails."""
        self._rank = rank
        with self._phases.heard():
            from runtime.worker.runner import ModelRunner
            from runtime.worker.sources import CheckpointSource

            self._phases.note("libraries imported")
            path = resolve(config.model, config.revision, progress=False)
            self._runner: ModelRunner = ModelRunner(config, CheckpointSource(path), rank, config.tensor_parallel_size)
        freeze_garbage()
        self._phases.note("ready")
        return self._runner.info

    def phases(self) -> list[str]:
        """What `load` did, a line each, after the seconds since it began."""
        return self._phases.lines

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

    def location(self) -> tuple[str, int]:
        """Ray's id of this node, and this process's id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def wait_for_exit(self) -> None:
        """Never returns; a call to it fails when this process dies."""
        threading.Event().wait()
