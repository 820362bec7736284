"""The processes of a running application on this machine, for whoever ends them on purpose.

Who listens on the application's port leads to its Ray (by /proc alone), Ray's actors tell their own processes, and
before a signal is sent a process is looked at again: it must be this user's, of that Ray session, and an actor of
Callboard. Whatever is not is refused.
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

ROLES = {  # of a process, and how Ray titles it
    "engine": "ray::EngineActor",
    "runner": "ray::ModelRunnerActor",
    "draft": "ray::DraftActor",
    "supervisor": "ray::ServeReplica:{application}:Engine",
    "front": "ray::ServeReplica:{application}:Front",
}
_CALL_S = 10.0  # for Ray to tell of a process; what does not answer has none to tell


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
    engine: str  # the id of the engine that it belongs to; empty for a front
    pid: int
    application: str
    session: str

    def send(self, number: signal.Signals) -> None:
        """Send it a signal. Raises CallboardError if it is not what it was found to be, and ProcessLookupError if it is
        no more. What is looked at is what gets the signal: a descriptor of a process is never another's."""
        descriptor = os.pidfd_open(self.pid)
        try:
            check(self)
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def check(process: Process) -> None:
    """Raises CallboardError unless it is this user's, of its Ray session, and the actor that it is said to be."""
    place = Path(f"/proc/{process.pid}")
    try:
        title = (place / "cmdline").read_bytes().decode(errors="replace").strip("\0 ")
        user, log = place.stat().st_uid, os.readlink(place / "fd/1")
    except FileNotFoundError:
        raise ProcessLookupError(process.pid) from None
    except PermissionError:
        title, user, log = "", -1, ""
    if user != os.getuid():
        raise CallboardError(f"Process {process.pid} belongs to another user; only your own are ended.")
    wanted = ROLES[process.role].format(application=process.application)
    if not re.fullmatch(rf"{re.escape(wanted)}(\W.*)?", title) or not log.startswith(f"{process.session}/logs/"):
        raise CallboardError(
            f"Process {process.pid} ({title[:60] or 'without a title'}) is no {process.role} of the application "
            f"{process.application!r}; nothing was sent to it."
        )


# ---- from a port to its Ray ------------------------------------------------------------------------------------------


def local_port(url: str) -> int:
    """The port of a URL on this machine's loopback; raises CallboardError for any other."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as e:
        raise CallboardError(f"{url!r} is no URL of a server ({e}); give one such as http://127.0.0.1:8000.") from e
    if not all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found):
        raise CallboardError(
            f"{url!r} is not on this machine's loopback, and processes of another machine are not ended; "
            "give a URL such as http://127.0.0.1:8000."
        )
    return int(parts.port or 80)


def listeners(port: int) -> list[int]:
    """This user's processes that listen on a port; raises CallboardError if nobody does, or another user."""
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
        raise CallboardError(f"Port {port} belongs to another user; only processes of your own are ended.")
    return [pid for pid in _own_processes() if users.keys() & _descriptors(pid)]


def raylet_behind(port: int) -> Raylet:
    """The Ray whose Serve listens on a port: the one beneath the nearest ancestor that has any."""
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
    raise CallboardError(f"What listens on port {port} is no Ray Serve of this machine; give a Callboard server's URL.")


def connect(raylet: Raylet) -> None:
    """Make this process a driver of that Ray, with the secret that its daemon has."""
    pairs = Path(f"/proc/{raylet.pid}/environ").read_bytes().decode(errors="replace").split("\0")
    settings = dict(pair.partition("=")[::2] for pair in pairs if pair.startswith(("RAY_", "__RAY_")))
    os.environ.update(settings)  # Ray reads them when it is imported
    import ray

    ray.init(address=raylet.gcs_address, log_to_driver=False, logging_level=logging.ERROR)


def _own_processes() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
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
    """The name of the application of Callboard that runs on the Ray of this process; raises CallboardError if there is
    none, or several and none is wanted."""
    from actors.ray.names import living_actors

    names = sorted({name.partition("/engine/")[0] for name in living_actors("") if "/engine/" in name})
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    known = ", ".join(names) or "none"
    raise CallboardError(f"Which application is meant is not clear; name one with --application (running: {known}).")


def processes_of(application: str, session: str) -> list[Process]:
    """The application's processes on this machine, as its actors and Serve tell of them now."""
    import ray
    from ray.serve.context import _get_global_client

    from actors.ray.names import NAMESPACE, engine_id, engines_of, living_actors

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    here = {node["NodeID"] for node in nodes if node["NodeManagerHostname"] == socket.gethostname()}
    asked: dict[Any, str] = {}
    for name in living_actors(engines_of(application)):
        with suppress(ValueError):  # it has died since
            asked[ray.get_actor(name, NAMESPACE).processes.remote()] = engine_id(name)
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_CALL_S) if asked else ([], [])
    told = []
    for answer in answers:
        with suppress(ray.exceptions.RayError):  # it dies, or has not begun
            told += [(asked[answer], *found) for found in ray.get(answer)]
    client: Any = _get_global_client()
    deployments = client.get_serve_details()["applications"].get(application, {"deployments": {}})["deployments"]
    for deployment, role in (("Engine", "supervisor"), ("Front", "front")):
        for replica in deployments.get(deployment, {"replicas": []})["replicas"]:
            if replica["state"] == "RUNNING" and replica["pid"]:
                engine = replica["replica_id"] if role == "supervisor" else ""
                told.append((engine, role, replica["node_id"], replica["pid"]))
    return [Process(role, engine, pid, application, session) for engine, role, node, pid in told if node in here]


def kill_any(application: str, role: str, settings: HttpSettings) -> Process:
    """Kill a process of this role on this machine, drawn at random. Raises CallboardError if there is none, or if
    clients of other machines can ask for it without a key."""
    import ray
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    settings.check_chaos(client.http_config.host)  # under `serve run`, which alone chooses it
    node: Any = ray._private.worker._global_node
    found = [process for process in processes_of(application, node.get_session_dir_path()) if process.role == role]
    random.shuffle(found)
    for process in found:
        with suppress(ProcessLookupError):  # it has ended since
            process.send(signal.SIGKILL)
            return process
    raise CallboardError(f"This machine has no {role} of the server now, so none was killed; try again in a second.")
