"""The life of `callboard serve`: checks, Ray and Serve, the application, and its end."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from actors.ray import fork_server, haproxy
from actors.ray.environment import quiet_port, single_machine
from actors.ray.process import keep_bytecode, reported_fault
from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError
from serve_app.request_log.pipe import VARIABLE, RequestPipe, opened_pipe
from serve_app.settings import HttpSettings, ScalingSettings
from serve_app.terminal.announcement import NextStep, announcement
from serve_app.terminal.console import Console
from serve_app.tools.port import Port, port_of_its_own
from serve_app.tools.process_tree import News, Parent, run

APP_NAME = "callboard"
_LOG = "callboard-serve.log"  # beside Ray's logs: what this process writes to stdout and stderr
WORKERS_MODULES = (  # what Ray's workers import: Serve's actors, the replicas, the runner
    "ray.serve._private.controller",
    "ray.serve._private.haproxy",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "serve_app.app",
    "torch",
    "runtime.worker.runner",
    "runtime.worker.sources",
)
_POLL_S = 0.1
_STATUS_POLL_S = 1.0
_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest sensible one: no tensor ever goes through it
_RAYLET_START_S = 120.0  # Ray's daemons may take on a busy machine
_MAX_TRIES = 3
_MAX_TEMPORARY_LEN = 8  # of the path where HAProxy's Unix sockets lie, whose own may have 107 bytes
# For requests that HAProxy has read when all else has ended. It tries three more times, 0.2 s apart, to reach a front
# that has closed its port, and then answers that the server is stopping.
_LAST_ANSWERS_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All that `callboard serve` can be told."""

    config: EngineConfig
    http: HttpSettings
    host: str
    port: int
    served_model_names: tuple[str, ...]  # the first is that of answers; none: the model's own
    scaling: ScalingSettings
    num_fronts: int | None


def serve(settings: ServerSettings) -> None:
    """Serve a model until SIGINT or SIGTERM. Raises CallboardError if the server cannot start or ends by itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = tempfile.gettempdir()
    place = usual if len(usual) <= _MAX_TEMPORARY_LEN else "/tmp"
    with (
        port_of_its_own(settings.host, settings.port) as port,
        tempfile.TemporaryDirectory(prefix="callboard-", dir=place) as folder,
        opened_pipe(folder, settings.host, settings.port, settings.http.request_log) as requests,
    ):

        def hear(news: News) -> None:
            port.hear(news)
            if requests is not None:
                requests.start()

        run(lambda parent: _live(settings, folder, parent, port, requests), hear)


def _live(settings: ServerSettings, folder: str, parent: Parent, port: Port, requests: RequestPipe | None) -> None:
    """All that the server's process does."""
    port.close()  # it is the other process that has it
    parent.tell(phase="checking the model")
    from runtime.inspection import check_model

    console = Console(lambda phase: parent.tell(phase=phase))
    check_model(settings.config)  # what cannot be is told now, not by actors later
    console.phase("model checked")
    next_step = NextStep(settings.config.model)
    _set_environment(settings, folder)
    if requests is not None:
        os.environ[VARIABLE] = requests.path
    console.divert(Path(folder, "log"))
    keep_bytecode()
    python = fork_server.start(folder, WORKERS_MODULES)
    logs = _start_ray(settings, console, parent, python)
    _open_door(settings, logs)
    console.phase("front door open")
    _deploy(settings)
    _wait_until_up(settings, console, parent, logs)
    _announce(settings, console, next_step)
    if requests is not None:
        console.say(requests.describe())
    parent.tell(ready=True)
    _report_generic_tools(settings, console)
    parent.wait_for_order()
    console.say(f"Stopping; running requests have {settings.http.drain_timeout_s:g} s to end.")
    _drain(settings, folder, parent)
    haproxy.stop(folder, parent.wait_for_order, _LAST_ANSWERS_S)


def _set_environment(settings: ServerSettings, folder: str) -> None:
    """The environment of Ray and its processes; the user's own values stay."""
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = folder  # what actors leave behind ends with the server
    tempfile.tempdir = None
    own = single_machine(folder, bind=f"{settings.host}:{settings.port}")
    if "RAY_AUTH_TOKEN_PATH" in os.environ:
        del own["RAY_AUTH_TOKEN"]
    for name, value in own.items():
        os.environ.setdefault(name, value)
    os.environ[haproxy.COMMAND] = own[haproxy.COMMAND]  # it runs the user's


def _start_ray(settings: ServerSettings, console: Console, parent: Parent, python: str) -> Path:
    """Starts Ray, with `python` for its workers' Python, and returns the folder of its logs."""
    import ray

    # Ray's autoscaler monitor, log monitor and dashboard have nothing to do here and take two seconds of a core. Ray
    # has arguments that leave them out, but ray.init does not pass them on.
    private: Any = ray._private
    private.parameter.RayParams = partial(private.parameter.RayParams, no_monitor=True, include_log_monitor=False)
    private.node.Node.start_api_server = lambda *_, **__: None
    private.services.get_node = _patient(private.services.get_node)
    num_actors = settings.scaling.most * (1 + settings.config.tensor_parallel_size) + (settings.num_fronts or 0)
    importing = threading.Thread(target=import_module, args=("serve_app.app",))  # while Ray's daemons start
    importing.start()
    sys.executable, own = python, sys.executable
    try:
        context: Any = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_actors),  # logical: they place actors, they do not limit threads
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            # Without this, Ray's workers search the current folder for modules before any other.
            job_config=ray.job_config.JobConfig(_client_job=True),
        )
    except Exception as e:  # of many kinds
        raise CallboardError(f"Ray did not start: {_last_line(str(e))}") from e
    finally:
        sys.executable = own
    importing.join()
    logs = Path(context.address_info["session_dir"], "logs")
    console.divert(logs / _LOG)
    parent.tell(log=str(logs))
    parent.end_with("gcs_server", "raylet")  # nothing works without them, and Ray would wait for them for ever
    console.phase("Ray started")
    return logs


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Let `ray._private.services.get_node` wait for the node: on a busy machine Ray's own 30 s are too few."""

    def wait_for_node(*args: Any) -> Any:
        end = time.monotonic() + _RAYLET_START_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # the node is not registered yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    return wait_for_node


