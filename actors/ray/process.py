"""Common parts of Callboard's processes: interpreter settings, fault reports, actors that load a model."""

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

from runtime.base.types import CallboardError
from runtime.loading.resolve import cache_folder

_FAULT = "callboard: cannot start:"
SWITCH_INTERVAL_S = 0.0005  # a thread waits 5 ms for the GIL by default, longer than some steps


def freeze_garbage() -> None:
    """Exclude all objects so far from garbage collection. Called when a process has loaded its long-lived objects.

    A full collection over Ray, Serve and a tokenizer's tables would stop all streams for 100 ms."""
    gc.collect()
    gc.freeze()


def keep_bytecode() -> None:
    """Store compiled modules in our cache folder if Ray's cannot be found or written.

    Otherwise each process would compile a thousand modules at each start. Called before Ray is imported, for this
    process and its children."""
    spec = importlib.util.find_spec("ray")
    source = str(spec and spec.origin)
    has_place = sys.pycache_prefix is not None or os.access(os.path.dirname(source), os.W_OK)
    if os.path.exists(importlib.util.cache_from_source(source)) or (has_place and not sys.dont_write_bytecode):
        return
    folder = str(cache_folder() / "bytecode")
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder
    # The user disabled .pyc files next to sources; a separate cache folder respects that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = folder


def listen_on_loopback() -> None:
    """Make gRPC servers of this process listen on loopback only.

    Serve replicas open an unauthenticated port on all interfaces, which is not configurable."""
    from grpc.aio._server import Server

    add_insecure_port = Server.add_insecure_port

    def add_loopback_port(server: Server, address: str) -> int:
        return int(add_insecure_port(server, address.replace("[::]:", "127.0.0.1:")))

    Server.add_insecure_port = add_loopback_port


def ignore_logging_errors() -> None:
    """Drop log lines that cannot be written, as on a full disk. Called in Serve's replicas.

    Python would report each on stderr, which Serve writes to the same log. Each line would then delay the replica's
    streams by a tenth of a second, and end its request with a RecursionError."""
    logging.raiseExceptions = False


@contextmanager
def report_faults(what: str) -> Iterator[None]:
    """Write the body's failure to this process's stderr, which is Ray's file.

    Serve keeps a replica's logs and prints in memory, and its status omits exceptions of health checks."""
    try:
        yield
    except Exception:
        os.write(2, f"{_FAULT} {what}\n{traceback.format_exc()}".encode(errors="replace"))
        raise


def reported_fault(logs: Path) -> str:
    """Return one sentence on the first fault in the folder of Ray's logs; empty if there is none."""
    for path in sorted(logs.glob("worker-*.err")):
        _, mark, rest = path.read_text(errors="replace").partition(_FAULT)
        if mark and (lines := rest.strip().splitlines()) and not lines[-1].startswith(" "):
            reason = lines[-1].removeprefix(f"{CallboardError.__module__}.CallboardError: ").rstrip(".")
            return f"{lines[0].strip()} cannot start: {reason}; see {path}."
    return ""


class StartupLog(logging.Handler):
    """Collects log lines with the seconds since its start."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = time.monotonic()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the log of the runtime during the body."""
        runtime_log = logging.getLogger("runtime")
        runtime_log.setLevel(logging.INFO)
        runtime_log.addHandler(self)
        yield
        runtime_log.removeHandler(self)

    def note(self, text: str) -> None:
        self.lines.append(f"{time.monotonic() - self._start:6.1f} s  {text}")


class ModelActor:
    """An actor that loads a model. Its methods run in several threads, because `wait_for_exit` never returns."""

    def __init__(self) -> None:
        self._log = StartupLog()

    def phases(self) -> list[str]:
        """Return the steps of loading, one a line, with the seconds since the start."""
        return self._log.lines

    def location(self) -> tuple[str, int]:
        """Return this node's Ray id, and this process's id."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def wait_for_exit(self) -> None:
        """Wait for ever. A call to it fails when this process dies."""
        threading.Event().wait()
