"""Adapters over HTTP: separate models that are loaded and unloaded while the server runs."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.library.make_adapter import save_adapter
from callboard.app import AppArgs, build_app
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable
from serve_app import cli
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.adapters import MODULES
from tests.support.engine.fake_runner import before_all, mix, sample
from tests.support.engine.links import eventually
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer
from tests.support.http.serving import serving


def client_with(engine: FakeEngine, **settings: object) -> httpx.AsyncClient:
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), HttpSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_an_adapter_is_a_model_on_every_route(tmp_path: Path):
    engine = FakeEngine()
    http = client_with(engine, lora_folder=str(tmp_path))
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
    loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "team/sql"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert engine.adapters.states["sql"].entry.path == str(tmp_path / "team" / "sql")

    cards = (await client.models.list()).data
    assert [(c.id, c.root, c.parent) for c in cards] == [(MODEL, MODEL, None), ("sql", "sql", MODEL)]
    assert cards[1].created == 5
    assert await client.models.retrieve("sql") == cards[1]

    messages = [{"role": "user", "content": "hi"}]
    of_model = await client.completions.create(model=MODEL, prompt="a")
    answers = [
        await client.completions.create(model="sql", prompt="a"),
        await client.chat.completions.create(model="sql", messages=messages),
        await client.responses.create(model="sql", input="hi"),
    ]
    assert {answer.model for answer in answers} == {"sql"}
    assert {answer.system_fingerprint for answer in answers} == {f"{of_model.system_fingerprint}_digest of sql"}
    message = {"model": "sql", "messages": messages, "max_tokens": 5}
    assert (await http.post("/v1/messages", json=message)).json()["model"] == "sql"
    assert [request.adapter for request in engine.requests] == ["", *["digest of sql"] * 4]
    for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/messages/count_tokens", {"messages": messages})):
        assert (await http.post(path, json={"model": "sql", **body})).status_code == 200

    text = (await http.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    counted = [(s.labels["adapter"], s.value) for s in samples if s.name == "callboard:adapter_requests_total"]
    assert counted == [("sql", 4)]

    gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    with pytest.raises(openai.NotFoundError, match="There is no model 'sql' here; this server has 'fake'"):
        await client.completions.create(model="sql", prompt="a")
    assert [card.id for card in (await client.models.list()).data] == [MODEL]


async def test_loads_and_unloads_that_are_refused(tmp_path: Path):
    folder = tmp_path / "adapters"
    (folder / "inside").mkdir(parents=True)
    (folder / "outside").symlink_to(tmp_path)
    engine = FakeEngine()
    async with client_with(engine, lora_folder=str(folder), api_key=("k",)) as http:
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        assert_error(await http.post(load, json={}), 401, None, "key", "invalid_api_key")
        http.headers["authorization"] = "Bearer k"
        for path in ("..", "/etc", "../adapters2", "outside/x", str(tmp_path)):
            refused = await http.post(load, json={"lora_name": "a", "lora_path": path})
            assert_error(refused, 400, "lora_path", "not in this server's folder")
        for field, value in (("lora_name", "a\nb"), ("lora_name", "\x1b[2J"), ("lora_path", "inside\n")):
            refused = await http.post(load, json={"lora_name": "a", "lora_path": "inside"} | {field: value})
            assert_error(refused, 400, field, "cannot be printed")
        refused = await http.post(load, json={"lora_name": "a" * 257, "lora_path": "inside"})
        assert_error(refused, 400, "lora_name", "256")
        bad = await http.post(load, json={"lora_name": "a", "lora_path": "bad"})
        assert_error(bad, 400, "lora_path", "<path> has no adapter_config.json", "adapter_not_loaded")
        inside = {"lora_name": "a", "lora_path": str(folder / "inside")}
        assert (await http.post(load, json=inside)).status_code == 200
        assert (await http.post(load, json=inside | {"load_inplace": True})).status_code == 200
        taken = await http.post(load, json=inside | {"lora_name": MODEL, "load_inplace": True})
        assert_error(taken, 400, "lora_name", "already")
        for name in ("a", MODEL):
            taken = await http.post(load, json=inside | {"lora_name": name})
            assert_error(taken, 400, "lora_name", "already")
        unknown = await http.post(unload, json={"lora_name": "b"})
        assert_error(unknown, 404, "lora_name", "There is no model 'b' here", "model_not_found")
        assert_error(await http.post(unload, json={}), 400, "lora_name", "")
    async with client_with(engine) as http:
        for path in (load, unload):
            refused = await http.post(path, json=inside)
            assert_error(refused, 403, None, "--lora-folder", "adapters_not_allowed")


async def test_a_stream_keeps_its_adapter_despite_deaths_and_unloads(tmp_path: Path):
    """The whole way over real sockets. Only the runner is a fake, and its tokens depend on the adapter."""
    save_adapter(tmp_path / "sql", MODULES)
    async with serving(HttpSettings(lora_folder=str(tmp_path)), delay_s=0.1, max_loras=1) as (engine, url):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        async def post(path: str, **body: str) -> httpx.Response:
            return await client.post(path, body=body, cast_to=httpx.Response)

        await post("/load_lora_adapter", lora_name="sql", lora_path="sql")
        (digest,) = engine.loop.core.extras[AdapterTable].loaded
        body = {"prompt": [1, 2, 3], "max_tokens": 60, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        expected = []
        state = before_all(digest)
        for token in body["prompt"]:
            state = mix(state, token)
        while len(expected) < 60:
            expected.append(sample(state))
            state = mix(state, expected[-1])

        async def read() -> list[int]:
            stream = await client.completions.create(model="sql", stream=True, **body)
            return [i async for chunk in stream for c in chunk.choices for i in c.token_ids]

        reading = asyncio.create_task(read())
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 2)
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{url}/metrics")).text
        (info,) = (s for f in text_string_to_metric_families(text) for s in f.samples if "lora_requests" in s.name)
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        assert [info.labels[name] for name in names] == ["1", "sql", ""]
        engine.runners[-1].dead = "Rank 0 is gone."
        await eventually(lambda: engine.loop.num_rebuilds == 1 and engine.loop.core.scheduler.stats.steps > 4)
        engine.die()
        engine.restart()
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 1)
        unloading = asyncio.create_task(post("/unload_lora_adapter", lora_name="sql"))
        await eventually(lambda: not any(state.is_served for state in engine.loop._adapters.states.values()))
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="sql", **body)
        assert not unloading.done()
        engine.runners[-1].delay_s = 0.0
        assert await reading == expected
        await unloading
        assert not engine.loop.core.extras[AdapterTable].loaded


def test_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    asked = []
    monkeypatch.setattr("serve_app.server.serve.serve", asked.append)
    here = Path.cwd()
    assert cli.main(["serve", "m", "--lora", "a=x", "--lora", "b=/y", "--lora-folder", "z"]) == 0
    assert asked[0].models[0].config.adapters == {"a": f"{here}/x", "b": "/y"}  # actors have another working directory
    assert (asked[0].models[0].config.max_loras, asked[0].http.lora_folder) == (2, f"{here}/z")
    for argv, says in (
        (["--lora", "x"], "it must be NAME=FOLDER"),
        (["--lora", "a\nb=x"], "at most 256 printable characters in NAME"),
        (["--lora", "a=x", "--lora", "a=y"], "lora has a name twice"),
        (["--lora", "a=x", "--lora", "b=y", "--max-loras", "1"], "it must be at least 2"),
        (["--lora-folder", "x"], "give --max-loras, too"),
    ):
        assert cli.main(["serve", "m", *argv]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(CallboardError, match="called 'm', as the model is"):
        build_app(AppArgs(model="m", lora=("m=/x",)))
