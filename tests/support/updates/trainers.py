"""Trainers for tests, each in a process of its own that can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from runtime.updates.sending import NcclSender
from tests.support.updates.socket_group import SocketGroup, make_unique_id

START_S = 600  # at most, until a process has imported torch


@contextlib.contextmanager
def trainer(run: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that calls `run(connection, *args)`, with the other end of its connection."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once; no process inherits a use of CUDA
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def answer_of(connection: Connection) -> Any:
    assert connection.poll(START_S)
    return connection.recv()


def send_with(
    connection: Connection, world_size: int, updates: list[dict[str, torch.Tensor]], options: dict[str, Any]
) -> None:
    """Connect over sockets, and then send each update when a message comes."""
    torch.set_num_threads(1)
    sender = NcclSender(
        "127.0.0.1", world_size, device=torch.device("cpu"), make_group=SocketGroup, make_unique_id=make_unique_id,
        **options,
    )  # fmt: skip
    connection.send(sender.init_info)
    sender.connect()
    for update in updates:
        connection.recv()
        sender.send(update.items())
    connection.send("sent")
    connection.recv()  # until it is killed


def connect_and_wait(connection: Connection) -> None:
    """Connect a group of two, and send nothing."""
    send_with(connection, 2, [{}], {})


def publish_bytes(connection: Connection, published: bytes) -> None:
    """Serve a store that has other bytes than an id."""
    from runtime.updates.transports import rendezvous, unique_id

    listening = rendezvous.listening_socket("127.0.0.1", 0)
    connection.send(listening.getsockname()[1])
    store = rendezvous.serve(listening, "127.0.0.1", 2, 60)
    if published:
        store.set(unique_id.KEY, published)
    time.sleep(600)
