"""The Serve application: `serve run callboard.app:build_app model=...`, a Serve YAML file, or `callboard serve`.

No `from __future__ import annotations` here: Serve reads the type of build_app's argument at run time.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import click
import ray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from actors.engine.autoscaling import ServePolicy, report_of
from actors.engine.supervisor import Supervisor
from actors.front.engine_group import EngineGroup, ScaleFromZero
from actors.ray.directory import RayDirectory, has_healthy_engine
from actors.ray.environment import FAST_SERVE
from actors.ray.names import engines_of
from actors.ray.placement import FRONT_CPUS, SUPERVISOR_CPUS, bundles, default_fronts, has_room, uses_gpu
from actors.ray.process import freeze_garbage, ignore_logging_errors, report_faults
from runtime.background import in_background
from runtime.inspection import check_model
from runtime.loading.resolve import resolve
from runtime.spec.config import EngineConfig, names_of
from runtime.spec.types import CallboardError
from runtime.text.chat import load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.apis.batches.worker import Batches
from serve_app.apis.chat.endpoint import CHAT, message_delta
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.responses.ray_fronts import RayFronts, StoreOnLoop
from serve_app.apis.responses.store import ResponseStore, StoredResponses
from serve_app.application import build_http_app
from serve_app.http.lanes import run_preparation
from serve_app.observability.line_pipe import line_writer
from serve_app.observability.ray_metrics import RayMetrics
from serve_app.observability.request_line import RequestLines
from serve_app.processes.application_processes import http_host, kill_any
from serve_app.protocol.answers import encode_json
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.service.endpoint import Endpoint
from serve_app.service.service import Service
from serve_app.settings import HttpSettings, ScalingSettings

logger = logging.getLogger("ray.serve")


_HEALTH_TIMEOUT_S = 40  # Serve ends a replica after three; replicas must survive a head that is cut off for 2 min
_SHUTDOWN_POLL_S = 0.2  # between Serve's checks whether an ending replica still has requests
_REPORTS_S = 1.0  # between two reports of an engine to the scaling policy
_LOOK_BACK_S = 3.0
_SHUTDOWN_MARGIN_S = 2.0  # for messages between the processes, beside the drain itself


class _ServeArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    served_model_name: Annotated[tuple[str, ...], BeforeValidator(lambda value: _split(value or ()))] = Field(
        (), description="the names that clients use; answers have the first one; default: model"
    )
    num_fronts: int | None = Field(
        None, ge=1, description="front replicas (CPU only) that share the engines; default: one per 4 CPUs, at most 4"
    )

    def engine_config(self) -> EngineConfig:
        """Return the engine's settings; raises CallboardError if a value is out of range."""
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})

    def scaling(self) -> ScalingSettings:
        """Return the number of engines; raises CallboardError if a value is out of range."""
        return ScalingSettings(**{f.name: getattr(self, f.name) for f in fields(ScalingSettings)})

    def http_settings(self) -> HttpSettings:
        """Return the fronts' settings; raises CallboardError if a value is out of range."""
        return HttpSettings(**{f.name: getattr(self, f.name) for f in fields(HttpSettings)})


def _split(value: Any) -> Any:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _model_fields(config: type) -> dict[str, Any]:
    """Return the fields of a dataclass for pydantic.

    `serve run name=a,b` gives text for several values. An optional number may be "auto", as on the command line."""
    split = BeforeValidator(_split)
    auto = BeforeValidator(lambda value: None if value == "auto" else value)
    read = {tuple[str, ...]: split, int | None: auto}
    types = {name: Annotated[t, read[t]] if t in read else t for name, t in get_type_hints(config).items()}
    return {f.name: (types[f.name], Field(f.default, description=f.metadata["help"])) for f in fields(config)}


if TYPE_CHECKING:
    AppArgs = _ServeArgs
else:
    AppArgs = create_model(
        "AppArgs",
        __base__=_ServeArgs,
        __doc__="The settings of an application: EngineConfig, ScalingSettings, HttpSettings, names and fronts.",
        **_model_fields(EngineConfig),
        **_model_fields(ScalingSettings),
        **_model_fields(HttpSettings),
    )


class EngineHost:
    """One Serve replica: the supervisor of one engine, with a placement group of its own."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, gpu: bool, drain_timeout_s: float
    ) -> None:
        ignore_logging_errors()
        self._drain_timeout_s = drain_timeout_s
        context = serve.get_replica_context()
        group = ray.util.get_current_placement_group()
        assert group is not None, "build_app requests one"
        name = (
            engines_of(context.app_name, config) + context.replica_id.unique_id
        )  # unlike a rank, this id is never reused
        self._supervisor = Supervisor(config, name, group, gpu)
        await self._supervisor.start()

    def check_health(self) -> None:
        """Serve replaces this replica, and with it the engine, when the engine cannot be restarted."""
        if self._supervisor.failed:
            raise CallboardError(self._supervisor.failed)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return figures for the scaling policy; Serve calls this once a second for each replica."""
        return report_of(await self._supervisor.figures())

    async def wake(self) -> None:
        """Return when an engine exists. Serve starts a replica for this call without one."""

    async def __del__(self) -> None:
        """Drain the engine; Serve calls this before it ends the replica."""
        await self._supervisor.drain(self._drain_timeout_s)


