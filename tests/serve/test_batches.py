"""/v1/files and /v1/batches through OpenAI's client, with fronts that share a folder, stop and go on."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.base.model.pooling import Pooling
from serve_app.apis.batches import worker as batches_module
from serve_app.apis.batches.lines import append, finished
from serve_app.apis.batches.store import BatchStore
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import eventually
from tests.support.http.batches import (
    COMPLETIONS,
    CountingEngine,
    answered,
    created,
    ended,
    front,
    line,
    lines,
    results,
)
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer, client_of
from tests.support.http.fake_images import URL, engine_with_images, service_with_images


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(batches_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(batches_module, "_SAVE_S", 0.01)


# ---- files -----------------------------------------------------------------------------------------------------------


async def test_files(tmp_path: Path):
    async with front(tmp_path, batch_file_bytes=1000) as one:
        client, other = one.client(), one.client("two")
        made = [await client.files.create(file=(f"{i}.jsonl", b"x" * i), purpose="batch") for i in (1, 2, 3)]
        assert [(f.filename, f.bytes, f.purpose) for f in made] == [(f"{i}.jsonl", i, "batch") for i in (1, 2, 3)]
        assert (await client.files.retrieve(made[1].id)) == made[1]
        assert (await client.files.content(made[1].id)).content == b"xx"
        assert [f.id async for f in client.files.list(limit=2)] == [f.id for f in reversed(made)], "in two pages"
        assert (await client.files.list(order="asc", after=made[0].id, purpose="batch")).data == made[1:]
        assert (await client.files.list(purpose="batch_output")).data == (await other.files.list()).data == []
        for wrong in (made[0].id, "file-" + "0" * 32):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await other.files.retrieve(wrong)
        assert (await client.files.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made[0].id)
        assert not list(tmp_path.glob(f"files/{made[0].id}*"))
        with pytest.raises(openai.APIStatusError, match="over 1000 bytes") as error:
            await client.files.create(file=b"x" * 1001, purpose="batch")
        assert error.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="must be batch"):
            await client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(
                file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
            )


async def test_routes_without_a_folder_explain_the_setting():
    async with client_of(FakeEngine()) as client:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/x/content"), ("POST", "/v1/batches")):
            response = await client.request(method, path, json={})
            assert_error(response, 404, None, "--batch-folder DIR", "batches_off")


async def test_pages_of_other_sites_upload_nothing(tmp_path: Path):
    settings = HttpSettings(batch_folder=str(tmp_path), cors_origin=("https://a.example",))
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for origin, status in ((None, 200), ("https://a.example", 200), ("https://b.example", 403)):
            headers = {} if origin is None else {"origin": origin}
            sent = {"files": {"file": b"x"}, "data": {"purpose": "batch"}, "headers": headers}
            assert (await client.post("/v1/files", **sent)).status_code == status


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_line_of_a_batch_has_a_picture(tmp_path: Path, path: str):
    engine = engine_with_images()
    engine.info = replace(engine.info, pooling=Pooling("last"))
    picture = {"type": "image_url", "image_url": {"url": URL}}
    body = {"messages": [{"role": "user", "content": [picture]}]}
    async with front(tmp_path, engine, service_with_images(engine)) as one:
        client = one.client()
        batch = await ended(client, (await created(client, [line("a", path, **body)], path)).id)
        (result,) = (await results(client, batch.output_file_id)).values()
    assert result["response"]["status_code"] == 200
    assert len(engine.requests[-1].images) == 1


async def test_a_batch_gives_the_same_answers_as_its_route(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
    async with front(tmp_path) as one:
        client = one.client()
        for path, body in (
            (COMPLETIONS, {"prompt": "hi", "seed": 1}),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": "hi", "seed": 1}),
            ("/v1/embeddings", {"input": "aab"}),
        ):
            direct = (await client._client.post(path, json=body, headers={"authorization": "Bearer one"})).json()
            one.engine.requests.clear()
            batch = await ended(client, (await created(client, [line("a", path, **body)], path)).id)
            assert batch.status == "completed"
            assert batch.error_file_id is None
            assert one.engine.requests[0].priority > 1000, "after those of people who wait"
            (result,) = (await results(client, batch.output_file_id)).values()
            assert result["response"]["status_code"] == 200
            assert result["error"] is None
            answer = result["response"]["body"]
            assert result["response"]["request_id"] in answer["id"]
            content = {"choices", "data", "seed", "usage", "object"} & set(direct)
            assert {k: answer[k] for k in content} == {k: direct[k] for k in content}
            assert content


async def test_answers_and_errors_have_separate_files(tmp_path: Path):
    requests = [
        *lines(3),
        line("stream", prompt="a", stream=True),
        line("wrong", prompt="a", temperature=-1),
        line("model", prompt="a") | {"body": {"model": "x", "prompt": "a"}},
        line("mine", prompt="later", priority=(1 << 20) + 5),
    ]
    async with front(tmp_path) as one:
        client = one.client()
        batch = await created(client, requests, metadata={"for": "me"})
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"for": "me"}, COMPLETIONS)
        await client.files.delete(batch.input_file_id)  # the batch has its own copy
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.completed_at >= batch.finalizing_at >= batch.in_progress_at
        assert batch.request_counts.to_dict() == {"total": 7, "completed": 4, "failed": 3}
        answers, errors = [await results(client, i) for i in (batch.output_file_id, batch.error_file_id)]
        assert set(answers) == {"r0", "r1", "r2", "mine"}
        statuses = {
            n: (e["response"]["status_code"], e["response"]["body"]["error"]["param"]) for n, e in errors.items()
        }
        assert statuses == {"stream": (400, "stream"), "wrong": (400, "temperature"), "model": (404, "model")}
        assert next(r for r in one.engine.requests if bytes(r.token_ids) == b"later").priority == (1 << 20) + 5
        assert (await client.files.retrieve(batch.output_file_id)).purpose == "batch_output"
        assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]
        assert not (await one.client("two").batches.list()).data
        for call in (one.client("two").batches.retrieve, one.client("two").batches.cancel):
            with pytest.raises(openai.NotFoundError, match="There is no batch"):
                await call(batch.id)
        with pytest.raises(openai.BadRequestError, match="it is completed"):
            await client.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="uploaded for a batch"):
            await client.batches.create(
                input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert sorted(p.name for p in (tmp_path / "batches").iterdir()) == [f"{batch.id}.json"]


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "no requests"),
        ([*lines(1), *lines(1)], "'r0' is another line's too"),
        ([line("a", "/v1/embeddings", input="a")], "for POST /v1/completions"),
        ([*lines(1), {"custom_id": 1}], "Expected `str`"),
        (lines(4), "allows 3 requests"),
        ([line("a", prompt="x" * 6000)], "over 5096 bytes"),
    ],
)
async def test_a_file_at_fault_fails_its_batch(tmp_path: Path, requests: list[Any], says: str):
    async with front(tmp_path, batch_max_requests=3, max_body_bytes=1000) as one:
        batch = await ended(one.client(), (await created(one.client(), requests)).id)
        assert batch.status == "failed"
        assert batch.failed_at is not None
        (fault,) = batch.errors.data
        assert says in fault.message
        assert fault.line == (len(requests) or None)
        assert one.engine.requests == []


async def test_a_batch_limits_requests_and_waits_for_busy_engines(tmp_path: Path, monkeypatch):
    engine, slept = CountingEngine(busy=True), asyncio.sleep
    async with front(tmp_path, engine, batch_concurrency=2) as one:
        monkeypatch.setattr(batches_module.asyncio, "sleep", lambda seconds: slept(min(seconds, 0.01)))
        made = [await created(one.client(), lines(5)) for _ in range(2)]
        await eventually(lambda: len(engine.requests) > 6)
        engine.busy = False
        for batch in [await ended(one.client(), batch.id) for batch in made]:
            assert set(await results(one.client(), batch.output_file_id)) == {f"r{i}" for i in range(5)}
        assert engine.most_open == 2


async def test_the_next_front_continues_a_batch(tmp_path: Path):
    async with front(tmp_path, CountingEngine(num_answers=6), batch_concurrency=2) as one:
        batch = await created(one.client(), lines(12))
        await answered(one.client(), batch.id, 6)
        async with front(tmp_path) as beside:  # an idle front that shows the progress of the first
            seen = await answered(beside.client(), batch.id, 6)
            assert (seen.status, seen.request_counts.total, seen.output_file_id) == ("in_progress", 12, None)
            assert beside.engine.requests == []
            beside.batches.stop()
        one.batches.stop()
        await eventually(lambda: not one.batches._running, 30)
        assert one.engine.num_open == 0
        assert (await one.client().batches.retrieve(batch.id)).status == "in_progress"
    store = BatchStore(str(tmp_path), HttpSettings())
    output = store.files.path(store.batches.read(batch.id).results[0])
    assert len(finished(output)) == 6
    with open(output, "ab") as file:
        file.write(b'{"custom_id": "r11", "resp')  # where a front has died
    async with front(tmp_path) as after:
        batch = await ended(after.client(), batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 12)
        assert set(await results(after.client(), batch.output_file_id)) == {f"r{i}" for i in range(12)}
        assert len(after.engine.requests) == 6, "no answer is made twice"


async def test_cancelled_by_another_front(tmp_path: Path):
    async with front(tmp_path, CountingEngine(num_answers=4)) as one, front(tmp_path) as other:
        other.batches.stop()
        batch = await created(one.client(), lines(50))
        await answered(other.client(), batch.id, 4)
        cancelled = await other.client().batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        batch = await ended(other.client(), batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at >= batch.cancelling_at == cancelled.cancelling_at
        assert one.engine.num_open == 0
        assert len(await results(other.client(), batch.output_file_id)) == batch.request_counts.completed == 4


async def test_requests_past_the_deadline_are_errors(tmp_path: Path):
    async with front(tmp_path, FakeEngine(delay_s=0.002), batch_concurrency=2) as one:
        one.batches.stop()
        batch = await created(one.client(), lines(6))
    store = BatchStore(str(tmp_path), HttpSettings())
    record = store.batches.read(batch.id)
    record.object["expires_at"] = int(time.time()) - 1
    store.batches.write(record)
    append(store.files.path(record.results[0]), [{"custom_id": "r0", "id": "batch_req_x"}])
    async with front(tmp_path) as after:
        batch = await ended(after.client(), batch.id)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert batch.request_counts.to_dict() == {"total": 6, "completed": 1, "failed": 5}
        errors = await results(after.client(), batch.error_file_id)
        assert {(e["error"]["code"], e["response"]) for e in errors.values()} == {("batch_expired", None)}
        assert set(errors) == {f"r{i}" for i in range(1, 6)}
