"""Settings that Ray reads once, when it is imported or started: they must be in the environment before that.

On a cluster every node has them before `ray start`: `eval "$(python -m actors.ray.environment)"`, as in cluster.yaml.
"""

from __future__ import annotations

import random
import secrets
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path

from actors.ray import haproxy

# Serve's fast front door: HAProxy straight to the replicas, and no thread hop inside them. Measured per streamed token:
# 40-80 us of CPU against 300-700 us for the default proxy.
FAST_SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # keeps sync handle calls from other Ray jobs working
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # a reload must not cut a stream: above the longest one
    # A client that neither sends the rest of its request nor reads its answer is cut off. Waiting does not count.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # after 5 s Ray kills a proxy that a busy machine starts slowly
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # three of these until an HAProxy that died is replaced
}

# One machine: Ray itself on loopback only, and no statistics sent anywhere.
SINGLE_MACHINE = FAST_SERVE | {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # an odd name; on Linux it makes Ray's daemons listen on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # one idle worker for each CPU, of which a server uses seven
    "RAY_prestart_worker_first_driver": "0",  # the same
    "RAY_worker_niceness": "0",  # at Ray's own 15, engine and front would wait for all else that the machine does
    # Called in each worker before anything else. A runtime environment could say so too, but the workers of one are
    # started by another program, which imports Ray to read it.
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "actors.ray.process.listen_on_loopback",
}

# A node of a cluster.
CLUSTER = FAST_SERVE | {
    "RAY_AUTH_MODE": "token",  # Ray listens on every interface, and whoever may speak to it runs code as its user
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes end when they have not reached the head for so long; until then they serve without it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    # A head that was cut off ends, when it is back, what it has given up meanwhile: nodes after so many checks of 13 s,
    # HAProxies (and replicas: serve_app/app.py) after three that were not answered within so many seconds.
    "RAY_health_check_failure_threshold": "10",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "40",
}

_QUIET_PORTS = 20_000, 65_536  # Ray's workers may be below
_REPLICA_PORTS = range(30_000, 31_000)  # Serve gives them to its replicas


def ray_token() -> dict[str, str]:
    """A secret for a Ray of one's own: other users of the machine reach its ports, and whoever may speak to Ray runs
    code as its user. Ray would write one into the home directory."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def single_machine(folder: str, bind: str = "") -> dict[str, str]:
    """Settings for a Ray of one server's own, so that several servers run on one machine: for those who have its token,
    and with an HAProxy that has its files in `folder` and listens on `bind` alone (empty: where Serve is told to)."""
    return {
        **SINGLE_MACHINE,
        **ray_token(),
        **haproxy_files(folder),
        haproxy.COMMAND: haproxy.write_command(folder, private=True, bind=bind),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(quiet_port()),
        # Ctrl-C is meant: do not wait for a load balancer elsewhere to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A model that does not load will not load the second time either.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    }


def haproxy_files(folder: str) -> dict[str, str]:
    """Settings for an HAProxy that has its files in `folder`: Serve's own are one folder for all of a machine's."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{key}": str(Path(folder, name)) for key, name in files.items()}


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


def main() -> None:
    """Print what a shell evaluates before it starts a node of a cluster."""
    settings = CLUSTER | {haproxy.COMMAND: haproxy.write_command(f"{sys.prefix}/bin")}
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items()))


if __name__ == "__main__":
    main()
