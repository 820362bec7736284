"""Environment variables for Ray, which reads them once, when it is imported or started.

On a cluster each node sets them before `ray start`: `eval "$(python -m actors.ray.environment)"`, as in cluster.yaml.
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

# Serve's fast ingress: HAProxy connects to the replicas, and requests change no thread inside them. CPU per streamed
# token: 40-80 us, against 300-700 us with the default proxy.
FAST_SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # needed by sync handle calls from other Ray jobs
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # longer than any stream, so that a reload cuts none
    # Closes the connection if a client stops to send or read. The server's own pauses do not count.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # the default of 5 s kills proxies on busy machines
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a dead HAProxy is replaced after three checks
}

# One machine: Ray listens on loopback only, and sends no usage statistics.
SINGLE_MACHINE = FAST_SERVE | {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray's daemons listen on 127.0.0.1 (on Linux)
    "RAY_SERVE_HAPROXY_MAXCONN": "4096",  # Ray 2.60's default; earlier ones need 50,035 file descriptors
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "300000",  # the default of 30 s ends raylets on busy machines
    "RAY_enable_worker_prestart": "0",  # else one idle worker per CPU; a server uses seven workers
    "RAY_prestart_worker_first_driver": "0",  # the same
    "RAY_worker_niceness": "0",  # the default of 15 puts engine and front behind all other processes
    # Called first in each worker. A runtime environment could name it too, but then another program, which imports Ray,
    # starts the workers.
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "actors.ray.process.listen_on_loopback",
}

# A cluster's node.
CLUSTER = FAST_SERVE | {
    "RAY_AUTH_MODE": "token",  # Ray listens on every interface, and its clients can run any code
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes serve without the head for this long, then end.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    # A head that returns from a partition kills nodes after this many failed 13 s checks. It kills HAProxies (and
    # replicas: serve_app/app.py) after three checks without an answer within this many seconds.
    "RAY_health_check_failure_threshold": "10",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "40",
}

_QUIET_PORTS = 20_000, 65_536  # Ray's workers may use lower ports
_REPLICA_PORTS = range(30_000, 31_000)  # Serve assigns these to its replicas


def ray_token() -> dict[str, str]:
    """Return a fresh token for a private Ray.

    Other users on the machine reach its ports, and a Ray client can run any code as its user. Ray's own token would
    be stored in the home directory."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def single_machine(folder: str, bind: str = "") -> dict[str, str]:
    """Return the settings of a private Ray for one server, so that several servers run on one machine.

    Its HAProxy has its files in `folder`, and listens only on `bind` (empty: on Serve's own address)."""
    return {
        **SINGLE_MACHINE,
        **ray_token(),
        **haproxy_files(folder),
        haproxy.COMMAND: haproxy.write_command(folder, private=True, bind=bind),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(quiet_port()),
        # Ctrl-C stops at once: no external load balancer needs time to notice.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A model that fails to load fails the second time too.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    }


def haproxy_files(folder: str) -> dict[str, str]:
    """Return settings that put HAProxy's files into `folder`: Serve's default is one folder for all servers."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{key}": str(Path(folder, name)) for key, name in files.items()}


def quiet_port() -> int:
    """Return a free port on 127.0.0.1, outside the range for outgoing connections if possible.

    The port is bound seconds later, so the kernel must not assign it meanwhile."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    quiet = [port for port in range(*_QUIET_PORTS) if not first <= port <= last and port not in _REPLICA_PORTS]
    for port in random.sample(quiet, len(quiet)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    """Print the shell commands that set the environment of a cluster's node."""
    settings = CLUSTER | {haproxy.COMMAND: haproxy.write_command(f"{sys.prefix}/bin")}
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items()))


if __name__ == "__main__":
    main()
