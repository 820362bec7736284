"""Batches on a full disk, at the limit of a key, or after a front that died while it created them."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve_app.apis.batches import routes as batch_routes
from serve_app.apis.batches import worker as batches_module
from serve_app.apis.batches.store import Record
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.serve.test_batches import short_waits
from tests.support.engine.links import eventually
from tests.support.http.batches import CountingEngine, Front, answered, created, ended, front, lines, results
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer

__all__ = ["short_waits"]  # a fixture of every test here
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
BEARER = {"authorization": "Bearer one"}


async def test_a_failed_save_does_not_end_the_watcher(tmp_path: Path, monkeypatch):
    async with front(tmp_path, CountingEngine(num_answers=8), batch_concurrency=2) as one:
        write, failed = one.batches.store.batches.write, []

        def fails_once(record: Record) -> None:
            if not failed and record.object["request_counts"]["completed"]:
                failed.append(record)
                raise NO_SPACE
            write(record)

        monkeypatch.setattr(one.batches.store.batches, "write", fails_once)
        batch = await created(one.client(), lines(50))
        await answered(one.client(), batch.id, 8)
        assert failed
        await one.client().batches.cancel(batch.id)
        batch = await ended(one.client(), batch.id)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 8)


async def test_a_full_disk_is_a_503(tmp_path: Path, monkeypatch):
    async with front(tmp_path) as one:
        file = await one.client().files.create(file=b"x", purpose="batch")

        def fails(*args: Any) -> None:
            raise NO_SPACE

        for name in ("upload", "delete_file", "add_batch", "content"):
            monkeypatch.setattr(one.batches.store, name, fails)
        monkeypatch.setattr(one.batches.store.files, "page", fails)
        asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        http, sent = one.client()._client, {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
        for response in (
            await http.post("/v1/files", headers=BEARER, **sent),
            await http.post("/v1/batches", headers=BEARER, json=asked),
            await http.delete(f"/v1/files/{file.id}", headers=BEARER),
            await http.get(f"/v1/files/{file.id}/content", headers=BEARER),
            await http.get("/v1/files", headers=BEARER),
        ):
            assert_error(response, 503, None, "No space left on device", "storage_unavailable")
            assert response.headers["retry-after"] == "30"


async def test_results_beyond_a_limit_end_their_batch(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(batches_module, "_CHARGE_BYTES", 1)
    async with front(tmp_path, CountingEngine(num_answers=5), batch_max_bytes_per_key=4000) as one:
        batch = await ended(one.client(), (await created(one.client(), lines(30))).id)
        assert batch.status == "failed"
        (fault,) = batch.errors.data
        assert fault.code == "storage_full"
        assert "batch_max_bytes_per_key" in fault.message
        assert len(await results(one.client(), batch.output_file_id)) == batch.request_counts.completed > 0
        with pytest.raises(openai.APIStatusError, match="batch_max_bytes_per_key") as error:
            await created(one.client(), lines(1))
        assert error.value.status_code == 413
        await one.client().files.delete(batch.output_file_id)
        await created(one.client(), lines(1))


async def test_a_batch_without_its_input_ends(tmp_path: Path):
    async with front(tmp_path, CountingEngine(num_answers=3)) as one:
        batch = await created(one.client(), lines(9))
        await answered(one.client(), batch.id, 3)
        one.batches.stop()
    (tmp_path / "batches" / f"{batch.id}.input").unlink()
    async with front(tmp_path) as after:
        batch = await ended(after.client(), batch.id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_lost")
        assert len(await results(after.client(), batch.output_file_id)) == 3
        await eventually(lambda: not after.batches.store.batches.with_suffix(".lock"))


async def test_a_batch_stopped_at_once_stays_for_others(tmp_path: Path):
    async with front(tmp_path) as one:

        class Stops(dict[str, asyncio.Task[None]]):
            def __setitem__(self, batch_id: str, task: "asyncio.Task[None]") -> None:
                super().__setitem__(batch_id, task)
                one.batches.stop()  # before the task begins

        one.batches._running = Stops()
        batch = await created(one.client(), lines(1))
        await eventually(lambda: one.batches._looking.done() and not one.batches._running)
    async with front(tmp_path) as after:
        assert (await ended(after.client(), batch.id)).status == "completed"


async def test_a_lock_without_a_record_is_removed(tmp_path: Path):
    async with front(tmp_path) as one:
        await ended(one.client(), (await created(one.client(), lines(1))).id)
        store = one.batches.store
        batch_id = store.batches.new_id()
        for suffix in (".input", ".lock"):
            store.batches.path(batch_id, suffix).touch()
        await eventually(lambda: not list(tmp_path.glob(f"batches/{batch_id}*")))


class SlowUpload:
    """A file of two pieces, with a pause between them."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        yield b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
        self.has_begun.set()
        await self.may_end.wait()
        yield b"def\r\n--x--\r\n"

    async def send(self, one: Front, key: str = "one") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=x"}
        return await one.client()._client.post("/v1/files", headers=headers, content=self.body())


