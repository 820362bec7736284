"""OpenAI's /v1/files and /v1/batches, for servers with --batch-folder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive

from runtime.output.fields import invalid, shortened
from serve_app.apis.batches.answers import Batch, BatchList, DeletedFile, FileList, StoredFile
from serve_app.apis.batches.store import BatchStore, Record
from serve_app.apis.batches.worker import Batches
from serve_app.http.auth import check_origin
from serve_app.http.json_routes import json_response, parsed_body
from serve_app.protocol.dialects import Metadata
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import BODY, ApiRoute, Operation, route
from serve_app.protocol.parsing import read_query
from serve_app.protocol.shapes import RequestModel, only
from serve_app.settings import HttpSettings

logger = logging.getLogger(__name__)

_DAY_S = 86_400
_FORM_BYTES = 16 << 10  # an upload's bytes besides its file
_CREATE_BYTES = 64 << 10  # body of POST /v1/batches; metadata may take 9 KiB
_PIECE_BYTES = 1 << 20  # part of an upload that must arrive within body_timeout_s
_DISK_RETRY_S = 30.0
_T = TypeVar("_T")
_Limit = Annotated[int, Field(ge=1, le=10_000, strict=False)]


class FilesQuery(RequestModel):
    """GET /v1/files."""

    after: str | None = None  # id of the last known file
    limit: _Limit = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class BatchesQuery(RequestModel):
    """GET /v1/batches."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20


class UploadForm(RequestModel):
    """POST /v1/files, as multipart/form-data."""

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


class CreateBatchRequest(RequestModel):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, only(None, remedy="files stay until their deletion; leave it out")] = None


def batch_routes(settings: HttpSettings, batches: Batches) -> list[Route]:
    """Return the routes of files and batches. Without a folder each answers 404 and names the flag to set."""
    routes, disk = BatchRoutes(settings, batches), (404, 503)
    return [
        ApiRoute(
            "/v1/files",
            routes.files,
            Operation("Upload a file", StoredFile, errors=(*BODY, 403, *disk, 429), method="POST", form=UploadForm),
            Operation("Files", FileList, errors=(400, *disk), query=FilesQuery),
        ),
        ApiRoute(
            "/v1/files/{file_id}",
            routes.file,
            Operation("A file, by its id", StoredFile, errors=disk),
            Operation("Delete a file", DeletedFile, errors=disk, method="DELETE"),
        ),
        route("/v1/files/{file_id}/content", routes.content, "The bytes of a file", None, errors=disk),
        ApiRoute(
            "/v1/batches",
            routes.batches,
            Operation("Answer the requests of a file", Batch, (CreateBatchRequest,), (*BODY, *disk, 429)),
            Operation("Batches, the newest first", BatchList, errors=(400, *disk), query=BatchesQuery),
        ),
        route("/v1/batches/{batch_id}", routes.batch, "A batch, by its id", Batch, errors=disk),
        route("/v1/batches/{batch_id}/cancel", routes.cancel, "End a batch", Batch, errors=(400, *disk), method="POST"),
    ]


