"""A client cannot affect others' requests, except by requests of its own that are served first."""

import asyncio

import httpx
import openai
import pytest

from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import eventually, link_to
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer, client_of, post
from tests.support.http.serving import body, live, serving


async def test_an_abort_ends_only_requests_of_the_same_key():
    settings = HttpSettings(api_key=("one", "two"))
    async with serving(settings, delay_s=0.01) as (engine, url):
        one, two = (openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))

        def begin(client: openai.AsyncOpenAI) -> asyncio.Task:
            fields = body(max_tokens=400)
            extra = {"ignore_eos": fields.pop("ignore_eos"), "request_id": "mine"}
            return asyncio.create_task(client.completions.create(model=MODEL, **fields, extra_body=extra))

        first, second = begin(one), begin(two)
        await eventually(lambda: live(engine) == 2)
        for name in ("mine", "cmpl-mine", "cmpl-mine-0"):
            await two.post("/abort", body={"request_id": name}, cast_to=object)
            await eventually(lambda: live(engine) == 1)
            assert (await second).choices[0].finish_reason == "abort"
            assert not first.done()
            second = begin(two)
            await eventually(lambda: live(engine) == 2)
        owner = next(s.request_id for c in engine.loop._connections for s in c.streams.values()).partition("/")[0]
        for name in (f"{owner}/mine", "one/mine", "/mine", "*"):
            await two.post("/abort", body={"request_id": name}, cast_to=object)
        operator = link_to(engine)
        await operator.start()
        operator.abort("mine")  # without an owner: all of that name
        await eventually(lambda: live(engine) == 0)
        for task in (first, second):
            assert (await task).choices[0].finish_reason == "abort"
        operator.close()


async def test_without_keys_any_client_may_abort():
    engine = FakeEngine()
    assert (await post(engine, {"request_id": "x"}, "/v1/abort")).json()["request_id"] == "x"
    assert engine.aborts == ["x"]
    async with client_of(engine) as client:
        headers = {"content-type": "application/json"}
        assert_error(await client.post("/v1/abort", content=b"", headers=headers), 400, None, "JSON", "invalid_json")


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_higher_priority_needs_the_operators_permission(allowed: bool):
    engine = FakeEngine()
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), HttpSettings(client_priority=allowed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for priority in (0, 3):
            assert (await client.post("/v1/completions", json={"prompt": "a", "priority": priority})).status_code == 200
        before = await client.post("/v1/completions", json={"prompt": "a", "priority": -1})
    if allowed:
        assert [request.priority for request in engine.requests] == [0, 3, -1]
    else:
        assert_error(before, 400, "priority", "client_priority")


async def test_file_of_keys_is_read_at_the_start_alone(tmp_path):
    path = tmp_path / "keys"
    path.write_text("key\n")
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL), HttpSettings(api_key_file=str(path)))
    headers = {"Authorization": "Bearer key", "Origin": "https://a.example"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        assert (await client.get("/version")).status_code == 200
        path.unlink()
        assert (await client.post("/sleep")).status_code == 200
        assert "security" in (await client.get("/openapi.json")).text
