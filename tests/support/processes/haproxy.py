"""A real HAProxy with the configuration of Serve, and fronts behind it."""

import asyncio
import csv
import socket
import subprocess
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import httpx
from jinja2 import Environment

from actors.ray.environment import quiet_port
from tests.support.processes.inspection import listening_ports


def serve_config(folder: Path, port: int, servers: list[int], fallback: int | None) -> str:
    """The configuration that Serve's HAProxyManager writes for one application with replicas on `servers`."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        http_options=HTTPOptions(host="0.0.0.0", port=port),
        socket_path=str(folder / "admin.sock"),
        metrics_socket_path=str(folder / "metrics.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        stats_port=quiet_port(),
        metrics_port=quiet_port(),
        is_head=True,
    )
    replicas = [ServerConfig(f"r{i}", "127.0.0.1", replica) for i, replica in enumerate(servers)]
    proxy = None if fallback is None else ServerConfig("fallback", "127.0.0.1", fallback)
    backend = BackendConfig(name="http-callboard", path_prefix="/", app_name="callboard", servers=replicas,
                            fallback_server=proxy)  # fmt: skip
    api = HAProxyApi(config, {backend.name: backend} if servers or proxy else {}, str(folder / "haproxy.cfg"))
    assert Environment is not None  # Serve renders with it
    api._generate_config_file_internal()
    return api.config_file_path


class Running:
    def __init__(self, command: str, config: str, *arguments: str) -> None:
        command_line = [command, "-db", "-f", config, "-dR", *arguments]
        self.process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True)

    def ports(self) -> set[tuple[str, int]]:
        return listening_ports(self.process.pid)

    def wait_until_it_answers(self, port: int) -> None:
        """All its sockets listen then."""
        end = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, self.process.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.01)


def first_check(folder: Path) -> str:
    """The result of the first health check of the first front, when it is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as commands:
            commands.connect(str(folder / "admin.sock"))
            commands.sendall(b"show stat\n")
            rows = csv.DictReader(commands.makefile())
            result = next(row["check_status"] for row in rows if row["svname"] == "r0")
        if result != "INI" and not result.startswith("*"):
            return result
        time.sleep(0.01)
    raise AssertionError("HAProxy checks no front")


def replica_health(draining: bool) -> tuple[bool, str]:
    """Serve's own answer of a replica to a health check."""
    from ray.serve._private.replica import Replica

    replica = SimpleNamespace(_shutting_down=draining, _healthy=True)
    return asyncio.run(Replica._dataplane_health_check(replica))


class Healthy(BaseHTTPRequestHandler):
    """A front that is ready, and echoes its request."""

    draining = False

    def do_GET(self) -> None:
        healthy, message = replica_health(self.draining) if self.path == "/-/healthz" else (True, "")
        self.send_response(200 if healthy else 503)
        self.send_header("asked-with", str(self.headers.get("x-request-disconnect-disabled")))
        self.send_header("content-length", str(len(message)))
        self.end_headers()
        self.wfile.write(message.encode())

    def log_message(self, *_: object) -> None:
        pass
