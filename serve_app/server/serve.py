"""The life of `callboard serve`: checks, Ray and Serve, the application, and its end."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from actors.ray import fork_server, haproxy
from actors.ray.process import keep_bytecode
from serve_app.observability.line_pipe import VARIABLE, RequestPipe, opened_pipe
from serve_app.processes.process_tree import News, Parent, run
from serve_app.server.announcement import NextStep, announcement
from serve_app.server.console import Console
from serve_app.server.port import Port, reserved_port
from serve_app.server.ray_start import WORKERS_MODULES, deploy, open_door, set_environment, start_ray
from serve_app.server.readiness import wait_until_up
from serve_app.server.server_settings import APP_NAME, ServerSettings, reachable_host
from serve_app.server.shutdown import drain

_CALL_S = 1.0  # limit for a front's answer to a call
_MAX_TEMPORARY_LEN = 8  # folder name of HAProxy's Unix sockets: a path has at most 107 bytes

# For requests that HAProxy has read at the end. It tries three more times, 0.2 s apart, to reach a front, and then
# answers that the server is stopping.
_LAST_ANSWERS_S = 2.0


def serve(settings: ServerSettings) -> None:
    """Serve models until SIGINT or SIGTERM. Raises CallboardError if the server cannot start or ends by itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = tempfile.gettempdir()
    place = usual if len(usual) <= _MAX_TEMPORARY_LEN else "/tmp"
    with (
        reserved_port(settings.host, settings.port) as port,
        tempfile.TemporaryDirectory(prefix="callboard-", dir=place) as folder,
        opened_pipe(folder, settings.host, settings.port, settings.http.request_log) as requests,
    ):

        def on_news(news: News) -> None:
            port.on_news(news)
            if requests is not None:
                requests.start()

        run(lambda parent: _serve_in_child(settings, folder, parent, port, requests), on_news)


def _serve_in_child(
    settings: ServerSettings, folder: str, parent: Parent, port: Port, requests: RequestPipe | None
) -> None:
    """Run the server in its child process."""
    port.close()  # the parent holds it
    parent.send(phase="checking the model")
    from runtime.inspection import check_model

    console = Console(lambda phase: parent.send(phase=phase))
    for model in settings.models:
        check_model(model.config)  # before actors find the same faults later
    console.phase("model checked")
    next_step = NextStep(settings.models[0].config.model)
    set_environment(settings, folder)
    if requests is not None:
        os.environ[VARIABLE] = requests.path
    console.divert(Path(folder, "log"))
    keep_bytecode()
    python = fork_server.start(folder, WORKERS_MODULES)
    with console.waiting_for("Ray's daemons"):
        logs = start_ray(settings, console, parent, python)
    with console.waiting_for("Ray Serve and its HAProxy"):
        open_door(settings, logs)
        console.phase("front door open")
    with console.waiting_for("the engine and its fronts"):
        deploy(settings)
        wait_until_up(settings, console, parent, logs)
    _announce(settings, console, next_step)
    if requests is not None:
        console.report(requests.describe())
    parent.send(ready=True)
    _report_generic_tools(settings, console)
    parent.wait_for_order()
    console.report(f"Stopping; running requests have {settings.http.drain_timeout_s:g} s to end.")
    drain(settings, folder, parent)
    haproxy.stop(folder, parent.wait_for_order, _LAST_ANSWERS_S)
    _report_tiers(settings, console)


def _announce(settings: ServerSettings, console: Console, next_step: NextStep) -> None:
    """Print how to use the server."""
    host = reachable_host(settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    for line in announcement(settings.models, url):
        console.announce(line)
    if advice := next_step.line():
        console.report(advice)


def _report_tiers(settings: ServerSettings, console: Console) -> None:
    """Print a line if KV blocks stay in memory for the next start."""
    from runtime.tier.place import base_folder, stored_regions

    names = {model.config.kv_tier_name or APP_NAME for model in settings.models}
    if num_bytes := sum(region.num_bytes for name in names for region in stored_regions(base_folder(), name)):
        console.report(
            f"The KV tier keeps {num_bytes / (1 << 30):.2f} GiB for the next start; `callboard stop --forget` frees it."
        )


def _report_generic_tools(settings: ServerSettings, console: Console) -> None:
    """Print a line if the server uses the generic format of tool calls."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if settings.models[0].config.tool_call_parser == "auto":
        with suppress(RayError, RayServeException, TimeoutError):
            found = serve.get_app_handle(APP_NAME).tool_call_format.remote().result(timeout_s=_CALL_S)
            if found == "generic":
                console.report("Tools: the chat template has no known format of tool calls; the generic one is used.")
