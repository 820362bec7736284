"""The Serve application: `serve run callboard.app:build_app model=...`, a Serve YAML file, or `callboard serve`.

No `from __future__ import annotations` here: Serve reads the type of build_app's argument at run time.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from actors.ray.deployments import with_version
from actors.ray.directory import plain_error
from actors.ray.placement import (
    FRONT_CPUS,
    SUPERVISOR_CPUS,
    bundles,
    computes,
    default_fronts,
    free_resources,
    has_room,
    uses_gpu,
)
from runtime.inspection import check_model
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.types import CallboardError
from serve_app.app_args import AppArgs
from serve_app.build_errors import build_errors
from serve_app.front import Front
from serve_app.replicas import EngineHost, replica_count
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings

_HEALTH_TIMEOUT_S = 40  # Serve ends a replica after three; replicas must survive a head that is cut off for 2 min
_SHUTDOWN_POLL_S = 0.2  # between Serve's checks whether an ending replica still has requests
_SHUTDOWN_MARGIN_S = 2.0  # for messages between the processes, beside the drain itself


def build_app(args: AppArgs) -> serve.Application:
    """Return the application for `serve run` and Serve's YAML files.

    Raises CallboardError as `application_of` does, and if the only machine of a cluster cannot load the model. So
    `serve run` shows one sentence instead of the traceback of a failed engine."""
    with build_errors():
        models = args.model_settings()
        application = application_of(models, args.http_settings(), args.num_fronts)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if len(nodes) == 1 and computes(nodes[0]):  # else other machines load the models
            for model in models:
                check_model(model.config)
    return application


def application_of(
    models: Sequence[ModelSettings], settings: HttpSettings, num_fronts: int | None = None
) -> serve.Application:
    """Return the application: fronts with HTTP, and the engines of each model behind them.

    Raises CallboardError if a value is out of range or the cluster lacks resources."""
    settings.check_extras()
    if not ray.is_initialized():
        ray.init(namespace="serve")  # as `serve run` does later; the cluster's GPUs must be known here
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = [uses_gpu(model.config, resources) for model in models]
    models = _placed(models, gpus, max(each.get("memory", 0.0) for each in resources))
    free = free_resources()

    def deployment(cls: Any, name: str, wanted: list[dict[str, float]], **options: Any) -> Any:
        return serve.deployment(
            cls,
            name=name,
            # With room, new replicas of an update start before old ones end.
            max_surge_percent=100 if has_room(wanted, free) else 0,
            health_check_period_s=2,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
            graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
            **options,
        )

    engines = []
    for model, gpu in zip(models, gpus, strict=True):
        engine = deployment(
            EngineHost,
            model.deployment,
            [*model.bundles],
            **replica_count(model.scaling),
            ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
            placement_group_bundles=[*model.bundles],
            placement_group_strategy="STRICT_PACK",
            max_constructor_retry_count=1,  # a second load of a model would fail too
        )
        start = model.config, gpu, settings.drain_timeout_s
        engines.append(with_version(engine, *start).bind(*start, model.scaling.sleeps))
    front = deployment(
        serve.ingress()(Front),  # without an app: each replica builds its own, since apps cannot be pickled
        "Front",
        [{"CPU": FRONT_CPUS}],
        num_replicas=num_fronts or default_fronts(ray.cluster_resources()),  # type: ignore[no-untyped-call]
        ray_actor_options={"num_cpus": FRONT_CPUS},
        # Higher than the limit of the engines' queues, which reports an error of OpenAI's shape.
        max_ongoing_requests=sum(m.scaling.most * m.config.max_queued_requests for m in models) + 4096,
    )
    # Of the scaling, fronts use the sleep alone; the expected facts follow from the rest.
    used = [replace(m, scaling=ScalingSettings(idle_sleep=m.scaling.idle_sleep), expected=None) for m in models]
    application: serve.Application = with_version(front, used, settings).bind(models, settings, engines)
    return application


def _placed(models: Sequence[ModelSettings], gpus: Sequence[bool], most_bytes: float) -> list[ModelSettings]:
    """Return the models with the bundles of an engine. Those that may sleep reserve memory and have expected facts.

    Raises CallboardError if a model needs more than `most_bytes`, the memory of the largest machine."""
    expect: Any = ray.remote(num_cpus=0)(expected)  # torch is loaded in a worker, and not here
    plans = [
        expect.remote(model.config, gpu, int(most_bytes)) if model.scaling.sleeps else None
        for model, gpu in zip(models, gpus, strict=True)
    ]
    placed = []
    for model, gpu, plan in zip(models, gpus, plans, strict=True):
        info, num_bytes = None, 0
        if plan is not None:
            try:
                info, num_bytes = ray.get(plan)
            except RayError as e:
                raise CallboardError(f"{model.names[0]} cannot be served: {plain_error(e)}") from e
        placed.append(replace(model, expected=info, bundles=tuple(bundles(model.config, gpu, num_bytes))))
    return placed


def expected(config: EngineConfig, gpu: bool, most_bytes: int) -> tuple[ModelInfo, int]:
    """Return a model's facts before it is loaded, and the memory of an engine in bytes."""
    from runtime.worker.expected import expected_model

    return expected_model(config, gpu, most_bytes)