class Front:
    """One Serve replica: HTTP, text and tokens, and a link to each engine. All fronts share the engines."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: EngineConfig,
        settings: HttpSettings,
        names: tuple[str, ...],
        engines: DeploymentHandle[Any],
        may_be_none: bool,
    ) -> None:
        """Returns at once at the first start; /ready then reports the phase. Beside serving fronts, it returns when
        it can serve too.

        Args:
            names: the model's names for clients.
            engines: the deployment of engines, which fronts reach over sockets.
            may_be_none: true if the engines scale to zero; then a call through `engines` starts one."""
        ignore_logging_errors()
        missing = [f"{name}={value}" for name, value in FAST_SERVE.items() if os.environ.get(name) != value]
        if missing:
            logger.warning("For full speed set %s before Ray starts, as `callboard serve` does.", " ".join(missing))
        app_name = serve.get_replica_context().app_name
        self._settings = settings
        self._engines = EngineGroup(
            RayDirectory(engines_of(app_name, config)),
            ScaleFromZero(
                lambda: _wake(engines), config.max_queued_requests, config.max_queued_tokens, config.queue_timeout_s
            )
            if may_be_none
            else None,
            settings.routing_policy,
        )
        draft = Path(config.draft).name if config.draft else None  # without its folder
        self._service = Service(self._engines, None, names[0], draft, names[1:], config)
        metrics = self._service.metrics
        metrics.lines = RequestLines(self._service.model, line_writer()) if settings.request_log else None
        settings.check_extras()
        if settings.otlp_traces_endpoint is not None:
            from serve_app.observability.tracing import Tracing

            metrics.add_sink(Tracing.to(self._service.model, settings.otlp_traces_endpoint))
        fronts = RayFronts()
        store = ResponseStore(settings, fronts.own)
        self.responses = StoreOnLoop(store)
        stored = StoredResponses(store, fronts)
        self._batches = Batches(settings)

        async def kill(role: str) -> dict[str, object]:
            killed = await asyncio.to_thread(kill_any, app_name, role, settings)
            return {"engine": killed.engine, "pid": killed.pid}

        self._app = build_http_app(
            self._service, settings, stored=stored, batches=self._batches, kill=kill, echo_request_ids=False
        )
        self._start = asyncio.create_task(self._connect(config))
        if await has_healthy_engine(engines_of(app_name)):  # of any model
            await self._start

    async def _connect(self, config: EngineConfig) -> None:
        with report_faults("A front"):
            await self._load(config)

    async def _load(self, config: EngineConfig) -> None:
        if config.weight_updates:
            self._settings.check_weight_updates(await asyncio.to_thread(http_host))
        path = await asyncio.to_thread(resolve, config.model, config.revision)
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            path,
            config.chat_template,
            config.tool_call_parser,
            config.channel_grammar,
            config.plain_tool_calls,
            config.special_tokens_in_contents,
        )
        defaults = await asyncio.to_thread(SamplingDefaults.load, path, config.generation_config, config.model)
        await self._engines.start()
        await asyncio.to_thread(self._service.start, tokenizer, defaults)  # the chat template is compiled
        self._service.grammars.start()
        self._batches.start()
        context = serve.get_replica_context()
        ray_metrics = RayMetrics(self._service.model, context.replica_id.unique_id)
        is_first = lambda: serve.get_replica_context().rank.rank == 0  # noqa: E731  # it publishes engines' figures
        reporting = asyncio.create_task(self._service.metrics.run(ray_metrics, is_first))
        in_background(reporting, "the report of metrics")
        freeze_garbage()

    def check_health(self) -> None:
        """Raise the error of a failed start, such as an unreadable tokenizer; Serve then replaces this replica."""
        if self._start.done():
            self._start.result()

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    async def tool_call_format(self) -> str | None:
        """Return the format of tool calls, as --tool-call-parser names it; None without one."""

        def find() -> str | None:
            chats = self._service.named(None).chats
            return None if chats is None else chats.tool_call_format

        return await asyncio.to_thread(find)  # a child process runs the template

    async def drain(self, reason: str) -> int:
        """Refuse new requests from now on, for `reason`, and return the number of live ones, which go on.

        Requests of batches end here; the next front that runs the batch sends them again."""
        self._batches.stop()
        return self._engines.drain(reason)

    async def end(self, reason: str) -> None:
        """End all live requests with an error, for `reason`."""
        self._engines.end(reason)

    async def weights(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        """Pause the engines, or update their weights, for another Ray job; docs/rollouts.md has the calls.

        Returns the answers of the engines by their ids. Raises WeightsRefused and CallboardError."""
        return await self._engines.weights(call, body)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a request of another Ray job; docs/handle_call.py shows a caller.

        `body` is that of /v1/completions or, with messages, of /v1/chat/completions. Yields {"index", "text",
        "token_ids", "finish_reason", "seed"} as tokens come. A chat adds pieces of "reasoning" or "tool_calls"."""
        content = encode_json(body)
        endpoint: Endpoint[Any] = CHAT if "messages" in body else COMPLETIONS

        def prepare() -> PreparedRequest[Any]:
            return self._service.prepare(endpoint, endpoint.read(content))

        prepared = await run_preparation(content, "", endpoint.renders_chats, prepare)
        async with aclosing(self._service.run(prepared)) as deltas:
            async for new in deltas:
                for delta in new:
                    yield {
                        "index": delta.index,
                        "text": delta.text,
                        "token_ids": delta.token_ids,
                        "finish_reason": delta.finish_reason,
                        "seed": prepared.requests[delta.index].seed,
                        **message_delta(delta),
                    }


