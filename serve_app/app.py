"""The Serve application: `serve run serve_app.app:build_app model=...`, a Serve YAML file, or `callboard serve`.

No `from __future__ import annotations` here: Serve reads the type of build_app's argument at run time.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from typing import Any, get_type_hints

import ray
from pydantic import BaseModel, ConfigDict, Field, create_model
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from actors.environment import FAST_SERVE, freeze_garbage
from actors.link import LinkGroup
from actors.placement import FRONT_CPUS, SUPERVISOR_CPUS, bundles, default_fronts, uses_gpu
from actors.supervisor import Supervisor, link_to
from runtime.core.config import EngineConfig
from runtime.core.types import CallboardError
from runtime.loading.resolve import resolve
from runtime.text.tokenizer import Tokenizer
from serve_app.http import build_http_app
from serve_app.requests import ChatRequest, CompletionRequest, parse
from serve_app.service import Service
from serve_app.sse import encode_json

logger = logging.getLogger("ray.serve")


class _ServeArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    served_model_name: str | None = Field(None, description="the name that clients use; default: model")
    num_replicas: int = Field(1, ge=1, description="model replicas, each an engine with its runners")
    num_fronts: int | None = Field(
        None, ge=1, description="front replicas (CPU only) that share the engines; default: one per 4 CPUs, at most 4"
    )

    def engine_config(self) -> EngineConfig:
        """The engine's part; raises CallboardError if a value is out of range."""
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})


_TYPES = get_type_hints(EngineConfig)
AppArgs = create_model(
    "AppArgs",
    __base__=_ServeArgs,
    __doc__="What the application can be started with: every field of EngineConfig and what concerns Serve.",
    **{f.name: (_TYPES[f.name], Field(f.default, description=f.metadata["help"])) for f in fields(EngineConfig)},
)


class EngineHost:
    """One Serve replica: the supervisor of one engine, whose placement group comes and goes with it."""

    async def __init__(self, config: EngineConfig, gpu: bool) -> None:
        context = serve.get_replica_context()
        group = ray.util.get_current_placement_group()
        self._supervisor = Supervisor(config, engine_name(context.app_name, context.rank.rank), group, gpu)
        await self._supervisor.start()

    def check_health(self) -> None:
        """Serve replaces this replica, and with it the engine, when the engine cannot be restarted."""
        if self._supervisor.failed:
            raise CallboardError(self._supervisor.failed)


class Front:
    """One Serve replica: HTTP, text and tokens, and a link to each engine. Several share the engines."""

    async def __init__(
        self, config: EngineConfig, num_engines: int, served_model_name: str | None, engines: DeploymentHandle
    ) -> None:
        """`engines` is the deployment that this one needs; it is reached over sockets, not through its handle."""
        missing = [f"{name}={value}" for name, value in FAST_SERVE.items() if os.environ.get(name) != value]
        if missing:
            logger.warning("For full speed set %s before Ray starts, as `callboard serve` does.", " ".join(missing))
        path = await asyncio.to_thread(resolve, config.model, config.revision)
        tokenizer = await asyncio.to_thread(Tokenizer.load, path)
        app_name = serve.get_replica_context().app_name
        self._engines = LinkGroup([link_to(engine_name(app_name, rank)) for rank in range(num_engines)])
        await self._engines.start()
        self._service = Service(self._engines, tokenizer, served_model_name or config.model)
        freeze_garbage()

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_http_app(self._service)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """For other Ray jobs: `body` is that of /v1/completions or, with messages, of /v1/chat/completions.

        Yields {"index", "text", "token_ids", "finish_reason"} as tokens come, with "reasoning_content" or "tool_calls"
        (pieces of them, as in a stream) where a chat has some; docs/handle_call.py shows a caller."""
        request = parse(ChatRequest if "messages" in body else CompletionRequest, encode_json(body))
        async with aclosing(self._service.run(self._service.prepare(request))) as deltas:
            async for new in deltas:
                for delta in new:
                    yield {
                        "index": delta.index,
                        "text": delta.text,
                        "token_ids": delta.token_ids,
                        "finish_reason": delta.finish_reason,
                        **({} if delta.reply is None else delta.reply.delta_fields()),
                    }


def engine_name(app_name: str, rank: int) -> str:
    """The name under which links find the engine of EngineHost replica `rank`."""
    return f"{app_name}/engine/{rank}"


def build_app(args: AppArgs) -> serve.Application:
    """The application: a front that HTTP reaches, and the engines behind it.

    Raises CallboardError if a value is out of range or the cluster lacks what is asked for."""
    config = args.engine_config()
    if not ray.is_initialized():
        ray.init(namespace="serve")  # as `serve run` does, but after this: here the cluster's GPUs must be known
    resources = ray.cluster_resources()
    gpu = uses_gpu(config, resources)
    engines = serve.deployment(
        EngineHost,
        name="Engine",
        num_replicas=args.num_replicas,
        ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
        placement_group_bundles=bundles(config, gpu),
        placement_group_strategy="STRICT_PACK",
        max_constructor_retry_count=1,  # a model that does not load will not load the second time either
        health_check_period_s=2,
    )
    front = serve.deployment(
        serve.ingress()(Front),  # without an app: each replica builds its own, so none is ever pickled
        name="Front",
        num_replicas=args.num_fronts or default_fronts(resources),
        ray_actor_options={"num_cpus": FRONT_CPUS},
        max_ongoing_requests=4096,  # the engines' own queue limit comes first, with an error of OpenAI's shape
    )
    return front.bind(config, args.num_replicas, args.served_model_name, engines.bind(config, gpu))


def failure_of(app_name: str) -> str:
    """Why an application's replicas did not start, as one sentence; empty if it is not known."""
    status = serve.status().applications.get(app_name)
    if status is None:
        return ""
    texts = [status.message, *(d.message for d in status.deployments.values())]
    sentences = re.findall(r"CallboardError: (.+)", "\n".join(texts))
    return sentences[-1] if sentences else ""
