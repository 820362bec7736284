"""A real HAProxy with the configuration of Serve, and fronts behind it."""

import subprocess
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

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


class Healthy(BaseHTTPRequestHandler):
    """A front that is ready, and echoes its request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("asked-with", str(self.headers.get("x-request-disconnect-disabled")))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
