"""Runners of a group in processes of their own, behind the interface of one runner."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.shard import Shard
from runtime.core.plan import StepPlan, StepResult
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource, ModelSource

_ANSWER_S = 90  # at most; also until a process has imported torch


class RankProcesses:
    """Processes that can be ranks of one group after another."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def open(self, config: EngineConfig, source: ModelSource | Path) -> "RankedRunner":
        """A group of `tensor_parallel_size` ranks, through all phases of its start. A path names a checkpoint."""
        size = config.tensor_parallel_size
        handles = self.ask(size, "join", *((config, source, Shard(rank, size)) for rank in range(size)))
        offers = self.ask(size, "load", *((handles,) for _ in range(size)))
        num_blocks = min(offer.num_kv_blocks for offer in offers)
        assert {replace(offer, num_kv_blocks=num_blocks) for offer in offers} == {offers[0]}
        infos: list[ModelInfo] = self.ask(size, "open", *((num_blocks,) for _ in range(size)))
        return RankedRunner(self, size, infos[0])

    def ask(self, size: int, method: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Call a method of the first `size` processes at the same time; raises the first error."""
        for connection, own in zip(self.connections[:size], arguments, strict=True):
            connection.send((method, own))
        answers = []
        for connection in self.connections[:size]:
            assert connection.poll(_ANSWER_S)
            answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


class RankedRunner:
    """A `Runner` of all ranks, which must sample the same tokens."""

    asynchronous = False

    def __init__(self, processes: RankProcesses, size: int, info: ModelInfo) -> None:
        self._processes, self.size, self.info = processes, size, info

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._processes.ask(self.size, method, *([arguments] * self.size))

    def reset(self) -> None:
        self.ask("reset")

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        first, *others = self.ask("execute", plan)
        assert all(np.array_equal(other.token_ids, first.token_ids) for other in others)
        return first


@contextlib.contextmanager
def rank_processes(size: int) -> Iterator[RankProcesses]:
    """`size` processes that end with the context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [context.Process(target=_live, args=(theirs,), daemon=True) for _, theirs in pipes]
    try:
        for rank, (_, theirs) in zip(ranks, pipes, strict=True):
            rank.start()
            theirs.close()
        yield RankProcesses([ours for ours, _ in pipes])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _live(connection: Connection) -> None:
    """A rank's process: it has one runner at a time and calls its methods by name."""
    runner: ModelRunner | None = None
    while True:
        method, arguments = connection.recv()
        try:
            if method == "join":
                config, source, shard = arguments
                source = CheckpointSource(source) if isinstance(source, Path) else source
                runner = build_runner(config, source, shard)
                connection.send(runner.handle)
            elif method == "attribute":
                connection.send(attrgetter(".".join(arguments))(runner))
            else:
                connection.send(attrgetter(method)(runner)(*arguments))
        except Exception as e:  # of any kind, for the test's process
            connection.send(e)
