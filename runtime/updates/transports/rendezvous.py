"""TrainerStore: how the ranks in a trainer's NCCL group find each other.

Rank 0 serves torch's TCPStore, as vLLM's StatelessProcessGroup does, and the others connect to it. Each rank adds
itself to a count when it connects, and rank 0 waits for all. Then rank 0 writes the group's id."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from runtime.base.types import CallboardError
from runtime.updates.transports.unique_id import KEY, pickled_unique_id, unique_id_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # absent from some builds

_T = TypeVar("_T")
_LOOK_S = 0.02  # seconds between two looks at a thread or a key
_WATCH_S = 1.0  # seconds between two looks at the trainer

Check = Callable[[], None]  # raises CallboardError when the caller should stop waiting


class TrainerStore:
    """A connection to the trainer's store. While it is open, `lost_s` shows whether the trainer lives."""

    def __init__(self, store: TCPStore, address: str) -> None:
        self._store, self.address = store, address
        self._lost_at: float | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._look, name="trainer-store", daemon=True)

    @classmethod
    def join(cls, address: str, port: int, world_size: int, timeout_s: float, check: Check) -> TrainerStore:
        """Connect to the trainer's store. Raises CallboardError after the time limit, and what `check` raises."""
        store_class = _store_class()

        def connect() -> TCPStore:
            return store_class(
                host_name=address,
                port=port,
                world_size=world_size,  # counts this rank; rank 0 waits for all
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
                use_libuv=False,
            )

        where = f"{address}:{port}"
        try:
            store = in_thread(connect, timeout_s, check, f"The trainer's store at {where}")
        except RuntimeError as e:  # torch's DistError among them
            raise CallboardError(
                f"The trainer's store at {where} cannot be reached ({first_line(e)}); "
                "start the trainer's side, and check master_address and master_port."
            ) from None
        return cls(store, where)

    def unique_id(self, timeout_s: float, check: Check) -> bytes:
        """Wait for the group's id and return it; from then on the trainer is watched."""
        deadline = time.monotonic() + timeout_s
        try:
            while not self._store.check([KEY]):
                check()
                if time.monotonic() > deadline:
                    raise CallboardError(
                        f"The trainer at {self.address} wrote no id of its NCCL group within {timeout_s:.1f} s; "
                        "check that world_size counts the trainer and all runners."
                    )
                time.sleep(_LOOK_S)
            pickled = self._store.get(KEY)
        except RuntimeError as e:
            raise CallboardError(
                f"The trainer at {self.address} closed its store ({first_line(e)}) before the group was complete; "
                "start it again."
            ) from None
        unique_id = unique_id_of(bytes(pickled))
        self._watch.start()
        return unique_id

    @property
    def lost_s(self) -> float:
        """Seconds since the store was found closed; 0 while it answers."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_WATCH_S):
            try:
                self._store.check([KEY])
            except RuntimeError:
                self._lost_at = time.monotonic()
                return


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket for `serve`, bound already, so that no other process can take its port. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError as e:
        listening.close()
        raise CallboardError(f"{address}:{port} cannot be bound ({e.strerror}); choose another.") from None
    listening.listen()
    return listening


def serve(listening: socket.socket, address: str, world_size: int, timeout_s: float) -> TCPStore:
    """Serve the store of rank 0. Returns when all ranks are connected. Raises CallboardError after the time limit."""
    port = listening.getsockname()[1]
    try:
        return _store_class()(
            host_name=address,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            use_libuv=False,
            master_listen_fd=listening.detach(),
        )
    except RuntimeError as e:
        raise CallboardError(
            f"Not all {world_size - 1} runners connected to {address}:{port} within {timeout_s:g} s ({first_line(e)}); "
            "check world_size, and that they reach the address."
        ) from None


def _store_class() -> type[TCPStore]:
    if not dist.is_available():
        raise CallboardError("This torch has no torch.distributed, which NCCL transfers need; install another one.")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store_class: type[TCPStore] = TCPStore
    return store_class


def publish(store: TCPStore, unique_id: bytes) -> None:
    store.set(KEY, pickled_unique_id(unique_id))  # type: ignore[arg-type]  # it takes bytes, too


def in_thread(function: Callable[[], _T], timeout_s: float, check: Check, what: str) -> _T:
    """Return `function()`. Raises CallboardError after the time limit, and what `check` or the function raises.

    A call that cannot be interrupted stays behind in its thread, which ends with the process."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # A function with its own time limit has a better sentence: it gets a little longer.
    deadline = time.monotonic() + timeout_s + 5
    while thread.is_alive():
        thread.join(_LOOK_S)
        check()
        if time.monotonic() > deadline:
            raise CallboardError(f"{what} did not answer within {timeout_s:g} s; start the trainer's side.")
    if errors:
        raise errors[0]
    return results[0]


def first_line(error: BaseException) -> str:
    """The first line of torch's error; the other lines are a C++ stack."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(" .")
