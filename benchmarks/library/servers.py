"""HTTP servers in processes of their own: their start, their end, and the processes below them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from actors.ray.environment import quiet_port

ROOT = Path(__file__).parents[2]
_STOP_S, _POLL_S = 60.0, 0.02


class NotReady(RuntimeError):
    """A server ended, or did not become ready."""


@contextlib.contextmanager
def server(
    command: list[str], port: int, *, env: Mapping[str, str] | None = None, log: IO[bytes] | None = None,
    start_s: float = 1200.0,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """A server that answers /health, while the context lasts. Its output goes to `log`, or to standard error."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL, stdout=log or sys.stderr,
        stderr=log,
    )  # fmt: skip
    try:
        end = time.perf_counter() + start_s
        while process.poll() is None and time.perf_counter() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(_POLL_S)
        else:
            raise NotReady(f"{command[-1]} was not ready within {start_s:g} s; its exit code is {process.poll()}.")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def served(model: str, flags: list[str]) -> Iterator[str]:
    """The URL of a `callboard serve` of this model, while the context lasts."""
    port = quiet_port()
    command = [sys.executable, "-m", "serve_app.cli", "serve", model, "--port", str(port), *flags]
    with server(command, port):
        yield f"http://127.0.0.1:{port}"


def tree_of(root: int) -> list[int]:
    """A process and its descendants."""
    children = dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
