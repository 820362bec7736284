"""Child processes for work that may run away, with a limit on memory and a deadline for each piece of work.

This module, run with FD MEMORY NICENESS, is the child. `Child` is the owner's side, `ChildPool` several.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from runtime import start
from runtime.base.types import CallboardError

_T = TypeVar("_T")
_NO_MEMORY = "took more memory than the limit"
_NO_TIME = "took more CPU time than the limit"
_START_S = 60.0  # most time for a child to start


class Overrun(CallboardError):
    """Work exceeded a limit. The text is a predicate; the caller adds the subject."""


class Child:
    """One child, started immediately. One thread at a time may run work in it; any thread may call `kill`."""

    def __init__(self, memory: int, niceness: int = 0) -> None:
        """Starts a process with at most `memory` bytes of address space."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                start.command("runtime.child", str(theirs.fileno()), str(memory), str(niceness)),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())

    def run(self, deadline_s: float, function: Callable[..., _T], *args: Any) -> _T:
        """Return `function(*args)`, or raise its exception. Function, arguments and result must be picklable.

        After the deadline, or out of memory, the process is killed and Overrun is raised."""
        try:
            self._connection.send((deadline_s, function, args))
            if not self._connection.poll(deadline_s):
                raise Overrun(f"took over {deadline_s:g} s, the limit")
            result, error = self._connection.recv()
        except (EOFError, OSError):
            self.kill()
            raise Overrun(_NO_TIME if self._process.returncode == -signal.SIGXCPU else _NO_MEMORY) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(error, MemoryError):
            raise Overrun(_NO_MEMORY)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process. Later calls are ignored."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class ChildPool:
    """Up to `max_children` children for work of one kind. From the first work on, an idle one is kept ready."""

    def __init__(
        self, max_children: int, memory: int, niceness: int, warm_up: Callable[..., object], *args: Any
    ) -> None:
        """`warm_up(*args)` is the first work of each child, such as imports."""
        self._max_children, self._memory, self._niceness = max_children, memory, niceness
        self._warm_up = (warm_up, *args)
        self._idle: queue.Queue[Child | None] = queue.Queue()  # its timeouts end, as EngineLoop explains
        self._lock = threading.Lock()
        self._num_children = 0  # idle, at work or being started
        self._at_work: set[Child] = set()
        self._closed = False

    def start(self) -> None:
        """Start a child before the first work."""
        with self._lock:
            if self._idle.empty() and self._num_children < self._max_children and not self._closed:
                self._num_children += 1
                try:
                    threading.Thread(target=self._add, daemon=True).start()
                except RuntimeError:  # the system has run out of threads
                    self._lose_child()

    def run(self, deadline_s: float, function: Callable[..., _T], *args: Any) -> _T:
        """Like Child.run, from any thread. The deadline counts from the time when a child is free."""
        self.start()
        try:
            while (child := self._idle.get(timeout=_START_S)) is not None and not child.is_alive:
                self._give_back(child)
        except queue.Empty:
            child = None
        if child is None:
            raise Overrun("found no process to run in")
        self.start()
        self._at_work.add(child)
        try:
            return child.run(deadline_s, function, *args)
        finally:
            self._at_work.discard(child)
            self._give_back(child)

    def close(self) -> None:
        """End all children and their work."""
        self._closed = True
        for busy in self._at_work.copy():
            busy.kill()
        while not self._idle.empty():
            if (child := self._idle.get()) is not None:
                child.kill()
        for _ in range(self._max_children):
            self._idle.put(None)

    def _add(self) -> None:
        child: Child | None = None
        try:
            child = Child(self._memory, self._niceness)
            child.run(_START_S, *self._warm_up)
        except Exception:  # too many processes, or too little memory
            if child is not None:
                child.kill()
            with self._lock:
                self._lose_child()
        else:
            self._give_back(child)

    def _lose_child(self) -> None:
        """Uncount a child that did not start. The caller holds the lock."""
        self._num_children -= 1
        if not self._num_children:
            self._idle.put(None)  # wake the work that waits for this child, as there is no other

    def _give_back(self, child: Child) -> None:
        if child.is_alive and not self._closed:
            self._idle.put(child)
            return
        child.kill()
        with self._lock:
            self._num_children -= 1
        self.start()


def _serve(connection: Connection) -> None:
    while True:
        deadline_s, function, args = connection.recv()
        # The CPU time limit ends this process even if the owner is gone.
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + deadline_s) + 2, resource.RLIM_INFINITY))
        try:
            connection.send((function(*args), None))
        except Exception as e:  # the owner handles it
            connection.send((None, e))


if __name__ == "__main__":
    fd, memory, niceness = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    os.nice(niceness)
    with contextlib.suppress(EOFError, OSError):
        _serve(Connection(fd))
