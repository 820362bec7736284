"""The processes of a running application on this machine, for tests of failures.

The listener on the application's port leads to its Ray through /proc, and Ray's actors report their processes. Before
each signal the process is checked again: it must belong to this user and that Ray session, and be an actor of
Callboard.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from runtime.spec.types import CallboardError
from serve_app.processes.process_tree import children_of_all
from serve_app.settings import HttpSettings

ROLES = {  # role of a process -> its title by Ray
    "engine": "ray::EngineActor",
    "runner": "ray::ModelRunnerActor",
    "draft": "ray::DraftActor",
    "supervisor": "ray::ServeReplica:{application}:Engine",
    "front": "ray::ServeReplica:{application}:Front",
}
_CALL_S = 10.0  # for actors to report their processes


class Raylet(NamedTuple):
    """Ray's daemon on this machine."""

    pid: int
    gcs_address: str
    session: str  # its folder

    @classmethod
    def of(cls, pid: int) -> Raylet:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        values = dict(argument.removeprefix("--").partition("=")[::2] for argument in command)
        return cls(pid, values["gcs-address"], values["session_dir"])


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an application."""

    role: str
    engine: str  # id of its engine; empty for a front
    pid: int
    application: str
    session: str

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
    place = Path(f"/proc/{process.pid}")
    try:
        title = (place / "cmdline").read_bytes().decode(errors="replace").strip("\0 ")
        user, log = place.stat().st_uid, os.readlink(place / "fd/1")
    except FileNotFoundError:
        raise ProcessLookupError(process.pid) from None
    except PermissionError:
        title, user, log = "", -1, ""
    if user != os.getuid():
        raise CallboardError(f"Process {process.pid} belongs to another user; Callboard ends only your own.")
    wanted = ROLES[process.role].format(application=process.application)
    if not re.fullmatch(rf"{re.escape(wanted)}(\W.*)?", title) or not log.startswith(f"{process.session}/logs/"):
        raise CallboardError(
            f"Process {process.pid} ({title[:60] or 'without a title'}) is not a {process.role} of the application "
            f"{process.application!r}; it received no signal."
        )


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
    users: dict[str, int] = {}  # by inode
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


def raylet_behind(port: int) -> Raylet:
    """Return the Ray behind a port: the descendant of the listener's nearest ancestor with a Ray."""
    children = children_of_all()
    parents = {child: parent for parent, pids in children.items() for child in pids}
    raylets = {pid for pid in _own_processes() if _program(pid) == "raylet"}
    for pid in listeners(port):
        ancestor: int | None = pid
        while ancestor is not None and ancestor > 1:
            found = {ancestor} & raylets or raylets & set(_below(ancestor, children))
            if len(found) == 1:
                return Raylet.of(found.pop())
            ancestor = None if found else parents.get(ancestor)
    raise CallboardError(f"Port {port} is not Ray Serve's on this machine; give a Callboard server's URL.")


def connect(raylet: Raylet) -> None:
    """Make this process a driver of a Ray, with the environment of its daemon, which holds its secret."""
    pairs = Path(f"/proc/{raylet.pid}/environ").read_bytes().decode(errors="replace").split("\0")
    settings = dict(pair.partition("=")[::2] for pair in pairs if pair.startswith(("RAY_", "__RAY_")))
    os.environ.update(settings)  # before the import of Ray, which reads them
    import ray

    ray.init(address=raylet.gcs_address, log_to_driver=False, logging_level=logging.ERROR)


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


def the_application(wanted: str | None) -> str:
    """Return the name of the application on this process's Ray, or the `wanted` one.

    Raises CallboardError without such an application, or with several and no `wanted` one."""
    from actors.ray.names import living_actors

    names = sorted({name.partition("/engine/")[0] for name in living_actors("") if "/engine/" in name})
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    known = ", ".join(names) or "none"
    raise CallboardError(f"The application is ambiguous; name one with --application (running: {known}).")


def processes_of(application: str, session: str) -> list[Process]:
    """Return the application's processes on this machine, from reports of its actors and Serve."""
    import ray
    from ray.serve.context import _get_global_client

    from actors.ray.names import NAMESPACE, engine_id, engines_of, living_actors

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    here = {node["NodeID"] for node in nodes if node["NodeManagerHostname"] == socket.gethostname()}
    asked: dict[Any, str] = {}
    for name in living_actors(engines_of(application)):
        with suppress(ValueError):  # it has died
            asked[ray.get_actor(name, NAMESPACE).processes.remote()] = engine_id(name)
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_CALL_S) if asked else ([], [])
    reported = []
    for answer in answers:
        with suppress(ray.exceptions.RayError):  # it is dying or starting
            reported += [(asked[answer], *found) for found in ray.get(answer)]
    client: Any = _get_global_client()
    deployments = client.get_serve_details()["applications"].get(application, {"deployments": {}})["deployments"]
    for name, deployment in deployments.items():
        role = "front" if name == "Front" else "supervisor"
        for replica in deployment["replicas"]:
            if replica["state"] == "RUNNING" and replica["pid"]:
                engine = replica["replica_id"] if role == "supervisor" else ""
                reported.append((engine, role, replica["node_id"], replica["pid"]))
    return [Process(role, engine, pid, application, session) for engine, role, node, pid in reported if node in here]


def http_host() -> str:
    """Return the address on which Serve listens, which `serve run` alone chooses."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return str(client.http_config.host)


def kill_any(application: str, role: str, settings: HttpSettings) -> Process:
    """Kill a random process of this role on this machine.

    Raises CallboardError without one, or if clients of other machines could do this without a key."""
    import ray

    settings.check_chaos(http_host())
    node: Any = ray._private.worker._global_node
    found = [process for process in processes_of(application, node.get_session_dir_path()) if process.role == role]
    random.shuffle(found)
    for process in found:
        with suppress(ProcessLookupError):  # it has ended
            process.send(signal.SIGKILL)
            return process
    raise CallboardError(f"This machine runs no {role} of the server now, so none was killed; try again in a second.")
