"""The routes of /v1/responses: creation, also in the background, and access to stored responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.background import in_background
from runtime.output.fields import FieldError
from serve_app.apis.responses.answers import CountedInput, DeletedResponse, ItemList, ResponseObject
from serve_app.apis.responses.builder import ResponseBuilder, ResponseStream, error_event
from serve_app.apis.responses.endpoint import ResponsesEndpoint
from serve_app.apis.responses.input_items import ITEMS, as_list, listed
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.apis.responses.store import MAX_ITEMS, StoredResponses
from serve_app.http.json_routes import json_response
from serve_app.http.lanes import LONG_REQUESTS, run_preparation
from serve_app.http.limits import Deadline, read_json_body
from serve_app.observability.context import RequestContext
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import INTERNAL_ERROR, ApiError, api_error
from serve_app.protocol.event_ids import EventIds
from serve_app.protocol.operation import BODY, ApiRoute, Operation, route
from serve_app.protocol.parsing import read_query
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.protocol.shapes import RequestModel
from serve_app.service.generation import EVENT_STREAM, Generation, UntilClientLeaves
from serve_app.service.models import Models, when_started
from serve_app.service.recorded import RecordedRequests
from serve_app.settings import HttpSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONG_BYTES = 8 << 10  # stored conversation size; a longer one is parsed in a thread


class RetrieveQuery(RequestModel):
    """GET /v1/responses/{response_id}."""

    stream: Literal["true", "false"] | None = None
    starting_after: Annotated[int, Field(ge=0, strict=False)] | None = None  # the last known event's number


class InputItemsQuery(RequestModel):
    """GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # id of the last known item


def response_routes(
    models: Models, settings: HttpSettings, stored: StoredResponses, recorded: RecordedRequests
) -> list[Route]:
    creation, routes = ResponseCreation(models, settings, stored, recorded), StoredResponseRoutes(settings, stored)
    one, errors = "/v1/responses/{response_id}", (400, 404, 503)
    return [
        ApiRoute(ResponsesEndpoint.path, creation, ResponsesEndpoint.operation),
        route(
            "/v1/responses/input_tokens",
            creation.count_input,
            "The number of tokens of a response's prompt",
            CountedInput,
            (ResponsesRequest,),
            (*BODY, 404, 503),
        ),
        ApiRoute(
            one,
            routes.one,
            Operation("A stored response", ResponseObject, errors=errors, streams=True, query=RetrieveQuery),
            Operation("Delete a stored response", DeletedResponse, errors=errors, method="DELETE"),
        ),
        route(
            f"{one}/cancel",
            routes.cancel,
            "End a response in the background",
            ResponseObject,
            errors=errors,
            method="POST",
        ),
        route(
            f"{one}/input_items",
            routes.input_items,
            "A response's input",
            ItemList,
            errors=errors,
            query=InputItemsQuery,
        ),
    ]