class BatchRoutes:
    """Handlers of files and batches."""

    def __init__(self, settings: HttpSettings, batches: Batches) -> None:
        self._settings, self._batches = settings, batches
        self._uploads: Counter[str] = Counter()  # running uploads by owner

    @property
    def _store(self) -> BatchStore:
        if self._batches.store is None:
            text = "This server does not store files or run batches; its operator can start it with --batch-folder DIR."
            raise ApiError(404, text, code="batches_off")
        return self._batches.store

    # ---- files -------------------------------------------------------------------------------------------------------

    async def files(self, request: HttpRequest) -> Response:
        store = self._store
        if request.method == "POST":
            return await self._upload(store, request)
        query = read_query(FilesQuery, request)
        wanted: Callable[[Record], bool] = lambda file: query.purpose in (None, file.object["purpose"])  # noqa: E731
        ascending, owner = query.order == "asc", request.scope["owner"]
        found = await _on_disk(store.files.page, owner, query.after, query.limit, ascending, wanted)
        return _page(*found)

    async def _upload(self, store: BatchStore, request: HttpRequest) -> Response:
        self._check_upload(request)
        most, owner = self._settings.batch_file_bytes, request.scope["owner"]
        receive = _bounded(request.receive, most + _FORM_BYTES, self._settings.body_timeout_s)
        with self._receiving(owner), _disk_errors():
            async with HttpRequest(request.scope, receive).form(
                max_files=1, max_fields=8, max_part_size=_FORM_BYTES
            ) as form:
                if unknown := [name for name in form if name not in UploadForm.model_fields]:
                    raise invalid(unknown[0], "is not supported here; leave it out")
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise invalid("file", "is missing; send the file as a part of that name")
                if purpose != "batch":
                    raise invalid("purpose", "must be batch, the only purpose of files here")
                if (file.size or 0) > most:
                    raise _too_long(most)
                name = (file.filename or "file")[:256]
                return json_response((await _on_disk(store.upload, file.file, owner, name)).object)
        return Response(status_code=400)  # the client has left

    @contextmanager
    def _receiving(self, owner: str) -> Iterator[None]:
        """Count an upload within the block. Raises the 429 of a limit."""
        for count, what, limit in (
            (self._uploads[owner], "Your API key sends", "batch_max_uploads_per_key"),
            (self._uploads.total(), "All API keys send", "batch_max_uploads"),
        ):
            if count >= (most := getattr(self._settings, limit)):
                text = f"{what} {count} files now, and this server receives {most} at once ({limit}); try again later."
                raise ApiError(429, text, code="too_many_uploads", retry_after_s=1.0)
        self._uploads[owner] += 1
        try:
            with suppress(ClientDisconnect):
                yield
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    def _check_upload(self, request: HttpRequest) -> None:
        headers = request.headers
        kind, parameters = parse_options_header(headers.get("content-type"))
        if kind != b"multipart/form-data":
            text = "Send the file as multipart/form-data, with the parts file and purpose."
            raise ApiError(415, text, code="unsupported_media_type")
        # The event loop decodes the parts, and some Python codecs take quadratic time.
        if (charset := parameters.get(b"charset", b"utf-8").decode("latin-1")).lower() != "utf-8":
            text = f"The form has the charset {shortened(charset)!r}; send it in UTF-8, and leave charset out."
            raise ApiError(415, text, code="unsupported_media_type")
        check_origin(request, self._settings)
        length = headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > self._settings.batch_file_bytes + _FORM_BYTES):
            raise _too_long(self._settings.batch_file_bytes)

    async def file(self, request: HttpRequest) -> Response:
        store, file_id, owner = self._store, request.path_params["file_id"], request.scope["owner"]
        if request.method == "DELETE":
            await _on_disk(store.delete_file, file_id, owner)
            return json_response(DeletedFile(file_id))
        return json_response((await _on_disk(store.files.read, file_id, owner)).object)

    async def content(self, request: HttpRequest) -> Response:
        store, file_id = self._store, request.path_params["file_id"]
        path, stat = await _on_disk(store.content, file_id, request.scope["owner"])
        headers = {"x-content-type-options": "nosniff"}  # browsers show any upload as text
        return FileResponse(path, headers=headers, media_type="text/plain", stat_result=stat)

    # ---- batches -----------------------------------------------------------------------------------------------------

    async def batches(self, request: HttpRequest) -> Response:
        store, owner = self._store, request.scope["owner"]
        if request.method == "POST":
            # The body is short enough to be parsed on the event loop.
            settings = replace(self._settings, max_body_bytes=min(self._settings.longest_body(False), _CREATE_BYTES))
            asked = await parsed_body(CreateBatchRequest, request, settings)
            record = await _on_disk(_created, store, asked, owner)
            self._batches.look_now()
            return json_response(record.object)
        query = read_query(BatchesQuery, request)
        return _page(*await _on_disk(_batches_page, store, owner, query))

    async def batch(self, request: HttpRequest) -> Response:
        batch_id, owner = request.path_params["batch_id"], request.scope["owner"]
        return json_response((await _on_disk(self._store.batch, batch_id, owner)).object)

    async def cancel(self, request: HttpRequest) -> Response:
        batch_id, owner = request.path_params["batch_id"], request.scope["owner"]
        return json_response((await _on_disk(self._store.cancel, batch_id, owner)).object)


def _created(store: BatchStore, asked: CreateBatchRequest, owner: str) -> Record:
    """Store a new batch."""
    if store.files.read(asked.input_file_id, owner).object["purpose"] != "batch":
        raise invalid("input_file_id", "is not the id of a file that was uploaded for a batch")
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = {
        "id": store.batches.new_id(),
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + _DAY_S,
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked.metadata,
    }
    record = Record(owner, batch, [store.files.new_id(), store.files.new_id()])
    store.add_batch(record)
    return record


def _batches_page(store: BatchStore, owner: str, query: BatchesQuery) -> tuple[list[Record], bool]:
    found, has_more = store.batches.page(owner, query.after, query.limit, False, lambda batch: True)
    return [store.seen(record) for record in found], has_more


async def _on_disk(work: Callable[..., _T], *args: Any) -> _T:
    """Return the result of `work`, which runs in a thread."""
    with _disk_errors():
        return await asyncio.to_thread(work, *args)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise the 503 for an error of the disk."""
    try:
        yield
    except OSError as e:
        logger.exception("the folder of files and batches failed")
        text = f"The server's disk refused this: {e.strerror or e}; try again later."
        raise ApiError(503, text, code="storage_unavailable", retry_after_s=_DISK_RETRY_S) from e


def _bounded(receive: Receive, most: int, timeout_s: float) -> Receive:
    """Return a `receive` for a body of up to `most` bytes. Each piece must arrive within `timeout_s`."""
    left, rest_of_piece, loop = most, _PIECE_BYTES, asyncio.get_running_loop()
    deadline = loop.time() + timeout_s

    async def bounded() -> Message:
        nonlocal left, rest_of_piece, deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            text = f"Less than {_PIECE_BYTES} bytes of the file came in {timeout_s:g} seconds (body_timeout_s)"
            raise ApiError(408, f"{text}; send it faster.", code="body_timeout") from None
        num_bytes = len(message.get("body", b""))
        left, rest_of_piece = left - num_bytes, rest_of_piece - num_bytes
        if left < 0:
            raise _too_long(most - _FORM_BYTES)
        if rest_of_piece <= 0:
            rest_of_piece, deadline = _PIECE_BYTES, loop.time() + timeout_s
        return message

    return bounded


def _too_long(most: int) -> ApiError:
    text = f"The file is over {most} bytes (batch_file_bytes); split it."
    return ApiError(413, text, code="file_too_large")


def _page(records: list[Record], has_more: bool) -> Response:
    ids = [record.object["id"] for record in records] or [""]
    data = [record.object for record in records]
    more = {"first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    return json_response({"object": "list", "data": data, **more})
