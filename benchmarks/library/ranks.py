"""A tensor-parallel group's ranks without Ray: a process each, with its own GPU if there are any."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

from actors.runners.step_channel import SocketExecutor, serve_steps
from actors.wire.transport import connect
from benchmarks.library.models import head_of, spec_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.shard import Shard
from runtime.worker.sources import DummySource

_PHASE_S = 300.0  # limit for all ranks' answer


class RankGroupProcesses:
    """`executor` reaches the ranks like an engine's, and `info` describes their model: random weights of a shape. The
    ranks end with this process."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        """Raises the first error of a rank, or TimeoutError."""
        spawn = multiprocessing.get_context("spawn")
        size = config.tensor_parallel_size
        self.executor = SocketExecutor(size)
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=_live, args=(theirs, rank, model, config), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        offers: list[ModelInfo] = self._ask(self._answers())
        infos: list[ModelInfo] = self._ask(min(offer.num_kv_blocks for offer in offers))
        self.info = infos[0]
        for rank, pipe in enumerate(self._pipes):
            pipe.send(self.executor.address(rank))
        self.executor.accept()

    def _ask(self, argument: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(argument)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_PHASE_S):
                raise TimeoutError(f"Rank {rank} has not answered within {_PHASE_S:.0f} s.")
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def _live(engine: Connection, rank: int, model: str, config: EngineConfig) -> None:
    """A rank's life: the phases of runtime.worker.runner, then steps until the engine ends."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[rank]
    try:
        runner = build_runner(
            config, DummySource(spec_of(model), draft_head=head_of(model)), Shard(rank, config.tensor_parallel_size)
        )
        engine.send(runner.handle)
        engine.send(runner.load(engine.recv()))
        engine.send(runner.open(engine.recv()))
    except Exception as e:
        engine.send(e)
        raise
    serve_steps(connect(engine.recv()), runner, rank)