def _deploy(settings: ServerSettings) -> None:
    """Lets Serve start the application; returns at once."""
    from ray import serve

    from serve_app.app import AppArgs, application_of

    app = application_of(
        AppArgs(
            **asdict(settings.config),
            **asdict(settings.http),
            served_model_name=settings.served_model_names,
            **asdict(settings.scaling),
            num_fronts=settings.num_fronts,
        )
    )
    serve.run_many(
        [serve.RunTarget(app, name=APP_NAME)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def _open_door(settings: ServerSettings, logs: Path) -> None:
    """Starts Serve with its HAProxy, and again if the port of Serve's own proxy, which has no users, is taken."""
    from ray import serve
    from ray.exceptions import RayError

    # HAProxy alone listens where the user wants it (actors/ray/haproxy.py); Serve's other ports stay on this machine.
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
    raise CallboardError(f"Ray Serve did not start ({_last_line(reason)}); see {logs}.")


def _wait_until_up(settings: ServerSettings, console: Console, parent: Parent, logs: Path) -> None:
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
                raise CallboardError(fault or f"The application did not start: {_why(application)}; see {logs / _LOG}.")
            if application.status == "RUNNING" and _fronts_are_connected(settings) and _answers(settings):
                return
        time.sleep(_POLL_S)


def _why(application: Any) -> str:
    """The last line of what Serve reports of a deployment that failed: its exception. All of it goes to the log."""
    for name, deployment in application.deployments.items():
        if deployment.status in ("DEPLOY_FAILED", "UNHEALTHY") and deployment.message:
            print(deployment.message, file=sys.stderr, flush=True)
            return f"{name} failed with {_last_line(deployment.message).rstrip('.')}"
    return _last_line(application.message).rstrip(".")


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
    connection = http.client.HTTPConnection(_reachable(settings.host), settings.port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _drain(settings: ServerSettings, folder: str, parent: Parent) -> None:
    """No new requests, and time for those that run. Another order or the end of that time ends them with an error."""
    from ray import serve
    from ray.exceptions import RayError

    end = time.monotonic() + settings.http.drain_timeout_s
    with suppress(RayError):
        fronts = serve.get_app_handle(APP_NAME)
        while _num_live(fronts):
            if parent.wait_for_order(_POLL_S) or time.monotonic() > end:
                _end_requests(fronts)
                return
        # The fronts still write what their readers have not taken; HAProxy lives until they are done.
        haproxy.leave_fronts(folder)
        serve.delete(APP_NAME, _blocking=False)
        while APP_NAME in serve.status().applications:
            if parent.wait_for_order(_POLL_S) or time.monotonic() > end:
                return


def _end_requests(fronts: Any) -> None:
    """Clients read an error at the end of what they have; HAProxy passes it on before it ends."""
    from ray.serve.exceptions import DeploymentUnavailableError

    from actors.engine.supervisor import STOPPED

    with suppress(DeploymentUnavailableError, TimeoutError):
        fronts.broadcast("end", STOPPED).results(timeout_s=_STATUS_POLL_S, return_exceptions=True)


def _num_live(fronts: Any) -> int:
    """How many requests the fronts have, which are told to take no more. They know those that no engine has yet, too; a
    front that does not answer may have some."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import DeploymentUnavailableError

    from actors.engine.supervisor import DRAINING

    try:
        answers = fronts.broadcast("drain", DRAINING).results(timeout_s=_STATUS_POLL_S, return_exceptions=True)
    except DeploymentUnavailableError:  # there is no front
        return 0
    except TimeoutError:
        return 1
    dead = RayActorError, DeploymentUnavailableError
    return sum(a if isinstance(a, int) else not isinstance(a, dead) for a in answers)


def _announce(settings: ServerSettings, console: Console, next_step: NextStep) -> None:
    """How to use the server."""
    host = _reachable(settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    for line in announcement(settings.config, settings.served_model_names, url):
        console.announce(line)
    if advice := next_step.line():
        console.say(advice)


def _report_generic_tools(settings: ServerSettings, console: Console) -> None:
    """Print a line if the model's chat template has no format of tool calls, and the generic one is taken instead."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if settings.config.tool_call_parser == "auto":
        with suppress(RayError, RayServeException, TimeoutError):
            found = serve.get_app_handle(APP_NAME).tool_call_format.remote().result(timeout_s=_STATUS_POLL_S)
            if found == "generic":
                console.say("Tools: the chat template has no known format of tool calls, so the generic one is used.")


def _reachable(host: str) -> str:
    """An address of this machine at which a server that listens on `host` answers."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _last_line(text: str) -> str:
    """Where a traceback says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gives no reason"
