"""Groups of ranks as processes, for tests of their communication."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from runtime.base.types import CallboardError
from runtime.kernels.collectives.communicator import Communicator

_START_S = 600  # at most, until a process has imported torch


@contextlib.contextmanager
def communicator_processes(
    size: int, make: Callable[..., Communicator], run: Callable[[Any], object], **options: Any
) -> Iterator[list[Connection]]:
    """Ranks `make(rank, size, **options)`, each in a process that connects it and calls `run` with it.

    The result of `run`, or the sentence of the CallboardError that it raises, is the `answer_of` a connection."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__, run.__module__])  # torch is imported once
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=_live, args=(theirs, make, run, rank, size, options), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for rank, (_, theirs) in zip(ranks, pipes, strict=True):
            rank.start()
            theirs.close()
        handles = [answer_of(ours) for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(handles)
        yield [ours for ours, _ in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def answer_of(rank: Connection) -> Any:
    assert rank.poll(_START_S)
    return rank.recv()


def _live(
    connection: Connection,
    make: Callable[..., Communicator],
    run: Callable[[Any], object],
    rank: int,
    size: int,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    ranks = make(rank, size, **options)
    connection.send(ranks.handle)
    with ThreadPoolExecutor(1) as pool:  # an actor's calls may come in any thread
        pool.submit(ranks.connect, connection.recv()).result()
    try:
        connection.send(run(ranks))
    except CallboardError as e:
        connection.send(str(e))
    connection.recv()  # until it is killed
