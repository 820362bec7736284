"""Starts Ray, Serve with its HAProxy, and the application."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.ray import fork_server, haproxy
from actors.ray.environment import quiet_port, single_machine
from runtime.base.types import CallboardError
from serve_app.processes.process_tree import Parent, children_named, end_children
from serve_app.server.console import Console
from serve_app.server.server_settings import APP_NAME, LOG_NAME, ServerSettings, last_line

WORKERS_MODULES = (  # modules that Ray's workers import: Serve's actors, the replicas, the runner
    *fork_server.SERVE_MODULES,
    "serve_app.app",
    "torch",
    "runtime.worker.runner",
    "runtime.worker.sources",
)
_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest sensible one, since no tensor goes through it
_RAYLET_START_S = 300.0  # limit for the start of Ray's daemons on a busy machine
_MAX_TRIES = 3
_DAEMONS = "gcs_server", "raylet"


def set_environment(settings: ServerSettings, folder: str) -> None:
    """Set the environment of Ray and its processes; the user's values stay."""
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = folder  # actors' files are removed with the server
    tempfile.tempdir = None
    own = single_machine(folder, bind=f"{settings.host}:{settings.port}")
    if "RAY_AUTH_TOKEN_PATH" in os.environ:
        del own["RAY_AUTH_TOKEN"]
    for name, value in own.items():
        os.environ.setdefault(name, value)
    os.environ[haproxy.COMMAND] = own[haproxy.COMMAND]  # this command runs the user's


def start_ray(settings: ServerSettings, console: Console, parent: Parent, python: str) -> Path:
    """Start Ray with `python` for its workers, and return the folder of its logs."""
    import ray

    from actors.ray.private import omit_daemons

    omit_daemons()
    engines = [model.scaling.most * (1 + model.config.tensor_parallel_size) for model in settings.models]
    num_actors = sum(engines) + (settings.num_fronts or 0)
    importing = threading.Thread(target=import_module, args=("serve_app.app",))  # while Ray's daemons start
    importing.start()
    sys.executable, own = python, sys.executable
    # Without this job_config, Ray's workers search the current folder for modules before any other.
    job_config = ray.job_config.JobConfig(_client_job=True)
    try:  # logical CPUs place actors; threads are free
        context = init_ray(max(os.cpu_count() or 1, num_actors), job_config=job_config)
    finally:
        sys.executable = own
    importing.join()
    logs = Path(context.address_info["session_dir"], "logs")
    console.divert(logs / LOG_NAME)
    parent.send(log=str(logs))
    parent.end_with(*_DAEMONS)  # Ray would wait for them forever
    console.phase("Ray started")
    return logs


def init_ray(num_cpus: int, **options: Any) -> Any:
    """Start a private Ray without a dashboard, even on a busy machine, and return its context.

    Ray finds free ports before its daemons bind them. A raylet ends if another process took one, so one more try
    follows. Raises CallboardError."""
    import ray

    from actors.ray.private import replace_get_node

    replace_get_node(_patient)
    for is_last in (False, True):
        try:
            return ray.init(
                address="local",  # also if RAY_ADDRESS names another one
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **options,
            )
        except Exception as e:  # Ray raises many kinds
            if is_last or not _has_ended("raylet"):
                raise CallboardError(f"Ray did not start: {last_line(str(e))}") from e
        end_children(*_DAEMONS)
    raise AssertionError


def _has_ended(name: str) -> bool:
    """Return True if all children of this process with this name have ended, at least one."""
    states = set(children_named(name).values())
    return states == {"Z"}


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Make Ray's `get_node` wait longer, since a busy machine may need more than Ray's 30 s."""

    def wait_for_node(*args: Any) -> Any:
        end = time.monotonic() + _RAYLET_START_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError as e:  # the node is not registered yet
                if _has_ended("raylet"):  # Ray would repeat a RuntimeError for 30 s
                    raise ChildProcessError("its raylet ended") from e
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    return wait_for_node


def open_door(settings: ServerSettings, logs: Path) -> None:
    """Start Serve with its HAProxy; try other ports if that of Serve's own unused proxy is taken."""
    from ray import serve
    from ray.exceptions import RayError

    # Only HAProxy listens on the user's address (actors/ray/haproxy.py); Serve's other ports stay on this machine.
    options: dict[str, Any] = {
        "http_options": {"host": "127.0.0.1", "port": settings.port},
        "logging_config": {"enable_access_log": False},
    }
    for _ in range(_MAX_TRIES):
        try:
            serve.start(**options)
            return
        except (RayError, RuntimeError, TimeoutError) as e:
            reason = str(e)
        if "Failed to bind to address" not in reason:
            break
        serve.shutdown()  # type: ignore[no-untyped-call]
        environment = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(quiet_port())}
        options["controller_options"] = {"runtime_env": {"env_vars": environment}}
    raise CallboardError(f"Ray Serve did not start ({last_line(reason)}); see {logs}.")


def deploy(settings: ServerSettings) -> None:
    """Submit the application to Serve; returns at once."""
    from ray import serve

    from serve_app.app import application_of

    app = application_of(settings.models, settings.http, settings.num_fronts)
    serve.run_many(
        [serve.RunTarget(app, name=APP_NAME)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
