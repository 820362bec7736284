"""A process that imports the modules of Ray's workers once, and forks for each worker that Ray starts.

Ray, Serve and torch take about three core seconds to import, and a server has seven workers. Ray
gets the command from `start` as its Python. For a worker, the command sends arguments, environment and standard streams
to the fork server, and lives until the fork ends. All other processes run in their own Python: workers of other
jobs or with other Serve settings, and programs that are not workers. Once the fork server has ended, every process
does.

A raylet aborts if its agents have not written their ports to files after 15 s, and a busy machine needs longer to start
them. So the command assigns the ports and writes these files itself, and the raylet does not wait.

The command runs this file without any package, so the top of the file imports only the standard library."""

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
from typing import NamedTuple, NoReturn

SERVE_MODULES = (  # the controller, the proxies and the replicas
    "ray.serve._private.controller",
    "ray.serve._private.haproxy",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
)
_WORKER = "/ray/_private/workers/default_worker.py"
_AGENTS = {  # names of port files by an agent's options
    "/ray/dashboard/agent.py": {
        "grpc-port": "metrics_agent_port",
        "metrics-export-port": "metrics_export_port",
        "listen-port": "dashboard_agent_listen_port",
    },
    "/ray/_private/runtime_env/agent/main.py": {"runtime-env-agent-port": "runtime_env_agent_port"},
}
_MAX_MESSAGE_BYTES = 1 << 20
# Ray's library copies these into its configuration when it is loaded, here before Ray runs. A cluster's first job has
# this number. A worker ends with the process RAY_RAYLET_PID. Here that is the driver, which itself ends with the raylet
# (`Parent.end_with` in serve_app/processes/process_tree.py).
_FIRST_JOB, _NO_JOB = "01000000", "ffffffff"


def start(folder: str, modules: Sequence[str]) -> str:
    """Start the fork server for the Ray that this process will start. Returns the command for Ray to use as its Python.

    The command's files are in `folder`. Importing `modules` must not use a GPU or start threads."""
    import subprocess

    from actors.ray.environment import quiet_port
    from runtime.start import command as command_of

    command, address = Path(folder, "python"), str(Path(folder, "fork-server"))
    ports: dict[int, None] = {}  # all agents' ports
    while len(ports) < sum(map(len, _AGENTS.values())):
        ports[quiet_port()] = None
    program = [sys.executable, "-I", "-S", __file__, "run", address, sys.executable, json.dumps(list(ports))]
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


# ---- the command that Ray runs as Python ----------------------------------------------------------------------------


def _run(address: str, python: str, ports: str, *arguments: str) -> int:
    """Run Python with these arguments, in a fork of the server if possible. Returns the fork's exit code.

    `ports` are free ones for the agents, as JSON."""
    script = next((at for at, argument in enumerate(arguments) if not argument.startswith("-")), 0)
    if arguments[script].endswith(_WORKER):
        request = json.dumps([arguments[script:], os.getcwd(), dict(os.environ)]).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(address)
            socket.send_fds(server, [request], [0, 1, 2])
            if server.recv(1):  # the server has forked
                return int(server.recv(4) or 1)
    os.execv(python, [python, *_with_ports(arguments, arguments[script], json.loads(ports))])


def _with_ports(arguments: Sequence[str], script: str, ports: Sequence[int]) -> list[str]:
    """Write an agent's ports to their files and append them to its arguments. Other programs keep their arguments."""
    given = dict(argument[2:].partition("=")[::2] for argument in arguments)
    every = [(agent, *names) for agent, options in _AGENTS.items() for names in options.items()]
    added = []
    for (agent, option, file), port in zip(every, ports, strict=True):
        if script.endswith(agent):
            path = Path(given["session-dir"], f"{file}_{given['node-id']}")
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(str(port))
            unfinished.rename(path)
            added.append(f"--{option}={port}")  # the last equal option counts
    return [*arguments, *added]


# ---- the server -----------------------------------------------------------------------------------------------------


class _Fork(NamedTuple):
    pid: int
    end: int  # a descriptor, readable when the process has ended
    command: socket.socket  # the waiting command's socket; readable when the command has ended


class _ForkServer:
    """Forks at the request of commands."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._forks: dict[int, _Fork] = {}  # forks by both descriptors
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self, modules: Sequence[str]) -> list[str]:
        """Serve commands; returns only in the forks, each with its worker's arguments.

        A request during the imports waits only for the current module."""
        remaining = list(modules)
        while True:
            for descriptor, _ in self._poll.poll(0 if remaining else None):
                if descriptor in self._forks:
                    self._end(self._forks[descriptor], descriptor)
                elif descriptor == self._listener.fileno() and (arguments := self._accept()) is not None:
                    return arguments
            if remaining:
                try:
                    importlib.import_module(module := remaining.pop(0))
                except ModuleNotFoundError as e:
                    if e.name != module:
                        raise
                    print(f"This Ray lacks {module}, so its workers start more slowly.", file=sys.stderr)
                gc.freeze()  # a collection in a fork would write to, and so copy, all this memory

    def _accept(self) -> list[str] | None:
        command = self._listener.accept()[0]
        content, streams, _, _ = socket.recv_fds(command, _MAX_MESSAGE_BYTES, 3)
        arguments, directory, environment = json.loads(content or '["", "", {}]')  # empty if the command has ended
        pid = _fork() if _suits(environment) else None
        if pid == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for each in (*streams, *self._forks, command.fileno()):
                os.close(each)
            os.setpgid(0, 0)  # Ray does so too, and kills a worker's whole group
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
            with suppress(OSError):  # the command has ended; the fork ends next
                command.send(b"+")
        return None

    def _end(self, fork: _Fork, descriptor: int) -> None:
        """Reap a fork after its own end or the end of its command."""
        if descriptor != fork.end:
            os.kill(fork.pid, signal.SIGKILL)  # its id is still valid: it was not waited for
        code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        for each in (fork.end, fork.command.fileno()):
            del self._forks[each]
            self._poll.unregister(each)
        with suppress(OSError):
            fork.command.send(str(code % 256).encode())
        fork.command.close()
        os.close(fork.end)


def _fork() -> int | None:
    """Like os.fork, but None if the machine cannot start a process now. The command then starts Python itself."""
    try:
        return os.fork()
    except OSError:
        return None


def _suits(environment: dict[str, str]) -> bool:
    """True if a process with this environment would have the same imports.

    Serve reads its settings when it is imported, and Ray's library reads the job."""
    own, wanted = ({k: v for k, v in e.items() if k.startswith("RAY_SERVE_")} for e in (os.environ, environment))
    return own == wanted and environment.get("RAY_JOB_ID") in (_FIRST_JOB, _NO_JOB)


def _serve(listener: socket.socket, modules: Sequence[str]) -> list[str]:
    import ctypes

    from actors.ray.private import draw_class_ids_from_system

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the driver, as Ray's daemons do
    # Ray's library seeds its id generator at its first use. That must happen in each fork, or all forks would draw
    # the same ids. But modules with actors draw an id for each class at import, so these ids come from the system.
    draw_class_ids_from_system()
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
