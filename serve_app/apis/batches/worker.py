"""The execution of batches, after all other requests.

Each request in a batch goes through this process's routes with the lowest priority. The results files record
the answered requests: a front that resumes a batch sends the requests without a result. A front's memory for a batch
is constant, except for a byte for each request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Message

from runtime.background import in_background
from serve_app.apis.batches.lines import Position, Requests, append, check, fault, finished, read_line
from serve_app.apis.batches.places import Places
from serve_app.apis.batches.store import ENDED, BatchStore, Record
from serve_app.http import in_process
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import INTERNAL_ERROR, ApiError
from serve_app.settings import HttpSettings

logger = logging.getLogger(__name__)

_LOOK_S = 2.0  # seconds between two searches for batches without a front
_SAVE_S = 0.5  # seconds between two checks for cancellation, which also save the counts
_AGAIN_S = 60.0  # time until a batch is resumed after an error, such as a full disk
_CHARGE_BYTES = 1 << 20  # growth of a batch's results between two limit checks
_PRIORITY = 1 << 20  # the requests' priority; higher values are served later
_LATER = (429, 499, 503)  # the server is busy, has aborted the request or restarts, so the request is asked again
_OWN_BYTES = 4 << 10  # a line's bytes besides its body
_T = TypeVar("_T")
_OnDisk = Callable[..., Awaitable[Any]]


class Batches:
    """The batches that this front runs. One event loop calls its methods."""

    def __init__(self, settings: HttpSettings) -> None:
        """Raises CallboardError if the folder cannot be made."""
        self.store = None if settings.batch_folder is None else BatchStore(settings.batch_folder, settings)
        self.routes: ASGIApp | None = None  # this application's routes, which build_http_app sets
        self._settings = settings
        self._places = Places(settings.batch_concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._disk = ThreadPoolExecutor(1, "batches")  # one thread, so reads see all earlier writes
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def start(self) -> None:
        """Run the batches that other fronts do not run, from now on."""
        if self.store is not None:
            self._looking = in_background(asyncio.create_task(self._look(self.store)), "looking for batches")

    def stop(self) -> None:
        """Leave all batches to other fronts, or to the next start."""
        for task in (self._looking, *self._running.values()):
            if task is not None:
                task.cancel()

    def look_now(self) -> None:
        """Look for a new batch at once."""
        self._news.set()

    async def _look(self, store: BatchStore) -> None:
        await self._sweep(store)
        while True:
            self._news.clear()
            try:
                for batch_id in await self._on_disk(store.batches.with_suffix, ".lock"):
                    if batch_id not in self._running and (lock := await self._on_disk(store.take, batch_id)):
                        task = self._running[batch_id] = asyncio.create_task(self._run(store, batch_id, lock))
                        in_background(task, f"batch {batch_id}").add_done_callback(
                            partial(self._release, batch_id, lock)
                        )
            except OSError:
                logger.exception("the folder of batches cannot be read")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):  # Python 3.11's wait_for may swallow a cancellation
                    await self._news.wait()

    async def _sweep(self, store: BatchStore) -> None:
        try:
            await self._on_disk(store.sweep)
        except OSError:
            logger.exception("the folder of batches cannot be swept")

    async def _run(self, store: BatchStore, batch_id: str, lock: IO[bytes]) -> None:
        assert self.routes is not None, "build_http_app sets them"
        try:
            try:
                if not await self._on_disk(store.batches.exists, batch_id):
                    await self._sweep(store)  # the front that created it died, or still creates it
                    return
                record = await self._on_disk(store.batches.read, batch_id)
                if record.object["status"] not in ENDED:
                    await _Run(store, record, self.routes, self._settings, self._places, self._on_disk).run()
                await self._on_disk(store.forget, record)
            finally:
                await self._on_disk(lock.close)  # after all writes
        except Exception:
            logger.exception("batch %s stopped; it goes on in %d s", batch_id, _AGAIN_S)
            await asyncio.sleep(_AGAIN_S)

    def _release(self, batch_id: str, lock: IO[bytes], _: asyncio.Task[None]) -> None:
        """Release the batch to other fronts. A task that was cancelled before its start has not closed the lock."""
        del self._running[batch_id]
        in_background(self._disk.submit(lock.close), "releasing a batch")

    async def _on_disk(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)


class _Run:
    """A batch while this front holds its lock."""

    def __init__(
        self,
        store: BatchStore,
        record: Record,
        routes: ASGIApp,
        settings: HttpSettings,
        places: Places,
        on_disk: _OnDisk,
    ) -> None:
        self._store, self._record, self._batch = store, record, record.object
        self._routes, self._settings, self._places, self._on_disk = routes, settings, places, on_disk
        self._room = asyncio.Semaphore(settings.batch_concurrency)  # room for requests that run, or wait to run
        longest = settings.longest_body(takes_images=True) + _OWN_BYTES
        self._requests = Requests(store.batches.path(self._batch["id"], ".input"), longest)
        self._results = [store.files.path(file_id) for file_id in record.results]  # answers, errors
        self._num_charged = 0  # counted result bytes
        self._excess: ApiError | None = None  # the limit that the results exceed

    async def run(self) -> None:
        """Run the batch to its end, and store its final record."""
        if faults := await self._on_disk(self._check):
            self._batch["errors"] = _list(faults)
            await self._on_disk(self._publish, "failed")
            return
        if self._batch["status"] == "validating":
            self._batch |= {"status": "in_progress", "in_progress_at": _now()}
        await self._on_disk(self._recount)
        await self._save()
        end = await self._answer_all()
        if (cancelling_at := await self._on_disk(self._store.cancelling_at, self._batch["id"])) is not None:
            self._batch["cancelling_at"] = cancelling_at
            end = "cancelled"
        elif self._excess is not None:
            self._batch["errors"] = _list([fault(self._excess.code or "", str(self._excess))])
            end = "failed"
        self._batch |= {"status": "finalizing", "finalizing_at": _now()}
        await self._save()
        await self._on_disk(self._finalize, end)

    async def _answer_all(self) -> str:
        """Send all requests without a result; return "completed", or "expired" if the time or `_watch` ended it."""
        index = start = 0
        try:
            async with asyncio.timeout(self._batch["expires_at"] - time.time()) as limit:
                watching = in_background(asyncio.create_task(self._watch(limit)), "watching a batch")
                try:
                    async with asyncio.TaskGroup() as group:
                        while True:
                            window, index, start = await self._on_disk(self._requests.window, index, start)
                            if not window:
                                break
                            for position in window:
                                await self._room.acquire()
                                task = group.create_task(self._answer(position))
                                task.add_done_callback(lambda _: self._room.release())
                finally:
                    watching.cancel()
        except TimeoutError:
            return "expired"
        return "completed"

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Save the counts regularly; end the batch if it is cancelled or its results exceed a limit.

        After an error of the disk it tries again, since the requests go on."""
        counts: dict[str, int] = dict(self._batch["request_counts"])
        while not limit.expired():
            try:
                is_cancelled = await self._on_disk(self._store.cancelling_at, self._batch["id"]) is not None
                if is_cancelled or await self._on_disk(self._passes_a_limit):
                    if not limit.expired():
                        limit.reschedule(asyncio.get_running_loop().time())
                    return
                if counts != self._batch["request_counts"]:
                    new = dict(self._batch["request_counts"])
                    await self._save()
                    counts = new
            except Exception as e:
                logger.warning("the counts of batch %s cannot be saved: %s", self._batch["id"], e)
            await asyncio.sleep(_SAVE_S)

    async def _save(self) -> None:
        await self._on_disk(self._store.batches.write, self._record)

    # ---- one request -------------------------------------------------------------------------------------------------

    async def _answer(self, position: Position) -> None:
        line = await self._on_disk(read_line, self._requests.path, position)
        request_id = secrets.token_hex(12)
        try:
            status, body = await self._asked(_with_priority(line.body), request_id)
        except ApiError as e:
            status, body = e.status, encode_json(e.body())
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        is_error = status != 200
        await self._on_disk(append, self._results[is_error], [_result(line.custom_id, response, None)])
        self._batch["request_counts"]["failed" if is_error else "completed"] += 1

    async def _asked(self, body: bytes, request_id: str) -> tuple[int, bytes]:
        """Return the status and body of a whole answer; wait while the server is busy or restarting."""
        while True:
            async with self._places.of(self._record.owner):
                status, headers, answer = await self._posted(body, request_id)
            if status not in _LATER and not _is_aborted(answer):
                return status, answer
            await asyncio.sleep(float(headers.get(b"retry-after", b"1")))

    async def _posted(self, body: bytes, request_id: str) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return the answer of this server's own route: status, headers and body."""
        status, headers, answer = 500, dict[bytes, bytes](), bytearray()

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], dict(message["headers"])
            answer.extend(message.get("body", b""))

        try:
            path, owner = self._batch["endpoint"], self._record.owner
            await in_process.post(self._routes, path, body, send, owner=owner, request_id=request_id)
        except Exception:
            logger.exception("request %s of batch %s failed", request_id, self._batch["id"])
        return status, headers, bytes(answer) or encode_json(INTERNAL_ERROR.body())

    # ---- on the thread of the disk -----------------------------------------------------------------------------------

    def _check(self) -> list[dict[str, Any]]:
        """Return the faults of the requests. A lost file is a fault, too; otherwise the batch would restart forever."""
        path, longest = self._requests.path, self._requests.longest
        if not path.exists():
            return [fault("input_lost", "The server has lost the file of requests; send the batch again.")]
        if self._batch["status"] != "validating":
            return []
        return check(path, self._batch["endpoint"], self._settings.batch_max_requests, longest)

    def _recount(self) -> None:
        """Count the results, and mark their requests."""
        answers, errors = map(finished, self._results)
        self._requests.mark(answers | errors)
        total = len(self._requests.is_done)
        self._batch["request_counts"] = {"total": total, "completed": len(answers), "failed": len(errors)}

    def _passes_a_limit(self) -> bool:
        """Count the results again if they have grown enough."""
        num_bytes = sum(map(self._store.num_bytes, self._record.results))
        if num_bytes - self._num_charged < _CHARGE_BYTES:
            return False
        self._excess, self._num_charged = self._store.charge(self._record), num_bytes
        return self._excess is not None

    def _finalize(self, end: str) -> None:
        self._recount()
        if end == "expired":
            append(self._results[1], map(_expired, self._requests.without_result()))
            self._recount()
        self._publish(end)

    def _publish(self, end: str) -> None:
        """Store the final record of the batch, and make its results visible."""
        for kind, file_id in zip(("output", "error"), self._record.results, strict=True):
            if self._store.num_bytes(file_id):
                name = f"{self._batch['id']}_{kind}.jsonl"
                self._store.add_result(file_id, self._record.owner, name)
                self._batch[f"{kind}_file_id"] = file_id
        self._batch |= {"status": end, f"{end}_at": _now()}
        self._store.batches.write(self._record)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    status: str = ""  # a response's status


def _is_aborted(answer: bytes) -> bool:
    """Return whether a pause or an abort has cut an answer."""
    if b'"abort"' not in answer and b'"cancelled"' not in answer:
        return False
    found = msgspec.json.decode(answer, type=_Answer)
    return found.status == "cancelled" or any(choice.finish_reason == "abort" for choice in found.choices)


def _now() -> int:
    return int(time.time())


def _list(faults: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": faults}


def _with_priority(body: msgspec.Raw) -> bytes:
    """Return the body with a low priority; raises the 400 if its answer would be a stream or a background response."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in ("stream", "background"):
        if bytes(fields.get(name, b"")).strip() == b"true":
            raise ApiError(400, f"{name} is true; a request of a batch must leave it out.", param=name)
    given = bytes(fields.get("priority", b"0")).strip()
    # any other value is left to the route's checks
    if given.removeprefix(b"-").isdigit() and int(given[:20]) < _PRIORITY:
        fields["priority"] = msgspec.Raw(b"%d" % _PRIORITY)
    return encode_json(fields)


def _result(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}


def _expired(custom_id: str) -> dict[str, Any]:
    text = "This request could not be executed before the completion window expired."
    return _result(custom_id, None, {"code": "batch_expired", "message": text})
