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
from runtime.base.types import CallboardError
from serve_app.processes.process_tree import Parent
from serve_app.server.console import Console
from serve_app.server.server_settings import APP_NAME, LOG_NAME, ServerSettings, last_line, reachable_host

_POLL_S = 0.1
_STATUS_POLL_S = 1.0


def wait_until_up(settings: ServerSettings, console: Console, parent: Parent, logs: Path) -> None:
    """Wait until all fronts have all engines and HAProxy has the fronts, and print the phases of the load.

    HAProxy gets the port when the first front can answer."""
    from ray import serve

    shown: list[str] = []
    due = 0.0
    while True:
        for line in (lines := _engine_phases())[len(shown) :]:
            console.phase(line.partition(" s  ")[2])
        shown = max(shown, lines, key=len)
        is_loaded = bool(shown) and shown[-1].endswith("ready")
        if is_loaded or time.monotonic() >= due:  # Serve's status takes 20 ms of CPU from the model's load
            due = time.monotonic() + _STATUS_POLL_S
            application = serve.status().applications[APP_NAME]
            texts = [application.message, *(deployment.message for deployment in application.deployments.values())]
            if sentences := re.findall(r"CallboardError: (.+)", "\n".join(texts)):
                raise CallboardError(sentences[-1])
            front = application.deployments.get("Front")
            if front is not None and front.status == "HEALTHY":
                parent.send(port=True)
            fault = reported_fault(logs)
            if fault or application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise CallboardError(
                    fault or f"The application did not start: {_why(application)}; see {logs / LOG_NAME}."
                )
            if application.status == "RUNNING" and _fronts_are_connected(settings) and _answers(settings):
                return
        time.sleep(_POLL_S)


def _why(application: Any) -> str:
    """Return the exception, the last line in Serve's report on a failed deployment. The log gets the whole report."""
    for name, deployment in application.deployments.items():
        if deployment.status in ("DEPLOY_FAILED", "UNHEALTHY") and deployment.message:
            print(deployment.message, file=sys.stderr, flush=True)
            return f"{name} failed with {last_line(deployment.message).rstrip('.')}"
    return last_line(application.message).rstrip(".")


def _engine_phases() -> list[str]:
    """Return the first engine's report of its start; empty without an engine or if it is too busy."""
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
    """Return whether each front has its link to each engine, which a front opens last."""
    import ray
    from ray import serve

    deployment = serve.status().applications[APP_NAME].deployments["Front"]
    num_fronts = sum(deployment.replica_states.values())
    try:
        stats = ray.get([engine.stats.remote() for engine in _engines()])
    except (CallboardError, ray.exceptions.RayError):  # an engine loads its model or ends
        return False
    num_engines = sum(model.scaling.least for model in settings.models)
    return len(stats) >= num_engines and all(s["connections"] >= num_fronts for s in stats)


def _answers(settings: ServerSettings) -> bool:
    """Return whether /ready answers 200."""
    connection = http.client.HTTPConnection(reachable_host(settings.host), settings.port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
