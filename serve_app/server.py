"""The life of `callboard serve`: checks, Ray and Serve, the application, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from typing import Any

from actors.environment import LOOPBACK_WORKERS, SINGLE_MACHINE, end_haproxy, private_haproxy
from runtime.core.config import EngineConfig
from runtime.core.types import CallboardError
from serve_app.settings import HttpSettings

APP_NAME = "callboard"
_POLL_S = 0.05
_OBJECT_STORE_BYTES = 100 << 20  # Ray's smallest sensible one: no tensor ever goes through it


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All that `callboard serve` can be told."""

    config: EngineConfig
    http: HttpSettings
    host: str
    port: int
    served_model_name: str | None
    num_replicas: int
    num_fronts: int | None


def serve(settings: ServerSettings) -> None:
    """Serve a model until SIGINT or SIGTERM. Raises CallboardError if the server cannot start."""
    config = settings.config
    _check_port(settings.host, settings.port)
    from runtime.loading.resolve import resolve
    from runtime.text.chat import load_tokenizer
    from runtime.text.sampling_defaults import SamplingDefaults

    path = resolve(config.model, config.revision)
    load_tokenizer(path, config.chat_template)  # what cannot be read is told now, not by actors later
    SamplingDefaults.load(path, config.generation_config)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="callboard-") as folder:
        for name, value in {**SINGLE_MACHINE, **private_haproxy(folder)}.items():
            os.environ.setdefault(name, value)
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            _start(settings)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            _announce(settings)
            stop.wait()
            _drain(settings)
        finally:
            _stop()
            end_haproxy(folder)


def _check_port(host: str, port: int) -> None:
    """Raises CallboardError if the server could not listen there. This comes before anything that takes time."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as e:
        raise CallboardError(f"{host!r} is no address of this machine ({e.strerror}); pass another --host.") from e
    except OSError as e:
        raise CallboardError(
            f"Port {port} on {host} cannot be used ({e.strerror}); stop what has it or pass another --port."
        ) from e


def _start(settings: ServerSettings) -> None:
    """Ray, Serve and the application; returns when the model answers through every front."""
    import logging

    import ray
    from ray import serve as ray_serve

    from serve_app.app import AppArgs, build_app, failure_of

    num_actors = settings.num_replicas * (1 + settings.config.tensor_parallel_size) + (settings.num_fronts or 0)
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_actors),  # logical: they place actors, they do not limit threads
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
        runtime_env=LOOPBACK_WORKERS,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    http_options = {"host": settings.host, "port": settings.port}
    ray_serve.start(http_options=http_options, logging_config={"enable_access_log": False})
    app = build_app(
        AppArgs(
            **asdict(settings.config),
            **asdict(settings.http),
            served_model_name=settings.served_model_name,
            num_replicas=settings.num_replicas,
            num_fronts=settings.num_fronts,
        )
    )
    try:
        ray_serve.run(app, name=APP_NAME)
    except RuntimeError as e:
        raise CallboardError(failure_of(APP_NAME) or str(e)) from e
    while not _fronts_are_connected(settings):
        if reason := failure_of(APP_NAME):
            raise CallboardError(reason)
        time.sleep(_POLL_S)


def _engines() -> list[Any]:
    from actors.directory import find_engines
    from actors.names import engines_of

    return find_engines(engines_of(APP_NAME))


def _fronts_are_connected(settings: ServerSettings) -> bool:
    """Whether each front has opened its link to each engine, which it does when it has all else."""
    import ray
    from ray import serve

    deployment = serve.status().applications[APP_NAME].deployments["Front"]
    num_fronts = sum(deployment.replica_states.values())
    stats = ray.get([engine.stats.remote() for engine in _engines()])
    return len(stats) >= settings.num_replicas and all(s["connections"] >= num_fronts for s in stats)


def _drain(settings: ServerSettings) -> None:
    """No new requests, and time for those that run; a second signal ends the wait."""
    import ray
    from ray import serve

    from actors.supervisor import DRAINING

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    print(f"Stopping; running requests have {settings.http.drain_timeout_s:g} s to end.", file=sys.stderr, flush=True)
    end = time.monotonic() + settings.http.drain_timeout_s
    with suppress(KeyboardInterrupt, CallboardError, ray.exceptions.RayError):  # an engine that is dead has none
        engines = _engines()
        ray.get([engine.drain.remote(DRAINING) for engine in engines])
        while any(ray.get([engine.num_live.remote() for engine in engines])) and time.monotonic() < end:
            time.sleep(_POLL_S)
        # The fronts still write what their readers have not taken; HAProxy lives until Serve itself is shut down.
        serve.delete(APP_NAME, _blocking=False)
        while APP_NAME in serve.status().applications and time.monotonic() < end:
            time.sleep(_POLL_S)


def _stop() -> None:
    """Serve first: it is what stops HAProxy. A second Ctrl-C interrupts this."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        # Ray prints that the controller's last task was not answered, since that task ends the controller.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            sys.modules["ray.serve"].shutdown()
            ray.shutdown()


def _announce(settings: ServerSettings) -> None:
    """How the engine started, on stderr, and how to use it."""
    import ray

    for line in ray.get(_engines()[0].phases.remote()):
        print(line, file=sys.stderr, flush=True)
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    name = settings.served_model_name or settings.config.model
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    draft = f" (draft: {settings.config.draft})" if settings.config.draft else ""
    print(f"Callboard serves {name}{draft} at {url}/v1", flush=True)
    print(f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
