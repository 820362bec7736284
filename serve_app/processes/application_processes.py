"""A running application's processes on this machine, for failure tests and the doctor.

The listener on the application's port leads to its Ray, and titles lead to its processes, all through /proc. Before
each signal the process is checked again: it must belong to this user and that Ray session, and be Callboard's
actor."""

from __future__ import annotations

import ipaddress
import os
import random
import re
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from runtime.base.types import CallboardError
from serve_app.processes.process_tree import children_of_all
from serve_app.settings import HttpSettings

ROLES = ("engine", "runner", "draft", "supervisor", "front")
_TITLE = re.compile(  # titles of Callboard's own actors (actors/ray/names.py) and Serve's replicas
    r"ray::(?:Callboard:(.+):(engine|runner|draft):(\w+)(?::(\d+))?|ServeReplica:(.+):(Engine|Front)\w*)(?:\W.*)?"
)
_REPLICA_LOG = re.compile(r"/logs/serve/replica_.*\.log")  # its name ends with the id, which is the engine's


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an application."""

    role: str
    engine: str  # its engine's id; empty for a front, "shared" for a draft that several engines share
    pid: int
    application: str
    session: str
    rank: int | None = None  # a runner's rank
    log: str = ""  # its log file

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process, by its title and its open log files; None if it is not an actor of Callboard.

        Raises OSError if it has ended, or belongs to another user."""
        place = Path(f"/proc/{pid}")
        title = _TITLE.fullmatch((place / "cmdline").read_bytes().decode(errors="replace").strip("\0 "))
        session, logs, output = os.readlink(place / "fd/1").partition("/logs/")
        if title is None or not logs:
            return None
        application, role, engine, rank, serves, deployment = title.groups()
        if role is not None:
            log = f"{session}{logs}{output.removesuffix('.out')}.err"
            return cls(role, engine, pid, application, session, None if rank is None else int(rank), log)
        log = next(filter(_REPLICA_LOG.search, _descriptors(pid)), "")
        if deployment == "Front":
            return cls("front", "", pid, serves, session, None, log)
        return cls("supervisor", log.rpartition("_")[2].removesuffix(".log"), pid, serves, session, None, log)

    def send(self, number: signal.Signals) -> None:
        """Check the process and send it a signal.

        Raises CallboardError if the check fails, and ProcessLookupError if the process has ended. Check and signal use
        one process descriptor, which cannot refer to a later process with the same id."""
        descriptor = os.pidfd_open(self.pid)
        try:
            check(self)
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def check(process: Process) -> None:
    """Raise CallboardError unless the process belongs to this user and its Ray session, and has its role."""
    found = None
    try:
        if Path(f"/proc/{process.pid}").stat().st_uid != os.getuid():
            raise CallboardError(f"Process {process.pid} belongs to another user; Callboard ends only your own.")
        with suppress(PermissionError):
            found = Process.of(process.pid)
    except FileNotFoundError:
        raise ProcessLookupError(process.pid) from None
    if found is None or replace(found, log="") != replace(process, log=""):
        raise CallboardError(
            f"Process {process.pid} is not a {process.role} of the application {process.application!r}; it received "
            "no signal."
        )


# ---- a server by its port --------------------------------------------------------------------------------------------

SERVER_NAME = "callboard/{host}:{port}"  # name of the Unix socket that each `callboard serve` holds


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """The main process of a `callboard serve`."""

    pid: int
    descriptor: int

    def stop(self) -> None:
        """Let running requests end, as Ctrl-C does, and wait for the end of the process."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGTERM)
            select.select([self.descriptor], [], [])
        os.close(self.descriptor)


def server_at(port: int) -> ServerProcess | None:
    """Return this user's `callboard serve` on a port of this machine; None without one."""
    prefix, suffix = f"@{SERVER_NAME.partition('{')[0]}", f":{port}"
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f"socket:[{f[6]}]" for f in lines if len(f) > 7 and f[7].startswith(prefix) and f[7].endswith(suffix)}
    holders = [pid for pid in _own_processes() if names & _descriptors(pid)] if names else []
    children = children_of_all()
    for pid in set(holders).difference(*(children.get(pid, []) for pid in holders)):  # forks hold it, too
        with suppress(ProcessLookupError):
            return ServerProcess(pid, os.pidfd_open(pid))
    return None


