"""The Serve application: `serve run serve_app.app:build_app model=...`, a Serve YAML file, or `callboard serve`.

No `from __future__ import annotations` here: Serve reads the type of build_app's argument at run time.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from ray import serve
from starlette.applications import Starlette

from actors.environment import FAST_SERVE
from runtime.core.config import EngineConfig
from runtime.loading.resolve import resolve
from runtime.text.tokenizer import Tokenizer
from serve_app.http import build_http_app
from serve_app.openai import ChatRequest, CompletionRequest, parse
from serve_app.service import Service
from serve_app.sse import encode_json

logger = logging.getLogger("ray.serve")


class _ServeArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    served_model_name: str | None = Field(None, description="the name that clients use; default: model")
    num_replicas: int = Field(1, ge=1, description="model replicas")

    def engine_config(self) -> EngineConfig:
        """The engine's part; raises CallboardError if a value is out of range."""
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})


_TYPES = get_type_hints(EngineConfig)
AppArgs = create_model(
    "AppArgs",
    __base__=_ServeArgs,
    __doc__="What the application can be started with: every field of EngineConfig and two of Serve's.",
    **{f.name: (_TYPES[f.name], Field(f.default, description=f.metadata["help"])) for f in fields(EngineConfig)},
)


class Front:
    """One Serve replica: the HTTP front of one engine, which it starts and owns."""

    async def __init__(self, config: EngineConfig, served_model_name: str | None) -> None:
        from actors.supervisor import start_engine

        missing = [f"{name}={value}" for name, value in FAST_SERVE.items() if os.environ.get(name) != value]
        if missing:
            logger.warning("For full speed set %s before Ray starts, as `callboard serve` does.", " ".join(missing))
        path = await asyncio.to_thread(resolve, config.model, config.revision)
        tokenizer = await asyncio.to_thread(Tokenizer.load, path)
        self._engine = await start_engine(config)
        self._service = Service(self._engine, tokenizer, served_model_name or config.model)

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_http_app(self._service)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """For other Ray jobs: `body` is that of /v1/completions or, with messages, of /v1/chat/completions.

        Yields {"index", "text", "token_ids", "finish_reason"} as tokens come; docs/handle_call.py shows a caller."""
        request = parse(ChatRequest if "messages" in body else CompletionRequest, encode_json(body))
        async for deltas in self._service.run(self._service.prepare(request)):
            for delta in deltas:
                yield {
                    "index": delta.index,
                    "text": delta.text,
                    "token_ids": delta.token_ids,
                    "finish_reason": delta.finish_reason,
                }


def build_app(args: AppArgs) -> serve.Application:
    """The application; raises CallboardError if a value is out of range."""
    from actors.supervisor import replica_options

    config = args.engine_config()
    deployment = serve.deployment(
        serve.ingress()(Front),  # without an app: each replica builds its own, so none is ever pickled
        name="Callboard",
        num_replicas=args.num_replicas,
        **replica_options(config),
    )
    return deployment.bind(config, args.served_model_name)


def failure_of(app_name: str) -> str:
    """Why an application's replicas did not start, as one sentence; empty if it is not known."""
    status = serve.status().applications.get(app_name)
    if status is None:
        return ""
    texts = [status.message, *(d.message for d in status.deployments.values())]
    sentences = re.findall(r"CallboardError: (.+)", "\n".join(texts))
    return sentences[-1] if sentences else ""
