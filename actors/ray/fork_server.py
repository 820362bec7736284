"""A process that imports once what Ray's workers need, and is forked for each worker that Ray starts.

The modules of Ray, Serve and torch take some three seconds of a core to import, and a server has seven workers. Ray is
told that the command of `start` is its Python: for a worker that sends the arguments, the environment and the standard
streams to the fork server and lives as long as the fork does. Workers of other jobs, workers with other settings of
Serve, and whatever is no worker run in a Python of their own, and so do all when the fork server is gone.

The command runs this file without any package, so only the standard library is imported at its top.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_WORKER = "/ray/_private/workers/default_worker.py"
_MAX_MESSAGE_BYTES = 1 << 20
# Ray's library copies these into its configuration when it is loaded, here before Ray runs. A cluster's first job has
# this number. A worker ends when the process with RAY_RAYLET_PID does; the driver, which is named instead of the
# raylet, ends with it (`Parent.end_with` in serve_app/processes/process_tree.py).
_FIRST_JOB, _NO_JOB = "01000000", "ffffffff"


def start(folder: str, modules: Sequence[str]) -> str:
    """Starts the fork server of the Ray that this process is about to start. Returns the command that is to be Ray's
    Python, whose files are in `folder`. `modules` must neither use a GPU nor start threads when they are imported."""
    import subprocess

    from runtime.start import command as command_of

    command, address = Path(folder, "python"), str(Path(folder, "fork-server"))
    program = [sys.executable, "-I", "-S", __file__, "run", address, sys.executable]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
    command.chmod(0o700)
    settings = {"RAY_JOB_ID": _FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(128)
        subprocess.Popen(
            command_of("actors.ray.fork_server", "serve", str(listener.fileno()), *modules),
            pass_fds=[listener.fileno()], env=os.environ | settings,
        )  # fmt: skip
    return str(command)


# ---- the command that is Ray's Python -------------------------------------------------------------------------------


def _run(address: str, python: str, *arguments: str) -> int:
    """Runs Python with these arguments in a fork of the server if it can; returns the fork's exit code."""
    script = next((at for at, argument in enumerate(arguments) if not argument.startswith("-")), 0)
    if arguments[script].endswith(_WORKER):
        asked = json.dumps([arguments[script:], os.getcwd(), dict(os.environ)]).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [asked], [0, 1, 2])
            if server.recv(1):  # there is a fork
                return int(server.recv(4) or 1)
    os.execv(python, [python, *arguments])


# ---- the server -----------------------------------------------------------------------------------------------------


class _Fork(NamedTuple):
    pid: int
    end: int  # a descriptor that is readable when the process has ended
    command: socket.socket  # of the command that waits for it; readable when that has ended


class _ForkServer:
    """Forks for the commands that ask."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._forks: dict[int, _Fork] = {}  # by both descriptors
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self, modules: Sequence[str]) -> list[str]:
        """Returns in the forks, with the arguments of the worker that each one is. Who asks while modules are imported
        waits for the current one alone."""
        remaining = list(modules)
        while True:
            for descriptor, _ in self._poll.poll(0 if remaining else None):
                if descriptor in self._forks:
                    self._end(self._forks[descriptor], descriptor)
                elif descriptor == self._listener.fileno() and (arguments := self._accept()) is not None:
                    return arguments
            if remaining:
                importlib.import_module(remaining.pop(0))
                gc.freeze()  # a collection in a fork would write to all of this memory, and so copy it

    def _accept(self) -> list[str] | None:
        command = self._listener.accept()[0]
        content, streams, _, _ = socket.recv_fds(command, _MAX_MESSAGE_BYTES, 3)
        arguments, directory, environment = json.loads(content or '["", "", {}]')  # nothing: it has ended already
        pid = _fork() if _suits(environment) else None
        if pid == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for each in (*streams, *self._forks, command.fileno()):
                os.close(each)
            os.setpgid(0, 0)  # as Ray does: it ends a worker's whole group
            os.chdir(directory)
            os.environ.clear()
            os.environ.update(environment)
            return list(arguments)
        for stream in streams:
            os.close(stream)
        if pid is not None:
            fork = _Fork(pid, os.pidfd_open(pid), command)
            for each in (fork.end, command.fileno()):
                self._forks[each] = fork
                self._poll.register(each, select.POLLIN)
            with suppress(OSError):  # the command has ended: the fork does next
                command.send(b"+")
        return None

    def _end(self, fork: _Fork, descriptor: int) -> None:
        """A fork has ended, or its command has, with which it ends."""
        if descriptor != fork.end:
            os.kill(fork.pid, signal.SIGKILL)  # its id is still its own: nobody has waited for it
        code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        for each in (fork.end, fork.command.fileno()):
            del self._forks[each]
            self._poll.unregister(each)
        with suppress(OSError):
            fork.command.send(str(code % 256).encode())
        fork.command.close()
        os.close(fork.end)


def _fork() -> int | None:
    """As os.fork; None if the machine has no room for another process now. The command then tries it itself."""
    try:
        return os.fork()
    except OSError:
        return None


def _suits(environment: dict[str, str]) -> bool:
    """True if a process with this environment would have imported what is imported here: Serve reads its settings when
    it is imported, and Ray's library the job."""
    mine, asked = ({k: v for k, v in e.items() if k.startswith("RAY_SERVE_")} for e in (os.environ, environment))
    return mine == asked and environment.get("RAY_JOB_ID") in (_FIRST_JOB, _NO_JOB)


def _serve(listener: socket.socket, modules: Sequence[str]) -> list[str]:
    import ctypes
    from types import SimpleNamespace

    import ray

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the driver, as Ray's daemons do
    # Ray's library seeds its generator of ids at the first use. That must be in the forks, or they would draw the same
    # ids; but modules with actors draw one for each class when they are imported.
    actor: Any = ray.actor
    actor.ActorClassID = SimpleNamespace(from_random=lambda: ray.ActorClassID(os.urandom(ray.ActorClassID.size())))
    return _ForkServer(listener).serve(modules)


def _main(what: str, *arguments: str) -> NoReturn:
    if what == "run":
        sys.exit(_run(*arguments))
    import runpy

    with socket.socket(fileno=int(arguments[0])) as listener:
        sys.argv = _serve(listener, arguments[1:])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _main(*sys.argv[1:])