# ---- from a port to its Ray ------------------------------------------------------------------------------------------


def local_port(url: str) -> int:
    """Return the port of a URL on this machine's loopback; raises CallboardError for any other."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as e:
        raise CallboardError(f"{url!r} is not a server's URL ({e}); give one such as http://127.0.0.1:8000.") from e
    if not all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found):
        raise CallboardError(
            f"{url!r} is not on this machine's loopback, and Callboard ends only processes of this machine; "
            "give a URL such as http://127.0.0.1:8000."
        )
    return int(parts.port or 80)


def listeners(port: int) -> list[int]:
    """Return this user's processes that listen on a port; raises CallboardError without a listener of this user."""
    users: dict[str, int] = {}  # user by inode
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    users[f"socket:[{fields[9]}]"] = int(fields[7])
    if not users:
        raise CallboardError(f"Nothing listens on port {port} of this machine; start `callboard serve` first.")
    if set(users.values()) != {os.getuid()}:
        raise CallboardError(f"Port {port} belongs to another user; Callboard ends only your own processes.")
    return [pid for pid in _own_processes() if users.keys() & _descriptors(pid)]


def session_behind(port: int) -> str:
    """Return the session folder of the Ray behind a port: the listener's nearest ancestor with a Ray."""
    children = children_of_all()
    parents = {child: parent for parent, pids in children.items() for child in pids}
    raylets = {pid for pid in _own_processes() if _program(pid) == "raylet"}
    for pid in listeners(port):
        ancestor: int | None = pid
        while ancestor is not None and ancestor > 1:
            found = {ancestor} & raylets or raylets & set(_below(ancestor, children))
            if len(found) == 1:
                return _session_of(found.pop())
            ancestor = None if found else parents.get(ancestor)
    raise CallboardError(f"Port {port} is not Ray Serve's on this machine; give a Callboard server's URL.")


def _session_of(raylet: int) -> str:
    command = Path(f"/proc/{raylet}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in command)["session_dir"]


def _own_processes() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if path.stat().st_uid == os.getuid():
                yield int(path.name)


def _descriptors(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(path))
    return found


def _program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []):
        yield child
        yield from _below(child, children)


# ---- from a Ray to its processes -------------------------------------------------------------------------------------


def processes_of(session: str, application: str | None = None) -> list[Process]:
    """Return this user's processes in a Ray session, one application's or all, by role, engine and rank.

    An empty session means all."""
    found = []
    for pid in _own_processes():
        with suppress(OSError):  # it has ended
            process = Process.of(pid)
            if process is not None and session in ("", process.session) and application in (None, process.application):
                found.append(process)
    return sorted(found, key=lambda p: (p.session, p.application, ROLES.index(p.role), p.engine, p.rank or 0))


def the_application(wanted: str | None, session: str) -> str:
    """Return the name of the application on a Ray session, or the `wanted` one.

    Raises CallboardError without such an application, or with several and no `wanted` one."""
    names = sorted({process.application for process in processes_of(session) if process.role == "engine"})
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    known = ", ".join(names) or "none"
    raise CallboardError(f"The application is ambiguous; name one with --application (running: {known}).")


def kill_any(application: str, role: str, settings: HttpSettings) -> Process:
    """Kill a random process with this role on this machine.

    Raises CallboardError without one, or if clients on other machines could do this without a key."""
    from actors.ray.private import http_host

    settings.check_chaos(http_host())
    session = os.readlink("/proc/self/fd/1").partition("/logs/")[0]  # Ray's log of this front
    found = [process for process in processes_of(session, application) if process.role == role]
    random.shuffle(found)
    for process in found:
        with suppress(ProcessLookupError):  # it has ended
            process.send(signal.SIGKILL)
            return process
    raise CallboardError(f"This machine runs no {role} of the server now, so none was killed; try again in a second.")
