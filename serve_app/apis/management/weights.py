"""Routes for trainers, in vLLM's form: pauses and weight updates.

    pause     requests wait, end or are aborted; then the engines compute no step
    start     an update is open, on all engines
    update    its parts arrive, any number of times
    finish    all engines change their weights, or none if the tensors do not fit
    resume    the engines compute again

The engines have all state, so each call may reach another front."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from actors.wire.engine_client import EngineClient, WeightsRefused
from actors.wire.weight_calls import (
    MAX_LEASE_S,
    A,
    Connect,
    Discard,
    Disconnect,
    GetState,
    Pause,
    Receive,
    Rename,
    Resume,
    Start,
    WeightCall,
)
from runtime.base.types import CallboardError
from serve_app.apis.management.answers import (
    FinishedUpdate,
    Message,
    Paused,
    PauseStatus,
    Renamed,
    WeightInfo,
    WorldSize,
)
from serve_app.apis.management.update_requests import (
    FinishUpdateRequest,
    InitTransferRequest,
    RenameRequest,
    StartUpdateRequest,
    UpdateWeightsRequest,
    allowed_update,
    check_init_info,
    read_update,
)
from serve_app.http.auth import check_origin
from serve_app.http.json_routes import Handler, json_response, parsed_body
from serve_app.http.lanes import run_preparation
from serve_app.http.limits import Deadline, read_json_body
from serve_app.protocol.errors import ApiError, unavailable
from serve_app.protocol.operation import BODY, ENGINES, route
from serve_app.protocol.parsing import parse, read_query
from serve_app.protocol.shapes import RequestModel
from serve_app.service.generation import UntilClientLeaves
from serve_app.service.models import Models
from serve_app.settings import HttpSettings

_WITH_CALLER = {Pause: "pause", Receive: "update"}  # calls that end if their client leaves; the others end soon
_NO_DRAFT = (
    "A draft keeps its weights here, which costs accepted tokens but changes none; leave this call out, or "
    "serve with --draft ngram."
)
_NO_CHECKSUMS = "This server makes no checksums of weights; GET /weight_info has the version of each engine."
_REFUSALS = {"busy": (409, "weights_busy"), "not_open": (409, "no_weight_update"), "bad_request": (400, None)}


class PauseQuery(RequestModel):
    """POST /pause."""

    mode: Literal["abort", "wait", "finish", "keep"] = "abort"  # finish is another name for wait
    clear_cache: Annotated[bool, Field(strict=False)] = True  # ignored: no block outlives its weights
    kv: Literal["recompute", "keep"] = "recompute"  # KV of requests that continue with other weights
    # Without a call about weights for this long, the pause ends; default: trainer_timeout_s.
    lease_s: Annotated[float | None, Field(gt=0, le=MAX_LEASE_S, strict=False)] = None


class WorldSizeQuery(RequestModel):
    """GET /get_world_size."""

    include_dp: Annotated[bool, Field(strict=False)] = True  # all engines; false for one


def weight_routes(models: Models, settings: HttpSettings) -> list[Route]:
    """Return the routes. They are refused unless the engines run with weight_updates."""
    routes = WeightRoutes(models, settings)
    post: dict[str, Any] = {"errors": ENGINES, "method": "POST"}
    pause: dict[str, Any] = {"errors": (400, 409, *ENGINES), "method": "POST", "query": PauseQuery}
    update: dict[str, Any] = {"errors": (*ENGINES, *BODY, 409)}
    optional: dict[str, Any] = {**update, "needs_body": False}
    refused: dict[str, Any] = {"errors": (400,), "method": "POST"}
    left = routes.calling(Disconnect, Message("Weight transfer shut down"))
    discarded = routes.calling(Discard, Message("Weight update discarded"))
    return [
        route("/pause", routes.pause, "Compute no more steps", Paused, **pause),
        route("/resume", routes.calling(Resume, Paused("resumed")), "Compute steps again", Paused, **post),
        route("/is_paused", routes.is_paused, "Whether all engines are paused", PauseStatus, errors=ENGINES),
        route(
            "/init_weight_transfer_engine",
            routes.init,
            "Join a trainer's NCCL group",
            Message,
            (InitTransferRequest,),
            **update,
        ),
        route("/shutdown_weight_transfer_engine", left, "Leave the trainer's group", Message, **post),
        route(
            "/start_weight_update",
            routes.start,
            "Open an update of the weights",
            Message,
            (StartUpdateRequest,),
            **optional,
        ),
        route(
            "/update_weights",
            routes.update,
            "Receive tensors of the update",
            Message,
            (UpdateWeightsRequest,),
            **update,
        ),
        route(
            "/finish_weight_update",
            routes.finish,
            "Use the new weights",
            FinishedUpdate,
            (FinishUpdateRequest,),
            **optional,
        ),
        route("/discard_weight_update", discarded, "Drop the open update", Message, **post),
        route("/update_weight_version", routes.rename, "Name the weights", Renamed, (RenameRequest,), **update),
        route("/weight_info", routes.info, "The version of the weights", WeightInfo, errors=ENGINES),
        route(
            "/get_world_size",
            routes.world_size,
            "The number of ranks that receive weights",
            WorldSize,
            errors=(400, *ENGINES),
            query=WorldSizeQuery,
        ),
        route("/start_draft_weight_update", _refusing(_NO_DRAFT, "draft_keeps_weights"), "Refused", None, **refused),
        route("/weight_checker", _refusing(_NO_CHECKSUMS, "no_weight_checksums"), "Refused", None, **refused),
    ]


def _refusing(text: str, code: str) -> Handler:
    async def refuse(request: HttpRequest) -> Response:
        raise ApiError(400, text, code=code)

    return refuse


class WeightRoutes:
    """Handlers for trainers."""

    def __init__(self, models: Models, settings: HttpSettings) -> None:
        self._models, self._settings = models, settings

    # ---- pauses -----------------------------------------------------------------------------------------------------

    async def pause(self, request: HttpRequest) -> Response:
        """Answer when every engine is paused: with wait after the end of all running requests."""
        asked = read_query(PauseQuery, request)
        mode = "wait" if asked.mode == "finish" else asked.mode
        await self._call(request, Pause(mode=mode, kv=asked.kv, lease_s=asked.lease_s))
        return json_response(Paused("paused"))

    async def is_paused(self, request: HttpRequest) -> Response:
        info = WeightInfo.of(await self._call(request, GetState()))
        return json_response(PauseStatus(info.paused))

    # ---- updates ----------------------------------------------------------------------------------------------------

    async def init(self, request: HttpRequest) -> Response:
        """Answer when all ranks have joined the trainer's group."""
        client = self._client(request)
        asked = await parsed_body(InitTransferRequest, request, self._settings)
        check_init_info(asked.init_info)
        await self._call_on(request, client, Connect(asked.init_info))
        return json_response(Message("Weight transfer initialized"))

    async def start(self, request: HttpRequest) -> Response:
        client = self._client(request)
        parse(StartUpdateRequest, await self._optional_body(request))
        await self._call_on(request, client, Start())
        return json_response(Message("Weight update started"))

    async def update(self, request: HttpRequest) -> Response:
        """Answer when every rank has staged its share of the tensors, or has the adapter."""
        client = self._client(request)
        body = await read_json_body(request.scope, request.receive, self._settings) or b""
        info = await run_preparation(body, request.scope["owner"], False, lambda: read_update(body))
        info = await asyncio.to_thread(allowed_update, info, self._settings.weight_folder)
        if isinstance(info, dict) and "lora_name" in info:
            async with Deadline(self._settings.request_timeout_s):
                await self._models.load_adapter(info["lora_name"], info["paths"][0], may_replace=True)
            return json_response(Message("Adapter updated"))
        await self._call_on(request, client, Receive(update_info=info))
        return json_response(Message("Weights updated"))

    async def finish(self, request: HttpRequest) -> Response:
        """Answer when every engine uses the new weights and, with wait_stored, has stored them."""
        client = self._client(request)
        asked = parse(FinishUpdateRequest, await self._optional_body(request))
        states = await self._call_on(request, client, asked.call())
        info, head = WeightInfo.of(states), min(state.draft_head for state in states.values())
        text = "Weight update finished"
        return json_response(FinishedUpdate(text, info.weight_version, info.serial, info.stored, head))

    async def rename(self, request: HttpRequest) -> Response:
        client = self._client(request)
        asked = await parsed_body(RenameRequest, request, self._settings)
        new_version = str(asked.new_version)
        await self._call_on(request, client, Rename(new_version))
        return json_response(Renamed(new_version))

    # ---- facts ------------------------------------------------------------------------------------------------------

    async def info(self, request: HttpRequest) -> Response:
        return json_response(WeightInfo.of(await self._call(request, GetState())))

    async def world_size(self, request: HttpRequest) -> Response:
        asked = read_query(WorldSizeQuery, request)
        sizes = [state.world_size for state in (await self._call(request, GetState())).values()]
        return json_response(WorldSize(sum(sizes) if asked.include_dp else max(sizes)))

    # ---- calls ------------------------------------------------------------------------------------------------------

    def calling(self, call: Callable[[], WeightCall[Any]], answer: Message | Paused) -> Handler:
        """Return a handler that answers when all engines have done a call without arguments."""

        async def handle(request: HttpRequest) -> Response:
            await self._call(request, call())
            return json_response(answer)

        return handle

    def _client(self, request: HttpRequest) -> EngineClient:
        """Return the client; raises the 403 of a page or a server that may not change weights, and the 503."""
        check_origin(request, self._settings)
        client = self._models.first.engine_client()
        if client.info.weights is None:
            text = "This server keeps its weights; start it with --weight-updates to allow trainers to change them."
            raise ApiError(403, text, code="weight_updates_not_allowed")
        return client

    async def _call(self, request: HttpRequest, call: WeightCall[A]) -> dict[str, A]:
        return await self._call_on(request, self._client(request), call)

    async def _call_on(self, request: HttpRequest, client: EngineClient, call: WeightCall[A]) -> dict[str, A]:
        """Return the answers of the engines by their ids; raises ApiError."""
        try:
            async with Deadline(self._settings.request_timeout_s):
                if type(call) not in _WITH_CALLER:
                    return await client.weights(call)
                async with UntilClientLeaves(request.receive):
                    return await client.weights(call)
            if isinstance(call, Receive):  # the engines may still wait for its tensors
                await client.weights(Discard())
            raise ApiError(
                499, f"The client left before the end of its {_WITH_CALLER[type(call)]}.", code="client_left"
            )
        except ApiError:
            raise
        except WeightsRefused as e:
            if e.code == "unavailable":
                raise unavailable(str(e)) from e
            status, code = _REFUSALS[e.code]
            raise ApiError(status, str(e), code=code) from e
        except CallboardError as e:
            raise ApiError(500, str(e), code="engine_error") from e

    async def _optional_body(self, request: HttpRequest) -> bytes:
        """Return the request's JSON; an empty object without a body."""
        headers = request.headers
        if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
            return b"{}"
        return await read_json_body(request.scope, request.receive, self._settings) or b"{}"
