"""Stored responses: conversations that go on, life and limits of the store, those made in the background, owners, and
several fronts."""

import asyncio
import gc
import json
import time
import tracemalloc
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from runtime.output.processor import Delta
from serve_app.apis.responses.endpoint import ResponsesEndpoint
from serve_app.apis.responses.store import OneFront, ResponseStore, StoredResponses
from serve_app.application import build_http_app
from serve_app.protocol.errors import ApiError
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import eventually
from tests.support.http.chats import CALL, QWEN
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer
from tests.support.http.responses import TOOLS, data_of, engine_of, openai_client, said


class Front:
    """One of several fronts over an engine; they find each other in a dictionary."""

    def __init__(self, engine: FakeEngine, settings: HttpSettings, own: str, fronts: "dict[str, Front]") -> None:
        self.own, self._fronts = own, fronts
        self.store = ResponseStore(settings, own)
        service = Service(engine, byte_tokenizer(QWEN), MODEL)
        app = build_http_app(service, settings, stored=StoredResponses(self.store, self))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")
        fronts[own] = self

    async def call(self, front: str, method: str, *args: Any) -> Any:
        if front not in self._fronts:
            return await OneFront().call(front, method, *args)
        return getattr(self._fronts[front].store, method)(*args)

    async def create(self, key: str = "", **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/responses", json={"input": "hi", **fields}, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        return answer.json()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@asynccontextmanager
async def fronts_of(engine: FakeEngine, num: int = 2, **settings: Any):
    fronts: dict[str, Front] = {}
    made = [Front(engine, HttpSettings(**settings), f"f{i}", fronts) for i in range(num)]
    yield made
    for front in made:
        await front.http.aclose()


def prompts_of(engine: FakeEngine) -> list[str]:
    return [bytes(request.token_ids).decode() for request in engine.requests]


# ---- conversations ---------------------------------------------------------------------------------------------------


async def test_a_conversation_continues_from_a_response():
    engine = engine_of(CALL)
    async with openai_client(engine, QWEN) as client:
        first = await client.responses.create(model=MODEL, input="hi", tools=TOOLS, instructions="Be.")
        outputs = [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": "21"}]
        engine.script = engine_of("It is warm.").script
        second = await client.responses.create(model=MODEL, input=outputs, previous_response_id=first.id)
        third = await client.responses.create(model=MODEL, input="so?", previous_response_id=second.id)
        call_id = first.output[0].call_id
        assert prompts_of(engine)[1:] == [
            f"<|user|>hi<|assistant|>{CALL}<|tool get_weather|>21[{call_id}]<|assistant|>",
            f"<|user|>hi<|assistant|>{CALL}<|tool get_weather|>21[{call_id}]"
            "<|assistant|>It is warm.<|user|>so?<|assistant|>",
        ]
        assert await client.responses.retrieve(third.id) == third
        assert third.previous_response_id == second.id
        items = [item async for item in client.responses.input_items.list(third.id, limit=2, order="asc")]
        kinds = ["message", "function_call", "function_call_output", "message", "message"]
        assert [item.type for item in items] == kinds
        assert (items[1].id, items[3].id) == (first.output[0].id, second.output[0].id)
        newest = await client.responses.input_items.list(third.id, limit=1)
        assert (newest.data[0].content[0].text, newest.has_more) == ("so?", True)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.retrieve(first.id)
        await client.responses.create(model=MODEL, input="on", previous_response_id=third.id)  # it has all of it


async def test_responses_that_are_not_stored():
    async with fronts_of(engine_of("ok")) as (front, _):
        for fields in ({"store": False}, {"store": False, "stream": True}):
            answer = await front.http.post("/responses", json={"input": "hi", **fields})
            made = data_of(answer)[0]["response"] if "stream" in fields else answer.json()
            assert made["store"] is False
            missing = await front.http.get(f"/responses/{made['id']}")
            assert_error(missing, 404, None, "never stored", "response_not_found")
        streamed = data_of(await front.http.post("/responses", json={"input": "hi", "stream": True}))
        found = (await front.http.get(f"/responses/{streamed[0]['response']['id']}")).json()
        assert found == streamed[-1]["response"]
    async with fronts_of(engine_of("ok"), response_store_bytes=0) as (front, _):
        assert (await front.create())["store"] is False
        for name, value in (("store", True), ("background", True), ("previous_response_id", "resp_f0_1")):
            answer = await front.http.post("/responses", json={"input": "hi", name: value})
            assert_error(answer, 400, name, "response_store_bytes is 0")


async def test_the_store_has_a_size_limit():
    engine = engine_of("ok")
    async with fronts_of(engine, response_store_bytes=30_000) as (front, _):
        ids = [(await front.create(input=f"{i} " + "x" * 500))["id"] for i in range(20)]
        found = [(await front.http.get(f"/responses/{name}")).status_code for name in ids]
        assert found == sorted(found, reverse=True), "the oldest go first"
        assert 2 < found.count(200) < 15
        await front.create(input="z" * 1000, max_output_tokens=1)
        before = front.store._num_bytes
        last = (await front.create(input="y" * 1000, store=True))["id"]
        for _ in range(3):  # a conversation is stored once, however long it is
            last = (await front.create(input="so?", previous_response_id=last))["id"]
        assert front.store._num_bytes < before + 1000 + 4 * 2500
        for name in list(front.store._ended):
            front.store.delete(name, "")
        assert front.store._num_bytes == len(front.store._shelves) == 0
    async with fronts_of(engine, response_life_s=0.05) as (front, _):
        name = (await front.create())["id"]
        time.sleep(0.06)
        assert (await front.http.get(f"/responses/{name}")).status_code == 404


async def test_running_response_too_large_is_deleted():
    engine = engine_of("Hello " * 500, delay_s=0.01)
    async with fronts_of(engine, response_store_bytes=1500) as (front, _):
        for end in ("delete", "cancel"):
            name = (await front.create(background=True))["id"]
            await eventually(lambda name=name: b"Hello" in front.store.body(name, ""))
            method, path = ("DELETE", "") if end == "delete" else ("POST", "/cancel")
            assert (await front.http.request(method, f"/responses/{name}{path}")).status_code == 200
            assert (await front.http.get(f"/responses/{name}")).status_code == 404
        assert front.store._num_bytes == len(front.store._shelves) == 0


def kept_response(store: ResponseStore, items: list[dict], owner: str = "") -> str:
    """Keeps the response to these items; its id."""
    endpoint, service = ResponsesEndpoint(store), Service(FakeEngine(max_model_len=10**7), byte_tokenizer(QWEN), MODEL)
    request = endpoint.read(json.dumps({"input": items}).encode())
    prepared = service.prepare(endpoint, request, owner=owner)
    (choice,) = endpoint.choices(prepared)
    choice.add(Delta(0, "ok", [111, 107], finish_reason="stop"))
    endpoint.answer(prepared, [choice])
    return prepared.id


def test_items_count_with_the_bytes_they_take():
    store = ResponseStore(HttpSettings())
    gc.collect()
    tracemalloc.start()
    kept_response(store, [said("user", f"{i}") for i in range(1500)])
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1.1 * store._num_bytes + 50_000


def test_an_owner_evicts_only_its_own_responses():
    store = ResponseStore(HttpSettings(response_store_bytes=20_000))
    small = kept_response(store, [said("user", "mine")], "one")
    large = [kept_response(store, [said("user", f"{i}" * 3000)], "two") for i in range(9)]
    assert store.conversation(small, "one")
    assert store.conversation(large[-1], "two")
    with pytest.raises(ApiError, match="no response"):
        store.conversation(large[0], "two")


async def test_running_responses_have_a_limit():
    engine = engine_of("Hello " * 500, delay_s=0.01)
    async with fronts_of(engine, response_store_bytes=10_000) as (front, _):
        made = [await front.create(background=True, input=name * 3000) for name in "ab"]
        body = {"input": "x" * 3000, "background": True}
        refused = await front.http.post("/responses", json=body)
        assert_error(refused, 429, None, "fill the store", "response_store_full")
        for each in made:
            await front.http.post(f"/responses/{each['id']}/cancel")
        assert (await front.http.post("/responses", json=body)).status_code == 200


async def test_conversation_of_too_many_items_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve_app.apis.responses.routes.MAX_ITEMS", 4)
    async with fronts_of(engine_of("ok")) as (front, _):
        first = await front.create(input=[said("user", f"{i}") for i in range(3)])
        second = await front.create(previous_response_id=first["id"])
        refused = await front.http.post("/responses", json={"input": "x", "previous_response_id": second["id"]})
        assert_error(refused, 400, "previous_response_id", "has 6 items; at most 4", "conversation_too_long")


async def test_only_its_owner_finds_a_response():
    async with fronts_of(engine_of("ok"), api_key=("one", "two")) as (front, other):
        name = (await front.create("one"))["id"]
        for at in (front, other):
            assert (await at.http.get(f"/responses/{name}", headers=bearer("one"))).status_code == 200
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                asked = await at.http.request(method, f"/responses/{name}{path}", headers=bearer("two"))
                assert_error(asked, 404, None, "no response", "response_not_found")
            body = {"input": "hi", "previous_response_id": name}
            asked = await at.http.post("/responses", json=body, headers=bearer("two"))
            assert_error(asked, 404, "previous_response_id", "no response", "response_not_found")


# ---- several fronts --------------------------------------------------------------------------------------------------


async def test_other_fronts_find_it():
    engine = engine_of("ok")
    async with fronts_of(engine) as (front, other):
        first = await front.create(input=[said("user", "one")])
        second = await other.create(input="two", previous_response_id=first["id"])
        assert prompts_of(engine)[1] == "<|user|>one<|assistant|>ok<|user|>two<|assistant|>"
        assert (await other.http.get(f"/responses/{first['id']}")).json() == first
        listed = (await front.http.get(f"/responses/{second['id']}/input_items")).json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["two", "ok", "one"]
        assert (await other.http.delete(f"/responses/{first['id']}")).json() == {
            "id": first["id"], "object": "response", "deleted": True
        }  # fmt: skip
        assert (await front.http.get(f"/responses/{first['id']}")).status_code == 404
        del front._fronts["f0"]
        gone = await other.http.get(f"/responses/{first['id']}")
        assert_error(gone, 404, None, "'f0' of this response has ended", "response_not_found")


# ---- in the background -----------------------------------------------------------------------------------------------


async def test_a_response_is_made_in_the_background():
    engine = engine_of("Hello", delay_s=0.01)
    async with fronts_of(engine) as (front, other):
        made = await front.create(background=True, metadata={"a": "b"})
        assert (made["status"], made["output"], made["usage"]) == ("queued", [], None)
        body = {"input": "x", "previous_response_id": made["id"]}
        assert_error(
            await other.http.post("/responses", json=body), 400, "previous_response_id", "still", "response_in_progress"
        )
        seen = set()
        while (now := (await other.http.get(f"/responses/{made['id']}")).json())["status"] != "completed":
            seen.add(now["status"])
            await asyncio.sleep(0.001)
        assert "in_progress" in seen
        assert now["output"][0]["content"][0]["text"] == "Hello"
        assert now["metadata"] == {"a": "b"}
        assert_error(await front.http.get(f"/responses/{made['id']}?stream=true"), 400, "stream", "background and")
        again = await other.http.post(f"/responses/{made['id']}/cancel")
        assert again.json() == now, "what has ended stays"
        plain = await front.create()
        refused = await front.http.post(f"/responses/{plain['id']}/cancel")
        assert_error(refused, 400, None, "not made in the background", "response_not_in_background")


@pytest.mark.parametrize("how", ["cancel", "delete", "abort"])
async def test_a_background_response_is_cancelled(how: str):
    engine = engine_of("Hello " * 500, delay_s=0.01)
    async with fronts_of(engine) as (front, other):
        made = await front.create(background=True)
        await eventually(lambda: engine.num_running)
        await eventually(lambda: b"Hello" in front.store.body(made["id"], ""))
        if how == "abort":  # by the client's own id of the request
            engine.failure, engine.fails_after = (engine.failure[0].ABORT, ""), 0
            await front.http.post("/abort", json={"request_id": made["id"]})
            assert engine.aborts == [made["id"]]
            await eventually(lambda: b'"status":"cancelled"' in front.store.body(made["id"], ""))
            ended = (await other.http.get(f"/responses/{made['id']}")).json()
            assert (ended["status"], ended["output"][0]["status"]) == ("cancelled", "incomplete")
            assert ended["output"][0]["content"][0]["text"].startswith("Hello")
            return
        if how == "delete":
            await other.http.delete(f"/responses/{made['id']}")
            assert (await front.http.get(f"/responses/{made['id']}")).status_code == 404
        else:
            ended = (await other.http.post(f"/responses/{made['id']}/cancel")).json()
            assert (ended["status"], ended["output"][0]["status"]) == ("cancelled", "incomplete")
            assert ended["output"][0]["content"][0]["text"].startswith("Hello")
            assert (await front.http.get(f"/responses/{made['id']}")).json() == ended
        await eventually(lambda: not engine.num_running)
        assert len(engine.aborted) == 1


@pytest.mark.parametrize("page_bytes", [1, 1 << 20])
async def test_a_background_stream_can_be_resumed(page_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serve_app.apis.responses.store._PAGE_BYTES", page_bytes)
    engine = engine_of("Hello, wörld!", delay_s=0.005)
    async with fronts_of(engine) as (front, other):
        async with front.http.stream(
            "POST", "/responses", json={"input": "hi", "background": True, "stream": True}
        ) as answer:
            first = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in first]
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        name = events[0]["response"]["id"]
        for at in (front, other):
            for after in (None, 0, 7, len(events) + 3):
                query = "" if after is None else f"&starting_after={after}"
                tail = data_of(await at.http.get(f"/responses/{name}?stream=true{query}"))
                assert tail == events[0 if after is None else after + 1 :]
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=other.http)
        async with client.responses.stream(response_id=name, starting_after=9) as stream:
            assert [event.sequence_number async for event in stream] == list(range(10, len(events)))
            assert (await stream.get_final_response()).output_text == "Hello, wörld!"
        reading = asyncio.create_task(
            other.http.post("/responses", json={"input": "hi", "background": True, "stream": True})
        )
        await eventually(lambda: other.store._running)
        (name,) = other.store._running
        follows = asyncio.create_task(front.http.get(f"/responses/{name}?stream=true"))
        assert data_of(await follows) == data_of(await reading)


async def test_a_background_response_can_fail():
    async with fronts_of(engine_of("ok", busy=True)) as (front, _):
        name = (await front.create(background=True))["id"]
        await eventually(lambda: not front.store._running)
        failed = (await front.http.get(f"/responses/{name}")).json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "rate_limit_exceeded")
    async with fronts_of(engine_of("ok", delay_s=0.2), request_timeout_s=0.05) as (front, _):
        name = (await front.create(background=True))["id"]
        await eventually(lambda: not front.store._running)
        failed = (await front.http.get(f"/responses/{name}")).json()
        assert "request_timeout_s" in failed["error"]["message"]


async def test_the_queries_of_a_url_are_checked():
    async with fronts_of(engine_of("ok")) as (front, _):
        name = (await front.create())["id"]
        for path, param, says in (
            ("?stream=maybe", "stream", "'true'"),
            ("?starting_after=1", "starting_after", "stream is true"),
            ("?stream=true&starting_after=x", "starting_after", "integer"),
            ("/input_items?limit=0", "limit", "greater"),
            ("/input_items?order=up", "order", "'asc'"),
            ("/input_items?after=x", "after", "none of these"),
        ):
            assert_error(await front.http.get(f"/responses/{name}{path}"), 400, param, says)
