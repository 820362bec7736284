"""Routes that the page uses: killing a process, checking a grammar, and the server's facts."""

import os
from contextlib import asynccontextmanager

import httpx
import pytest

from runtime.base.types import CallboardError
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.application import build_http_app
from serve_app.processes import application_processes as processes
from serve_app.processes.application_processes import Process, kill_any
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer


@asynccontextmanager
async def front(settings: HttpSettings = HttpSettings(), service: Service | None = None):  # noqa: B008  # frozen
    """A client of a front, and the roles of processes that the front was asked to kill."""
    killed: list[str] = []

    async def kill(role: str) -> dict[str, object]:
        if role == "runner":
            raise CallboardError("This machine has no runner.")
        killed.append(role)
        return {"engine": "a", "pid": 7}

    app = build_http_app(service or Service(FakeEngine(), byte_tokenizer(), MODEL), settings, kill=kill)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client, killed


async def test_chaos_is_refused_by_default():
    async with front() as (client, killed):
        response = await client.post("/chaos")
        assert (response.status_code, response.json()["error"]["code"]) == (403, "chaos_not_allowed")
        assert "--allow-chaos" in response.json()["error"]["message"]
        assert not (await client.get("/server_info")).json()["allow_chaos"]
        assert killed == []


async def test_chaos_kills_a_process_of_the_role():
    async with front(HttpSettings(allow_chaos=True)) as (client, killed):
        assert (await client.get("/server_info")).json()["allow_chaos"]
        assert (await client.post("/chaos")).json() == {
            "object": "chaos.kill", "role": "engine", "engine": "a", "pid": 7
        }  # fmt: skip
        assert killed == ["engine"]
        response = await client.post("/chaos?role=front")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "role")
        response = await client.post("/chaos?role=runner")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "nothing_killed")
        response = await client.post("/chaos", headers={"origin": "http://evil.example"})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert killed == ["engine"]


async def test_chaos_needs_the_key():
    async with front(HttpSettings(allow_chaos=True, api_key=("k",))) as (client, killed):
        assert (await client.post("/chaos")).status_code == 401
        assert (await client.post("/chaos", headers={"authorization": "Bearer k"})).status_code == 200
        assert killed == ["engine"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_chaos_without_keys_is_for_loopback(host: str):
    assert HttpSettings(allow_chaos=True).listening_on(host).allow_chaos


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "a.example"])
def test_chaos_elsewhere_needs_keys(host: str):
    with pytest.raises(CallboardError, match=r"allow_chaos lets any client of .*; give api_key, or listen"):
        HttpSettings(allow_chaos=True).listening_on(host)
    assert HttpSettings(allow_chaos=True, api_key=("k",)).listening_on(host).allow_chaos
    assert not HttpSettings().listening_on(host).allow_chaos


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes found of an application that serves on all interfaces."""
    import ray
    from ray.serve import context

    class Client:
        class http_config:
            host = "0.0.0.0"

    class Node:
        def get_session_dir_path(self) -> str:
            return "/tmp/session"

    listed: list[Process] = []
    monkeypatch.setattr(context, "_get_global_client", Client)
    monkeypatch.setattr(ray._private.worker, "_global_node", Node())
    monkeypatch.setattr(processes, "processes_of", lambda application, session: listed)
    return listed


def test_kill_any_sends_one_signal(found: list[Process], monkeypatch: pytest.MonkeyPatch):
    sent = []

    def send(process: Process, number: int) -> None:
        if process.pid == 3:
            raise ProcessLookupError
        sent.append(process.pid)

    monkeypatch.setattr(Process, "send", send)
    roles = enumerate(("front", "engine", "runner"), start=1)
    found += [Process(role, "a", pid, "app", "/tmp/session") for pid, role in roles]
    with_keys = HttpSettings(allow_chaos=True, api_key=("k",))
    assert kill_any("app", "engine", with_keys).pid == 2
    assert sent == [2]
    with pytest.raises(CallboardError, match="runs no runner of the server now"):  # it has just ended
        kill_any("app", "runner", with_keys)
    with pytest.raises(CallboardError, match=r"any client of 0\.0\.0\.0"):
        kill_any("app", "engine", HttpSettings(allow_chaos=True))
    assert os.getpid() not in sent


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": {"type": "json_schema", "schema": {"type": "object", "not": {}}}},
         "response_format.schema", "not"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", ""),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar", "missing"),
        ({"structured_outputs": {"regex": "a", "grammar": "root ::= [a]"}}, "structured_outputs", ""),
    ],
)  # fmt: skip
async def test_a_faulty_grammar_is_named_before_it_is_sent(shared_compiler, body: dict, param: str, says: str):
    async with front() as (client, _):
        response = await client.post("/check_grammar", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert says in error["message"]


async def test_a_valid_grammar_is_accepted(shared_compiler):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    async with front() as (client, _):
        for body, ignored in (
            ({}, []),
            ({"structured_outputs": {"grammar": 'start: "a"+'}}, []),
            ({"response_format": {"type": "json_schema", "schema": schema}},
             ["response_format.schema#/properties/a/uniqueItems"]),
        ):  # fmt: skip
            response = await client.post("/check_grammar", json={"model": MODEL, **body})
            assert response.json() == {"object": "grammar.check", "ignored": ignored}


async def test_server_info_has_the_sampling_of_the_models_makers():
    service = Service(FakeEngine(), byte_tokenizer(), MODEL)
    service.start(byte_tokenizer(), SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "a.json"))
    async with front(service=service) as (client, _):
        assert (await client.get("/server_info")).json()["sampling"] == {"temperature": 0.2, "top_p": 0.9}


async def test_ready_reports_sleeping_engines():
    service = Service(FakeEngine(), byte_tokenizer(), MODEL)
    async with front(service=service) as (client, _):
        assert (await client.get("/ready")).json() == {"status": "ready"}
        await client.post("/sleep")
        assert (await client.get("/ready")).json()["phase"] == "asleep; requests wait for POST /wake_up"


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", (), 200),
        ("http://[::1]:8000", "[::1]:8000", (), 200),
        ("http://localhost", "localhost", (), 200),
        ("https://llm.example", "llm.example", ("LLM.example",), 200),
        ("http://127.0.0.1:8001", "127.0.0.1:8000", (), 403),  # another server's page
        ("http://evil.example:8000", "127.0.0.1:8000", (), 403),
        ("http://evil.example:8000", "evil.example:8000", (), 403),  # a name that was made to point here
        ("null", "127.0.0.1:8000", (), 403),
        ("http://", "", (), 403),
    ],
)
async def test_the_servers_own_page_may_use_every_route(origin: str, host: str, allowed: tuple[str, ...], status: int):
    async with front(HttpSettings(allow_chaos=True, allowed_host=allowed)) as (client, _):
        response = await client.post("/chaos", headers={"origin": origin, "host": host})
        assert response.status_code == status