async def started(upload: SlowUpload, one: Front, key: str = "one") -> "asyncio.Task[httpx.Response]":
    task = asyncio.create_task(upload.send(one, key))
    await upload.has_begun.wait()
    return task


async def test_uploads_under_way_are_limited(tmp_path: Path):
    async with front(tmp_path, batch_max_uploads_per_key=1) as one:
        first, second = SlowUpload(), SlowUpload()
        tasks = [await started(first, one)]
        assert_error(await SlowUpload().send(one), 429, None, "(batch_max_uploads_per_key)", "too_many_uploads")
        tasks.append(await started(second, one, "two"))
        first.may_end.set()
        second.may_end.set()
        assert [(await task).json()["bytes"] for task in tasks] == [6, 6]
        third = SlowUpload()
        third.may_end.set()
        assert (await third.send(one)).status_code == 200


async def test_a_request_for_a_batch_is_short(tmp_path: Path):
    async with front(tmp_path) as one:
        body = {"input_file_id": "x" * 70_000}
        response = await one.client()._client.post("/v1/batches", headers=BEARER, json=body)
        assert_error(response, 413, None, "over 65536 bytes", "body_too_large")


async def test_uploads_of_all_keys_are_limited(tmp_path: Path):
    async with front(tmp_path, batch_max_uploads=1) as one:
        first = SlowUpload()
        task = await started(first, one)
        assert_error(await SlowUpload().send(one, "two"), 429, None, "(batch_max_uploads)", "too_many_uploads")
        first.may_end.set()
        assert (await task).status_code == 200


@pytest.mark.parametrize("charset", ["punycode", '"undefined"', "UTF-8"])
async def test_a_form_is_in_utf_8(tmp_path: Path, charset: str):
    """Punycode of a megabyte takes minutes to decode, and the codec "undefined" was a 500."""
    async with front(tmp_path) as one:
        form = '--x\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
        content = form.format("purpose", "", "batch") + form.format("file", '; filename="a"', "é") + "--x--\r\n"
        headers = BEARER | {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
        response = await one.client()._client.post("/v1/files", headers=headers, content=content.encode())
        if charset == "UTF-8":
            assert response.json()["bytes"] == 2
        else:
            assert_error(response, 415, None, "leave charset out", "unsupported_media_type")


async def test_the_fields_of_a_form_are_short(tmp_path: Path):
    async with front(tmp_path) as one:
        sent = {"files": {"file": b"x"}, "data": {"purpose": "b" * 20_000}}
        response = await one.client()._client.post("/v1/files", headers=BEARER, **sent)
        assert response.status_code == 400
        assert "16KB" in response.json()["error"]["message"]


async def test_each_piece_of_an_upload_has_a_deadline(monkeypatch):
    monkeypatch.setattr(batch_routes, "_PIECE_BYTES", 10)
    clock, deadlines = [0.0], []
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock[0])
    monkeypatch.setattr(asyncio, "timeout_at", lambda deadline: deadlines.append(deadline) or nullcontext())

    async def receive() -> dict[str, Any]:
        clock[0] += 1
        return {"type": "http.request", "body": b"12345", "more_body": True}

    bounded = batch_routes._bounded(receive, 100, 60)
    for _ in range(5):
        await bounded()
    assert deadlines == [60, 60, 62, 62, 64], "of a whole piece, not of each message"


@pytest.mark.parametrize("keys", ["one\n", None])
async def test_keys_are_not_read_after_the_start(tmp_path: Path, keys: str | None):
    path = tmp_path / "keys"
    if keys is not None:
        path.write_text(keys)
    settings = HttpSettings(batch_folder=str(tmp_path / "b"), api_key_file=str(path) if keys else None)
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), settings)
    path.unlink(missing_ok=True)
    headers = {"origin": "https://a.example"} | (BEARER if keys else {})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        sent = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
        expected = 200 if keys else 403
        assert (await client.post("/v1/files", headers=headers, **sent)).status_code == expected
        assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == expected
        assert (await client.get("/openapi.json", headers=headers)).status_code == 200
        if keys:
            assert (await client.get("/v1/models")).status_code == 401
