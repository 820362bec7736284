"""The Serve replica with HTTP, text and tokens, for all models in an application."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from actors.front.engine_group import EngineGroup
from actors.front.from_zero import ScaleFromZero
from actors.ray.callers import Callers, current_call
from actors.ray.deployments import check_options, one_sentence, refused_option, replica_options
from actors.ray.directory import RayDirectory, has_healthy_engine
from actors.ray.environment import FAST_SERVE
from actors.ray.names import engines_of
from actors.ray.placement import described
from actors.ray.private import http_host, replicas_of
from actors.ray.process import freeze_garbage, ignore_logging_errors, report_faults
from actors.ray.room import Room, lacks_resources
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from runtime.loading.gguf_towers import image_rule_of
from runtime.loading.resolve import resolve
from runtime.media.processor import ImageProcessor
from runtime.structured.compiler import GrammarCompiler
from runtime.text.chat import load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.tokenizer import Tokenizer
from serve_app.apis.batches.worker import Batches
from serve_app.apis.chat.endpoint import CHAT, message_delta
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.responses.ray_fronts import RayFronts, StoreOnLoop
from serve_app.apis.responses.store import ResponseStore, StoredResponses
from serve_app.application import build_http_app
from serve_app.handle import HandleCalls, Turns, encoded
from serve_app.http.lanes import run_preparation
from serve_app.observability.line_pipe import line_writer
from serve_app.observability.ray_metrics import RayMetrics
from serve_app.observability.request_line import RequestLines
from serve_app.processes.application_processes import kill_any
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.service.endpoint import Endpoint
from serve_app.service.generation import UntilClientLeaves
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.service.sleep import ModelSleep
from serve_app.settings import HttpSettings, ModelSettings

logger = logging.getLogger("ray.serve")


class Front(HandleCalls):
    """One Serve replica: HTTP, text and tokens, and a link to each engine. All fronts share the engines."""

    docs_path = "/docs"  # shown by Serve's API and Ray's dashboard

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[ModelSettings], settings: HttpSettings, engines: Sequence[DeploymentHandle[Any]]
    ) -> None:
        """Returns at once at the first start; /ready then reports the phase. Beside serving fronts, it returns when
        it can serve too.

        Args:
            models: the models; the first one takes requests without a name.
            engines: the deployment of each model's engines, which fronts reach over sockets."""
        ignore_logging_errors()
        with one_sentence():
            check_options()
        missing = [f"{name}={value}" for name, value in FAST_SERVE.items() if os.environ.get(name) != value]
        if missing:
            logger.warning("For full speed set %s before Ray starts, as `callboard serve` does.", " ".join(missing))
        app_name = serve.get_replica_context().app_name
        settings.check_extras()
        self._settings = settings
        self._groups: dict[str, EngineGroup] = {}
        by_name = {model.names[0]: model for model in models}

        async def is_short(name: str) -> bool:
            model = by_name[name]
            return await lacks_resources(replicas_of(app_name, model.deployment), [*model.bundles])

        sleeping: dict[str, EngineGroup] = {}
        self._room = Room(sleeping, is_short)
        for model, handle in zip(models, engines, strict=True):
            name = model.names[0]
            wake = partial(_wake, handle, self._room, name)
            zero = ScaleFromZero.of(model.config, wake, model.expected) if model.scaling.sleeps else None
            directory = RayDirectory(engines_of(app_name, model.config, model.deployment))
            self._groups[name] = EngineGroup(directory, zero, settings.routing_policy)
            if model.scaling.sleeps:
                sleeping[name] = self._groups[name]
            else:  # Serve may have started no engine; the first one reports why that cannot be
                handle.wake.remote()
        grammars = GrammarCompiler()
        self._models = Models([self._service_of(model, grammars) for model in models])
        fronts = RayFronts()
        store = ResponseStore(settings, fronts.own)
        self.stored_responses = StoreOnLoop(store)
        stored = StoredResponses(store, fronts)
        self._batches = Batches(settings)

        async def kill(role: str) -> dict[str, object]:
            killed = await asyncio.to_thread(kill_any, app_name, role, settings)
            return {"engine": killed.engine, "pid": killed.pid}

        self._app = build_http_app(
            self._models, settings, stored=stored, batches=self._batches, kill=kill, echo_request_ids=False
        )
        self._routes, self._callers, self._turns = self._app.router, Callers(), Turns()
        self._start = asyncio.create_task(self._connect(models))
        if await has_healthy_engine(engines_of(app_name)):  # any model's engine
            await self._start

    def _service_of(self, model: ModelSettings, grammars: GrammarCompiler) -> Service:
        config, (name, *aliases), settings = model.config, model.names, self._settings
        draft = Path(config.draft).name if config.draft else None  # the name without its folder
        group = self._groups[name]
        sleep = ModelSleep(group, model.scaling.idle_sleep, partial(self._room.wait_of, name))
        service = Service(group, None, name, draft, aliases, config, grammars, sleep)
        service.metrics.lines = RequestLines(name, line_writer()) if settings.request_log else None
        if settings.otlp_traces_endpoint is not None:
            from serve_app.observability.tracing import Tracing

            service.metrics.add_sink(Tracing.to(name, settings.otlp_traces_endpoint))
        return service

    async def _connect(self, models: Sequence[ModelSettings]) -> None:
        with report_faults("A front"):
            await self._load(models)

    async def _load(self, models: Sequence[ModelSettings]) -> None:
        if any(model.config.weight_updates for model in models):
            self._settings.check_weight_updates(await asyncio.to_thread(http_host))
        await asyncio.gather(*(self._open(service, model) for service, model in zip(self._models, models, strict=True)))
        self._models.first.grammars.start()
        self._batches.start()
        context = serve.get_replica_context()
        is_first = lambda: serve.get_replica_context().rank.rank == 0  # noqa: E731  # it publishes engines' figures
        published: dict[str, Any] = {}
        for service in self._models:
            ray_metrics = RayMetrics(service.model, context.replica_id.unique_id, published)
            reporting = asyncio.create_task(service.metrics.run(ray_metrics, is_first))
            in_background(reporting, "the report of metrics")
        freeze_garbage()

    async def _open(self, service: Service, model: ModelSettings) -> None:
        """Serve a model from now on. The first one, and each that never sleeps, has its engine then."""
        config, group = model.config, self._groups[service.model]
        if not model.scaling.sleeps:
            watch = self._room.watch(service.model, group, described(model.bundles))
            in_background(asyncio.create_task(watch), "the wait for a machine")
        path = await asyncio.to_thread(resolve, config.model, config.revision)
        tokenizer = await asyncio.to_thread(load_tokenizer, path, config)
        defaults = await asyncio.to_thread(SamplingDefaults.load, path, config.generation_config, config.model)
        if service is self._models.first or not model.scaling.sleeps:
            await group.start()
        else:
            group.follow()
        images = await asyncio.to_thread(self._images, path, tokenizer, config, group.info)
        await asyncio.to_thread(service.start, tokenizer, defaults, images)  # the chat template is compiled

    def _images(self, path: Path, tokenizer: Tokenizer, config: EngineConfig, info: ModelInfo) -> ImageProcessor | None:
        """Return the processor of a model's pictures; None if it takes none."""
        if config.images == "off":
            return None
        # An engine that has not started yet takes at least as many tokens as one on a CPU.
        most = config.sized_for("cpu").max_image_tokens if info.images is None else info.images.max_tokens
        return ImageProcessor.of(image_rule_of(path), tokenizer, self._settings.image_limits(most or 1))

    def reconfigure(self, user_config: object) -> None:
        """Log that nothing reads `user_config`, which Serve has changed in place."""
        if refused := refused_option("Front", replica_options()):
            logger.error(refused)

    def check_health(self) -> None:
        """Raise the error of a failed start, such as an unreadable tokenizer; Serve then replaces this replica."""
        if self._start.done():
            self._start.result()

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app

    async def tool_call_format(self) -> str | None:
        """Return the format of tool calls, as --tool-call-parser names it; None without one."""

        def find() -> str | None:
            chats = self._models.named(None).chats
            return None if chats is None else chats.tool_call_format

        return await asyncio.to_thread(find)  # a child process runs the template

    async def drain(self, reason: str) -> int:
        """Refuse new requests from now on, for `reason`, and return the number of live ones, which continue.

        Batch requests end here; the next front that runs the batch sends them again."""
        self._batches.stop()
        self._is_leaving = True
        return sum(group.drain(reason) for group in self._groups.values())

    async def end(self, reason: str) -> None:
        """End all live requests with an error, for `reason`."""
        for group in self._groups.values():
            group.end(reason)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Answer another Ray job's request; docs/handle_call.py shows a caller.

        `body` is for /v1/completions or, with messages, for /v1/chat/completions. Yields {"index", "text",
        "token_ids", "finish_reason", "seed"} as tokens come. A chat adds pieces of "reasoning" or "tool_calls"."""
        call = current_call()
        content = await encoded(body)
        endpoint: Endpoint[Any] = CHAT if "messages" in body else COMPLETIONS

        def prepare() -> PreparedRequest[Any]:
            return self._models.prepare(endpoint, endpoint.read(content))

        prepared = await run_preparation(content, "", endpoint.renders_chats, prepare)
        leaving, last = UntilClientLeaves(partial(self.leaves, call.caller)), 0.0
        async with leaving, self._turns.stream(), aclosing(self._models.run(prepared)) as deltas:
            async for new in deltas:
                last = await self._turns.wait(last)
                for delta in new:
                    yield {
                        "index": delta.index,
                        "text": delta.text,
                        "token_ids": delta.token_ids,
                        "finish_reason": delta.finish_reason,
                        "seed": prepared.requests[delta.index].seed,
                        **message_delta(delta),
                    }


async def _wake(engines: DeploymentHandle[Any], room: Room, model: str) -> None:
    """Wait until an engine exists, at the cost of idle ones; raises CallboardError if none can start."""
    making = in_background(asyncio.create_task(room.make(model)), "room for an engine")
    try:
        await engines.wake.remote()
    except DeploymentUnavailableError as e:
        raise CallboardError("No engine could be started; see the log of the Serve controller.") from e
    finally:
        making.cancel()
