"""The Serve application: `serve run callboard.app:build_app model=...`, a Serve YAML file, or `callboard serve`.

No `from __future__ import annotations` here: Serve reads the type of build_app's argument at run time."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray.caller_router import router_config
from actors.ray.deployments import with_version
from actors.ray.directory import plain_error
from actors.ray.machines import Machines, machines_now, wait_for_machine
from actors.ray.placement import FRONT_CPUS, SUPERVISOR_CPUS, bundles, default_fronts, device_of, has_room
from actors.ray.private import deployment as serve_deployment
from actors.ray.private import free_resources
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.inspection import check_model
from serve_app.app_args import AppArgs
from serve_app.build_errors import build_errors
from serve_app.front import Front
from serve_app.replicas import EngineHost, replica_count
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings

logger = logging.getLogger("ray.serve")

_HEALTH_TIMEOUT_S = 40  # Serve ends a replica after three; replicas must survive a head that is cut off for 2 min
_SHUTDOWN_POLL_S = 0.2  # seconds between Serve's checks whether an ending replica still has requests
_SHUTDOWN_MARGIN_S = 2.0  # time for messages between the processes, besides the drain itself


def build_app(args: AppArgs) -> serve.Application:
    """Return the application for `serve run` and Serve's YAML files.

    Raises CallboardError as `application_of` does, and if a cluster's only machine cannot load the model. So
    `serve run` shows one sentence instead of a failed engine's traceback."""
    with build_errors():
        models = args.model_settings()
        application = application_of(models, args.http_settings(), args.num_fronts)
        if not machines_now().can_grow:  # else other machines load the models
            for model in models:
                check_model(model.config)
    return application


def application_of(
    models: Sequence[ModelSettings], settings: HttpSettings, num_fronts: int | None = None
) -> serve.Application:
    """Return the application: fronts with HTTP, and each model's engines behind them.

    Raises CallboardError if a value is out of range or the cluster lacks resources."""
    settings.check_extras()
    if not ray.is_initialized():
        ray.init(namespace="serve")  # `serve run` does so later; the cluster's machines must be known here
    machines = _machines_for(models)
    devices = [device_of(model.config, machines, model.accelerator_type) for model in models]
    if machines.can_grow:
        for model, device in zip(models, devices, strict=True):
            logger.info("%s runs on %s: %s.", model.names[0], "GPUs" if device.gpu else "CPUs", device.why)
    gpus = [device.gpu for device in devices]
    models = _placed(models, gpus, machines)
    free = free_resources()

    def deployment(cls: Any, name: str, wanted: list[dict[str, float]], **options: Any) -> Any:
        return serve_deployment(
            cls,
            name=name,
            # With room now, at the update's own build, new replicas start before old ones end.
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
            max_constructor_retry_count=1,  # a model's second load would fail too
        )
        start = model.config, gpu, settings.drain_timeout_s
        engines.append(with_version(engine, *start).bind(*start, model.scaling.sleeps))
    front = deployment(
        serve.ingress()(Front),  # each replica builds its own app, since apps cannot be pickled
        "Front",
        [{"CPU": FRONT_CPUS}],
        num_replicas=num_fronts or default_fronts(machines, [m.scaling.most for m in models], gpus),
        ray_actor_options={"num_cpus": FRONT_CPUS},
        request_router_config=router_config(),
        # Higher than the engines' queue limit, which reports an error in OpenAI's shape.
        max_ongoing_requests=sum(m.scaling.most * m.config.max_queued_requests for m in models) + 4096,
    )
    # Fronts use only the sleep setting of the scaling; the expected facts follow from the rest.
    used = [replace(m, scaling=ScalingSettings(idle_sleep=m.scaling.idle_sleep), expected=None) for m in models]
    application: serve.Application = with_version(front, used, settings).bind(models, settings, engines)
    return application


def _machines_for(models: Sequence[ModelSettings]) -> Machines:
    """Return the machines of the cluster. Waits for the first one if a model's plan depends on it.

    Serve builds an application in a task without a deadline, often when only a head exists that computes nothing. No
    front could run then, so waiting here delays nothing."""
    machines = machines_now()
    waiting = [m.names[0] for m in models if m.config.device == "auto" or m.scaling.sleeps]
    if machines.nodes or not waiting:
        return machines
    logger.warning(
        "%s waits for the first machine with CPUs, which decides on device=auto and the memory of models that sleep; "
        "device=cuda or accelerator_type asks for GPUs at once.",
        ", ".join(waiting),
    )
    return wait_for_machine()


def _placed(models: Sequence[ModelSettings], gpus: Sequence[bool], machines: Machines) -> list[ModelSettings]:
    """Return the models with the bundles of an engine. Those that may sleep reserve memory and have expected facts.

    Raises CallboardError if a model needs more memory than the largest machine has."""
    most_bytes = int(machines.most("memory"))
    # A worker loads torch, on a machine that may have the model, and not here.
    expect: Any = ray.remote(num_cpus=0)(expected)
    plans = [
        expect.options(scheduling_strategy=NodeAffinitySchedulingStrategy(machines.largest, soft=False)).remote(
            model.config, gpu, most_bytes
        )
        if model.scaling.sleeps
        else None
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
        wanted = bundles(model.config, gpu, num_bytes, model.accelerator_type)
        placed.append(replace(model, expected=info, bundles=tuple(wanted)))
    return placed


def expected(config: EngineConfig, gpu: bool, most_bytes: int) -> tuple[ModelInfo, int]:
    """Return a model's facts before it is loaded, and the memory of an engine in bytes."""
    from runtime.worker.expected import expected_model

    return expected_model(config, gpu, most_bytes)