class ResponseCreation(Generation):
    """POST /v1/responses."""

    def __init__(
        self, models: Models, settings: HttpSettings, stored: StoredResponses, recorded: RecordedRequests
    ) -> None:
        super().__init__(models, ResponsesEndpoint(stored.store), settings, recorded)
        self._stored = stored

    async def _prepared(self, body: bytes, scope: Scope) -> PreparedRequest[Any]:
        def prepare(asked: ResponsesRequest) -> PreparedRequest[Any]:
            prepared = self._prepare(asked, scope)
            prepared.request.encoded_items  # noqa: B018  # cached here, off the event loop that stores them
            return prepared

        return await self._with_conversation(body, scope["owner"], prepare)

    async def count_input(self, request: HttpRequest) -> Response:
        """Answer with the length of the prompt that a response would have."""

        def count(asked: ResponsesRequest) -> CountedInput:
            model = self._models.named(asked.model)
            length = len(self._endpoint.prompts(asked, model).token_ids[0])
            return CountedInput(input_tokens=length, max_model_len=model.info.max_model_len)

        body = await read_json_body(request.scope, request.receive, self._settings) or b""
        return json_response(await self._with_conversation(body, request.scope["owner"], count))

    async def _with_conversation(self, body: bytes, owner: str, work: Callable[[ResponsesRequest], T]) -> T:
        """Return `work` of the request in a body, after the conversation that it continues."""
        request = await run_preparation(body, owner, False, partial(self._endpoint.read, body))
        self._stored.store.stores(request)  # raises FieldError if it cannot be stored
        items: list[bytes] = []
        if (previous := request.previous_response_id) is not None:
            items = await self._before(previous, owner)

        def run() -> T:
            return work(request.after(ITEMS.validate_json(as_list(items))) if items else request)

        if sum(map(len, items)) > _LONG_BYTES:
            return await when_started(partial(LONG_REQUESTS.run, owner, run))
        return await when_started(partial(run_preparation, body, owner, True, run))

    async def _before(self, previous: str, owner: str) -> list[bytes]:
        """Return the conversation up to an earlier response."""
        try:
            items: list[bytes] = await self._stored.call("conversation", previous, owner)
        except ApiError as e:
            raise ApiError(e.status, str(e), param="previous_response_id", code=e.code) from e
        if len(items) > MAX_ITEMS:
            text = f"The stored conversation has {len(items)} items; at most {MAX_ITEMS} can go on. Send some as input."
            raise ApiError(400, text, param="previous_response_id", code="conversation_too_long")
        return items

    async def _generate(
        self, prepared: PreparedRequest[Any], context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        ids = prepared.event_ids
        if not prepared.request.background or (ids is not None and ids.resumes):
            await super()._generate(prepared, context, scope, receive, send)
            return
        builder = ResponseBuilder(prepared, is_stored=True, has_events=bool(prepared.request.stream))
        stored = self._stored.store.begin(prepared, builder)
        builder.create()
        stored.task = in_background(asyncio.create_task(self._run(prepared, context, builder)), "a stored response")
        if prepared.request.stream:
            await follow(self._stored, self._settings, prepared.id, prepared.owner, 0, receive, send, ids)
        else:
            await json_response(builder.object(), headers=prepared.headers())(scope, receive, send)

    async def _run(self, prepared: PreparedRequest[Any], context: RequestContext, builder: ResponseBuilder) -> None:
        """Generate a response, even if its client leaves."""
        store = self._stored.store
        store.grow(prepared.id)
        try:
            async with (
                Deadline(self._settings.request_timeout_s),
                aclosing(self._models.run(prepared, context)) as deltas,
            ):
                async for new in deltas:
                    for delta in new:
                        builder.add(delta)
                    store.grow(prepared.id)
        except ApiError as e:
            if e.code == "request_aborted":
                builder.cancel()
            else:
                builder.fail(e)
        except asyncio.CancelledError:
            builder.cancel()
            raise
        except Exception:
            logger.exception("request %s failed", prepared.id)
            builder.fail(INTERNAL_ERROR)
        finally:
            store.grow(prepared.id)


class StoredResponseRoutes:
    """Handlers for the stored responses of all fronts."""

    def __init__(self, settings: HttpSettings, stored: StoredResponses) -> None:
        self._settings, self._stored = settings, stored

    async def one(self, request: HttpRequest) -> Response:
        return await (self.delete if request.method == "DELETE" else self.retrieve)(request)

    async def retrieve(self, request: HttpRequest) -> Response:
        query = read_query(RetrieveQuery, request)
        if query.stream == "true":
            start = 0 if query.starting_after is None else query.starting_after + 1
            await self._call("events", request, start)  # raises the error that the stream could not report
            return _Followed(self._stored, self._settings, request, start)
        if query.starting_after is not None:
            raise FieldError("starting_after", "starting_after is only allowed when stream is true.")
        return Response(await self._call("body", request), media_type="application/json")

    async def cancel(self, request: HttpRequest) -> Response:
        return Response(await self._call("cancel", request), media_type="application/json")

    async def delete(self, request: HttpRequest) -> Response:
        await self._call("delete", request)
        return json_response(DeletedResponse(request.path_params["response_id"]))

    async def input_items(self, request: HttpRequest) -> Response:
        query = read_query(InputItemsQuery, request)
        stored: list[bytes] = await self._call("input_items", request)
        name = request.path_params["response_id"].removeprefix("resp_")
        content = await LONG_REQUESTS.run(request.scope["owner"], partial(_page, stored, name, query))
        return Response(content, media_type="application/json")

    async def _call(self, method: str, request: HttpRequest, *args: Any) -> Any:
        return await self._stored.call(method, request.path_params["response_id"], request.scope["owner"], *args)


def _page(stored: list[bytes], name: str, query: InputItemsQuery) -> bytes:
    """Return the page of a conversation's items for a query; raises FieldError."""
    items = [listed(item, f"{name}_{i}") for i, item in enumerate(ITEMS.validate_json(as_list(stored)))]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == query.after), None)
        if at is None:
            raise FieldError("after", "after is the id of none of these items.")
        items = items[at + 1 :]
    page = items[: query.limit]
    ids = [item["id"] for item in page] or [""]
    has_more = len(items) > len(page)
    return encode_json(ItemList(data=page, first_id=ids[0], last_id=ids[-1], has_more=has_more))


class _Followed(Response):
    """A stream of a stored response's events."""

    def __init__(self, stored: StoredResponses, settings: HttpSettings, request: HttpRequest, start: int) -> None:
        super().__init__()
        owner = request.scope["owner"]
        self._follow = partial(follow, stored, settings, request.path_params["response_id"], owner, start)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._follow(receive, send)


async def follow(
    stored: StoredResponses,
    settings: HttpSettings,
    response_id: str,
    owner: str,
    start: int,
    receive: Receive,
    send: Send,
    ids: EventIds | None = None,
) -> None:
    """Send the events of a background response until it ends or its reader leaves."""
    counts = [] if ids is None else ids.counts()
    async with UntilClientLeaves(receive, send) as send:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        is_over = False
        try:
            while not is_over:
                events, is_over = await stored.call("events", response_id, owner, start)
                start += len(events)
                events = events if ids is None else list(ids.numbered(events, counts, 0))
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                elif not is_over:
                    try:
                        async with asyncio.timeout(settings.keep_alive_s):
                            await stored.news(response_id)
                    except TimeoutError:
                        body = ResponseStream.keep_alive
                        await send({"type": "http.response.body", "body": body, "more_body": True})
        except (ApiError, FieldError) as e:  # the response was deleted, or its front has ended
            error = api_error(e) if isinstance(e, FieldError) else e
            await send({"type": "http.response.body", "body": error_event(error, start), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
