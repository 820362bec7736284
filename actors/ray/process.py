"""Common parts of Callboard's processes: settings of the interpreter, and actors that load a model."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.loading.resolve import cache_folder
from runtime.spec.types import CallboardError

_FAULT = "callboard: cannot start:"
SWITCH_INTERVAL_S = 0.0005  # a thread that a step waits for must not wait 5 ms for another to give up the GIL


def freeze_garbage() -> None:
    """Called when a process has loaded what it keeps: the collector never walks that again. A full collection of all
    of Ray, Serve and a tokenizer's tables stops the process, and so every stream, for 100 ms."""
    gc.collect()
    gc.freeze()


def keep_bytecode() -> None:
    """Called before Ray is imported, for this process and its children. Where there are no compiled modules of Ray and
    Python may write none, each process of each start would compile a thousand of them: they are kept in our cache."""
    spec = importlib.util.find_spec("ray")
    source = str(spec and spec.origin)
    has_place = sys.pycache_prefix is not None or os.access(os.path.dirname(source), os.W_OK)
    if os.path.exists(importlib.util.cache_from_source(source)) or (has_place and not sys.dont_write_bytecode):
        return
    folder = str(cache_folder() / "bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # somebody's wish to have no files beside sources, which holds
    os.environ["PYTHONPYCACHEPREFIX"] = folder


def listen_on_loopback() -> None:
    """Serve replicas open an unauthenticated gRPC port on all interfaces, which nothing can configure; nobody beyond
    this machine needs it here."""
    from grpc.aio._server import Server

    add_insecure_port = Server.add_insecure_port

    def add_loopback_port(server: Server, address: str) -> int:
        return int(add_insecure_port(server, address.replace("[::]:", "127.0.0.1:")))

    Server.add_insecure_port = add_loopback_port


def lose_what_no_log_takes() -> None:
    """Called in Serve's replicas: what cannot be logged, on a full disk above all, is lost. Python would report it on
    stderr, which Serve has written to the same log: each line would hold up the replica's streams for a tenth of a
    second and end its request with a RecursionError."""
    logging.raiseExceptions = False


@contextmanager
def telling_faults(what: str) -> Iterator[None]:
    """Write why its body failed to the file of Ray's that is this process's stderr.

    Serve keeps what a replica logs or prints in memory, and its status has no exception of a health check."""
    try:
        yield
    except Exception:
        os.write(2, f"{_FAULT} {what}\n{traceback.format_exc()}".encode(errors="replace"))
        raise


def told_fault(logs: Path) -> str:
    """One sentence on the first fault that a process has told in the folder of Ray's logs; empty if there is none."""
    for path in sorted(logs.glob("worker-*.err")):
        _, mark, rest = path.read_text(errors="replace").partition(_FAULT)
        if mark and (lines := rest.strip().splitlines()) and not lines[-1].startswith(" "):
            reason = lines[-1].removeprefix(f"{CallboardError.__module__}.CallboardError: ").rstrip(".")
            return f"{lines[0].strip()} cannot start: {reason}; see {path}."
    return ""


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


class ModelActor:
    """An actor that loads a model. Its methods run in several threads, since `wait_for_exit` never returns."""

    def __init__(self) -> None:
        self._log = StartupLog()

    def phases(self) -> list[str]:
        """The steps of loading, a line each, after the seconds since it began."""
        return self._log.lines

    def location(self) -> tuple[str, int]:
        """Ray's id of this node, and this process's id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def wait_for_exit(self) -> None:
        """Never returns; a call to it fails when this process dies."""
        threading.Event().wait()