async def _wake(engines: DeploymentHandle[Any]) -> None:
    """Wait until an engine exists; raises CallboardError if none can start."""
    try:
        await engines.wake.remote()
    except DeploymentUnavailableError as e:
        raise CallboardError("No engine could be started; see the log of the Serve controller.") from e


def _replicas(scaling: ScalingSettings) -> dict[str, Any]:
    """Return Serve's options for the number of engines."""
    if scaling.least == scaling.most:
        return {"num_replicas": scaling.most}
    limits = {
        "min_engines": scaling.least,
        "max_engines": scaling.most,
        "downscale_delay_s": scaling.scale_in_delay_s,
        "idle_s": scaling.scale_to_zero_s,
    }
    policy: Any = AutoscalingPolicy(policy_function=ServePolicy, policy_kwargs=limits)  # type: ignore[no-untyped-call]
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.least,
        max_replicas=scaling.most,
        policy=policy,
        metrics_interval_s=_REPORTS_S,
        # Serve's own rule, which starts the first replica, counts the calls of this period.
        look_back_period_s=_LOOK_BACK_S,
        # The policy has all delays.
        upscale_delay_s=0,
        downscale_delay_s=0,
        downscale_to_zero_delay_s=0,
    )
    return {"autoscaling_config": autoscaling}


def build_app(args: AppArgs) -> serve.Application:
    """Return the application for `serve run` and Serve's YAML files.

    Raises CallboardError as `application_of` does, and if the only machine of a cluster cannot load the model. So
    `serve run` shows one sentence instead of the traceback of a failed engine."""
    try:
        application = application_of(args)
        if sum(node["Alive"] for node in ray.nodes()) == 1:  # type: ignore[no-untyped-call]
            check_model(args.engine_config())
    except CallboardError as e:
        if click.get_current_context(silent=True) is None:
            raise
        raise click.ClickException(str(e)) from e
    return application


def application_of(args: AppArgs) -> serve.Application:
    """Return the application: fronts with HTTP, and the engines behind them.

    Raises CallboardError if a value is out of range or the cluster lacks resources."""
    config, settings, scaling = args.engine_config(), args.http_settings(), args.scaling()
    settings.check_extras()
    names = args.served_model_name or names_of(config.model)
    if twice := [name for name in names if name in config.adapters]:
        raise CallboardError(f"An adapter of lora is called {twice[0]!r}, as the model is; give it another name.")
    if not ray.is_initialized():
        ray.init(namespace="serve")  # as `serve run` does later; the cluster's GPUs must be known here
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    gpu = uses_gpu(config, [node["Resources"] for node in nodes if node["Alive"]])
    free = ray._private.state.available_resources_per_node().values()  # type: ignore[no-untyped-call]

    def surge(wanted: list[dict[str, float]]) -> int:
        """Return the surge of an update: with room, new replicas start before old ones end."""
        return 100 if has_room(wanted, free) else 0

    engines: Any = serve.deployment(
        EngineHost,
        name="Engine",
        **_replicas(scaling),
        ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
        placement_group_bundles=bundles(config, gpu),
        placement_group_strategy="STRICT_PACK",
        max_surge_percent=surge(bundles(config, gpu)),
        max_constructor_retry_count=1,  # a second load of a model would fail too
        health_check_period_s=2,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
    )
    front: Any = serve.deployment(
        serve.ingress()(Front),  # without an app: each replica builds its own, since apps cannot be pickled
        name="Front",
        num_replicas=args.num_fronts or default_fronts(resources),
        ray_actor_options={"num_cpus": FRONT_CPUS},
        max_surge_percent=surge([{"CPU": FRONT_CPUS}]),
        # Higher than the limit of the engines' queues, which reports an error of OpenAI's shape.
        max_ongoing_requests=scaling.most * config.max_queued_requests + 4096,
        health_check_period_s=2,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
    )
    application: serve.Application = front.bind(
        config,
        settings,
        names,
        engines.bind(config, gpu, settings.drain_timeout_s),
        scaling.least == 0,
    )
    return application
