"""The wait until a server that starts can answer."""

from __future__ import annotations

import http.client
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.ray.process import reported_fault
from runtime.spec.types import CallboardError
from serve_app.processes.process_tree import Parent
from serve_app.server.console import Console
from serve_app.server.server_settings import APP_NAME, LOG_NAME, ServerSettings, last_line, reachable_host

_POLL_S = 0.1
_STATUS_POLL_S = 1.0


def wait_until_up(settings: ServerSettings, console: Console, parent: Parent, logs: Path) -> None:
    """Returns when all fronts have all engines and HAProxy has the fronts; meanwhile tells how the model is loaded.
    HAProxy gets the port as soon as there is a front to answer."""
    from ray import serve

    shown: list[str] = []
    due = 0.0
    while True:
        for line in (lines := _engine_phases())[len(shown) :]:
            console.phase(line.partition(" s  ")[2])
        shown = max(shown, lines, key=len)
        is_loaded = bool(shown) and shown[-1].endswith("ready")
        if is_loaded or time.monotonic() >= due:  # Serve's status takes 20 ms of what the model's load needs
            due = time.monotonic() + _STATUS_POLL_S
            application = serve.status().applications[APP_NAME]
            told = [application.message, *(deployment.message for deployment in application.deployments.values())]
            if sentences := re.findall(r"CallboardError: (.+)", "\n".join(told)):
                raise CallboardError(sentences[-1])
            front = application.deployments.get("Front")
            if front is not None and front.status == "HEALTHY":
                parent.tell(port=True)
            fault = reported_fault(logs)
            if fault or application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise CallboardError(
                    fault or f"The application did not start: {_why(application)}; see {logs / LOG_NAME}."
                )
            if application.status == "RUNNING" and _fronts_are_connected(settings) and _answers(settings):
                return
        time.sleep(_POLL_S)


def _why(application: Any) -> str:
    """The last line of what Serve reports of a deployment that failed: its exception. All of it goes to the log."""
    for name, deployment in application.deployments.items():
        if deployment.status in ("DEPLOY_FAILED", "UNHEALTHY") and deployment.message:
            print(deployment.message, file=sys.stderr, flush=True)
            return f"{name} failed with {last_line(deployment.message).rstrip('.')}"
    return last_line(application.message).rstrip(".")


def _engine_phases() -> list[str]:
    """The first engine's report on its start; empty if there is none yet, or if it is too busy to tell."""
    import ray

    with suppress(CallboardError, ray.exceptions.RayError):
        for engine in _engines()[:1]:
            lines: list[str] = ray.get(engine.phases.remote(), timeout=_STATUS_POLL_S)
            return lines
    return []


def _engines() -> list[Any]:
    from actors.ray.directory import find_engines
    from actors.ray.names import engines_of

    return find_engines(engines_of(APP_NAME))


def _fronts_are_connected(settings: ServerSettings) -> bool:
    """True when each front has opened its link to each engine, which it does when it has all else."""
    import ray
    from ray import serve

    deployment = serve.status().applications[APP_NAME].deployments["Front"]
    num_fronts = sum(deployment.replica_states.values())
    try:
        stats = ray.get([engine.stats.remote() for engine in _engines()])
    except (CallboardError, ray.exceptions.RayError):  # one loads its model, or goes
        return False
    return len(stats) >= settings.scaling.least and all(s["connections"] >= num_fronts for s in stats)


def _answers(settings: ServerSettings) -> bool:
    """True when a client would find the server ready."""
    connection = http.client.HTTPConnection(reachable_host(settings.host), settings.port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
