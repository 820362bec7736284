"""The thread that does the work of a request, the amount of parallel work, and its order."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from runtime.child import ChildPool
from serve_app.apis.responses import routes as response_routes
from serve_app.application import build_http_app
from serve_app.http.lanes import LONG_REQUESTS, Lane
from serve_app.protocol.errors import ApiError
from serve_app.service.service import Service
from tests.serve.test_costly_requests import call, of
from tests.support.engine.links import eventually
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer, chat, client_of

CHATS = {
    "/v1/chat/completions": chat(),
    "/v1/messages": chat(max_tokens=5),
    "/v1/messages/count_tokens": chat(),
    "/v1/responses": {"input": "hi"},
    "/tokenize": chat(),
}
LONG = {"prompt": "word " * 20_000, "truncate_prompt_tokens": 5}


class Gate:
    """Stands before a function: calls of it wait until the gate is opened."""

    def __init__(self, function: Callable) -> None:
        self._function, self._open = function, threading.Event()
        self.threads: list[threading.Thread] = []  # that have come
        self.num_inside = self.most_inside = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        self._open.set()

    def pass_through(self, *args, **kwargs):
        with self._lock:
            self.threads.append(threading.current_thread())
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        assert threading.current_thread() is not threading.main_thread() or self._open.is_set()
        assert self._open.wait(60)
        with self._lock:
            self.num_inside -= 1
        return self._function(*args, **kwargs)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(ChildPool.run)
    monkeypatch.setattr(ChildPool, "run", lambda self, *args: gate.pass_through(self, *args))
    return gate


@pytest.fixture
def preparation(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(Service.prepare)
    monkeypatch.setattr(Service, "prepare", lambda self, *args: gate.pass_through(self, *args))
    return gate


@pytest.mark.parametrize("path", CHATS)
async def test_chats_wait_for_children_outside_the_event_loop(path: str, children: Gate):
    children.open()
    async with client_of(FakeEngine()) as client:
        children.threads.clear()  # a template is compiled as its server starts
        assert (await client.post(path, json=CHATS[path])).status_code == 200
    assert children.threads
    assert threading.main_thread() not in children.threads


async def test_waiting_chats_do_not_stop_others(children: Gate, monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_tokenizer()
    children.open()
    async with client_of(FakeEngine(), tokenizer) as client:
        children._open.clear()
        children.threads.clear()
        chats = [asyncio.create_task(client.post("/v1/chat/completions", json=chat())) for _ in range(12)]
        await eventually(lambda: children.threads)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        long = {"prompt": "word " * 2000, "truncate_prompt_tokens": 5}
        assert (await client.post("/v1/completions", json=long)).status_code == 200
        children.open()
        assert {answer.status_code for answer in await asyncio.gather(*chats)} == {200}
    assert children.most_inside <= 4


async def test_two_long_requests_are_prepared_at_once(preparation: Gate):
    async with client_of(FakeEngine()) as client:
        long = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(6)]
        await eventually(lambda: preparation.num_inside == 2)
        default = asyncio.get_running_loop().run_in_executor(None, int)
        assert await default == 0
        preparation.open()
        assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}
    assert preparation.most_inside == 2


async def test_short_body_of_many_prompts_is_prepared_in_a_thread(preparation: Gate):
    preparation.open()
    async with client_of(FakeEngine()) as client:
        for prompt in ("a", ["a"] * 100):
            assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 200
    assert [thread is threading.main_thread() for thread in preparation.threads] == [True, False]


async def test_stored_items_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    threads, read = [], response_routes._page
    monkeypatch.setattr(
        response_routes, "_page", lambda *args: (threads.append(threading.current_thread()), read(*args))[1]
    )
    async with client_of(FakeEngine()) as client:
        name = (await client.post("/v1/responses", json={"input": "hi"})).json()["id"]
        listed = await client.get(f"/v1/responses/{name}/input_items")
    assert listed.json()["data"][0]["content"][0]["text"] == "hi"
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_owners_of_waiting_work_take_turns():
    lane, gate, done = Lane("test", 1), threading.Event(), list[str]()
    first = asyncio.create_task(lane.run("a", gate.wait))
    await asyncio.sleep(0)
    work = [asyncio.create_task(lane.run(name[0], lambda name=name: done.append(name))) for name in ("a1", "a2", "b1")]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *work)
    assert done == ["a1", "b1", "a2"]


async def test_cancelled_work_is_never_begun():
    lane, gate, done = Lane("test", 1), threading.Event(), list[str]()
    first = asyncio.create_task(lane.run("", gate.wait))
    await asyncio.sleep(0)
    second, third = (asyncio.create_task(lane.run("", lambda n=n: done.append(n))) for n in ("second", "third"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, third)
    assert done == ["third"]


async def test_waiting_work_has_a_limit_of_bytes():
    lane, gate = Lane("test", 1, max_bytes=100), threading.Event()
    first = asyncio.create_task(lane.run("a", gate.wait, 60))
    await eventually(lambda: not lane._num_bytes)  # work in progress no longer waits
    second = asyncio.create_task(lane.run("a", int, 60))
    await asyncio.sleep(0)
    for owner, num_bytes in (("a", 60), ("b", 101)):
        with pytest.raises(ApiError, match="wait, above 100") as caught:
            await lane.run(owner, int, num_bytes)
        assert caught.value.status == 429
    others = [asyncio.create_task(lane.run(owner, int, 100)) for owner in "bcd"]
    await asyncio.sleep(0)
    with pytest.raises(ApiError):
        await lane.run("e", int, 100)
    second.cancel()
    await asyncio.sleep(0)
    third = asyncio.create_task(lane.run("a", int, 100))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, third, *others)
    assert not lane._num_bytes


async def test_work_that_fails_raises_its_error():
    with pytest.raises(ValueError, match="invalid literal"):
        await Lane("test", 1).run("", lambda: int("x"))


async def test_request_of_a_client_that_left_is_not_prepared(preparation: Gate):
    """Its client leaves while it waits behind others."""
    gate = threading.Event()
    before = [asyncio.create_task(LONG_REQUESTS.run("", gate.wait)) for _ in range(2)]
    app = build_http_app(Service(FakeEngine(), byte_tokenizer(), MODEL))
    preparation.open()
    leaves = asyncio.Event()

    async def after_body() -> dict:
        await leaves.wait()
        return {"type": "http.disconnect"}

    request = asyncio.create_task(call(app, "/v1/completions", of(**LONG), lambda message: None, after_body))
    await asyncio.sleep(0.01)
    leaves.set()
    await asyncio.wait_for(request, 60)
    gate.set()
    await asyncio.gather(*before)
    await LONG_REQUESTS.run("", int)
    assert preparation.threads == []
