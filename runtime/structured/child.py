"""A process for work that may run away: it has a limit on its memory, and each piece of work a deadline.

`python -m runtime.structured.child FD MEMORY` is the process; `Child` is its owner's side.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from runtime.structured.pattern import GrammarError

_T = TypeVar("_T")
_NO_MEMORY = "is too complex: compiling it took more memory than the limit"


class Child:
    """One child, started at once. One thread at a time runs work in it; `kill` may come from any."""

    def __init__(self, memory: int, niceness: int = 0) -> None:
        """Starts a process with at most `memory` bytes of address space."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "runtime.structured.child", str(theirs.fileno()), str(memory), str(niceness)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        self._connection = Connection(ours.detach())

    def run(self, deadline_s: float, function: Callable[..., _T], *args: Any) -> _T:
        """`function(*args)`, all of which must be picklable. The process is killed when
        the deadline passes or its memory runs out: GrammarError then, as when the function itself raises one."""
        try:
            self._connection.send((deadline_s, function, args))
            if not self._connection.poll(deadline_s):
                raise GrammarError(f"is too complex: it took over {deadline_s:g} s to compile, the limit")
            result, error = self._connection.recv()
        except (EOFError, OSError):
            self.kill()
            raise GrammarError(_NO_MEMORY) from None
        except BaseException:
            self.kill()
            raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it; a second time does nothing."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _serve(connection: Connection) -> None:
    while True:
        deadline_s, function, args = connection.recv()
        # A limit of CPU time: if the owner is gone, nothing else ends this process.
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + deadline_s) + 2, resource.RLIM_INFINITY))
        try:
            connection.send((function(*args), None))
        except MemoryError:
            connection.send((None, GrammarError(_NO_MEMORY)))
        except Exception as e:  # the owner decides about it
            connection.send((None, e))


if __name__ == "__main__":
    fd, memory, niceness = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    with contextlib.suppress(EOFError, OSError):
        _serve(Connection(fd))
