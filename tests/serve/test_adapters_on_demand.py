"""Adapters of a folder that load at their first request."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from benchmarks.library.make_adapter import save_adapter
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable
from runtime.loading.sources.names import CLOUD_PACKAGES
from serve_app.application import build_http_app
from serve_app.service import adapter_folder
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.adapters import MODULES
from tests.support.engine.fake_runner import before_all, mix, sample
from tests.support.engine.links import eventually
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer
from tests.support.http.serving import serving

BODY = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}


def settings_of(folder: object, **settings: object) -> HttpSettings:
    return HttpSettings(lora_folder=str(folder), lora_on_demand=True, **settings)


def client_of(*engines: FakeEngine, folder: object) -> httpx.AsyncClient:
    names = (MODEL, "other")
    models = Models([Service(e, byte_tokenizer("x"), name) for e, name in zip(engines, names, strict=False)])
    app = build_http_app(models, settings_of(folder))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def loads_of(engine: FakeEngine) -> list[str]:
    """Return the names that the engine is asked to load, in order."""
    found, load = [], engine.adapters.load

    async def noted(name, path, replaceable=None):
        found.append(name)
        await asyncio.sleep(0)
        await load(name, path, replaceable)

    engine.adapters.load = noted
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "legal", "bad"):
        save_adapter(tmp_path / "adapters" / name, MODULES)
    save_adapter(tmp_path / "outside", MODULES)
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "adapters"


async def complete(http: httpx.AsyncClient, model: str, **fields: object) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "a", **fields})


async def test_the_first_requests_load_an_adapter_once(folder: Path):
    engine = FakeEngine()
    loads = loads_of(engine)
    async with client_of(engine, folder=folder) as http:
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await http.get("/v1/models/sql")).status_code == 404, "a look at a name loads nothing"
        names = ["sql", f"{MODEL}:sql", "sql:latest", "sql", f"{MODEL}:legal", "legal"]
        answers = await asyncio.gather(*(complete(http, name) for name in names))
        assert [answer.json()["model"] for answer in answers] == ["sql"] * 4 + ["legal"] * 2
        assert sorted(loads) == ["legal", "sql"]
        assert engine.adapters.states["sql"].entry.path == str(folder / "sql")
        cards = (await http.get("/v1/models")).json()["data"]
        assert {(card["id"], card["parent"]) for card in cards} == {(MODEL, None), ("sql", MODEL), ("legal", MODEL)}
        assert (await http.get(f"/v1/models/{MODEL}:sql")).json()["id"] == "sql"
        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": f"{MODEL}:sql"})
        assert gone.status_code == 200
        counted = await http.post("/tokenize", json={"model": "sql", "prompt": "a"})
        assert counted.status_code == 200, "a route that only tokenizes loads it again"
        assert sorted(loads) == ["legal", "sql", "sql"]


@pytest.mark.parametrize(
    "name", ["nope", "..", "../outside", "link", "a/sql", "/etc", ".hidden", "a\nb", "x" * 300, "a\0"]
)
async def test_names_without_an_adapter_are_the_usual_404(folder: Path, name: str):
    engine = FakeEngine()
    loads = loads_of(engine)
    async with client_of(engine, folder=folder) as http:
        for model in (name, f"{MODEL}:{name}"):
            assert_error(await complete(http, model), 404, "model", "There is no model", "model_not_found")
        assert not loads


async def test_failures_are_not_repeated_at_each_request(folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen, now = [], 1000.0
    monkeypatch.setattr(adapter_folder, "has_adapter", lambda path: seen.append(path) or path.endswith("bad"))
    monkeypatch.setattr(adapter_folder, "_MAX_REMEMBERED", 2)
    monkeypatch.setattr(adapter_folder, "time", SimpleNamespace(monotonic=lambda: now))
    engine = FakeEngine()
    loads = loads_of(engine)
    async with client_of(engine, folder=folder) as http:
        for _ in range(3):
            assert (await complete(http, "nope")).status_code == 404
            broken = await complete(http, "bad")
            assert_error(broken, 400, "model", "<path> has no adapter_config.json.", "adapter_not_loaded")
        assert (seen, loads) == ([f"{folder}/nope", f"{folder}/bad"], ["bad"])
        assert (await complete(http, "third")).status_code == 404
        assert (await complete(http, "nope")).status_code == 404, "the oldest was forgotten"
        assert len(seen) == 4
        now += 20
        assert (await complete(http, "nope")).status_code == 404
        assert len(seen) == 5


async def test_a_base_chooses_the_model_of_an_adapter(folder: Path):
    first, second = FakeEngine("from a"), FakeEngine("from b")
    async with client_of(first, second, folder=folder) as http:
        answer = await complete(http, "other:sql", max_tokens=64)
        assert answer.json()["choices"][0]["text"] == "from b"
        assert (list(first.adapters.states), list(second.adapters.states)) == ([], ["sql"])
        assert (await complete(http, "sql", max_tokens=64)).json()["choices"][0]["text"] == "from b"
        assert (await complete(http, f"{MODEL}:sql", max_tokens=64)).json()["choices"][0]["text"] == "from a"
        cards = (await http.get("/v1/models")).json()["data"]
        assert {card["id"]: card["parent"] for card in cards if card["parent"]} == {"sql": MODEL, "other:sql": "other"}
        assert (await complete(http, "legal", max_tokens=64)).json()["choices"][0]["text"] == "from a"


async def test_a_bucket_out_of_reach_is_a_503(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path):
    monkeypatch.setitem(CLOUD_PACKAGES, "memory", "fsspec")
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    system = MemoryFileSystem()
    for name in ("sql", "legal"):
        system.put(str(folder / name), f"/bucket/adapters/{name}", recursive=True)
    engine = FakeEngine()
    async with client_of(engine, folder="memory://bucket/adapters") as http:
        assert (await complete(http, "sql")).json()["model"] == "sql"
        assert engine.adapters.states["sql"].entry.path == "memory://bucket/adapters/sql"
        assert (await complete(http, "nope")).status_code == 404
        assert (await complete(http, f"{MODEL}:x?y")).status_code == 404

        def fail(*_, **__):
            raise OSError("no route, key=secret")

        monkeypatch.setattr(MemoryFileSystem, "ls", fail)
        late = await complete(http, "legal")
        assert_error(late, 503, None, "cannot be fetched (OSError: no route, key=***)", "engine_unavailable")
        assert late.headers["retry-after"]


async def test_idle_adapters_make_room_and_streams_keep_theirs(folder: Path):
    """The whole way over real sockets. Only the runner is a fake, and its tokens depend on the adapter."""
    for i, name in enumerate(("sql", "legal", "third", "pinned")):
        save_adapter(folder / name, MODULES, seed=i)
    async with serving(settings_of(folder), max_loras=2) as (engine, url):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        body = {k: v for k, v in BODY.items() if k != "return_token_ids"}
        body["extra_body"] = {"ignore_eos": body.pop("ignore_eos"), "return_token_ids": True}

        def names() -> set[str]:
            return {name for name, state in engine.loop._adapters.states.items() if state.is_served}

        async def tokens(model: str) -> list[int]:
            stream = await client.completions.create(model=model, stream=True, **body)
            return [i async for chunk in stream for c in chunk.choices for i in c.token_ids]

        expected = {}
        for name in ("sql", "legal", "sql", "third"):
            found = await tokens(name)
            assert found == expected.setdefault(name, found)
            digest = engine.loop._adapters.states[name].digest
            state = before_all(digest)
            for token in BODY["prompt"]:
                state = mix(state, token)
            for token in found:
                assert token == sample(state)
                state = mix(state, token)
        assert names() == {"sql", "third"}, "the least recently used one made room"

        engine.delay_s = engine.runners[-1].delay_s = 0.1
        reading = asyncio.create_task(tokens("sql"))
        await eventually(lambda: engine.loop.core.scheduler.stats.steps and engine.loop.core.scheduler.requests)
        other = asyncio.create_task(tokens("third"))
        await eventually(lambda: len(engine.loop.core.scheduler.requests) == 2)
        with pytest.raises(openai.RateLimitError, match=r"'legal' has no place \(max_loras\); try again later"):
            await client.completions.create(model="legal", **body)
        engine.die()
        engine.restart()
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 1)
        engine.delay_s = engine.runners[-1].delay_s = 0.0
        assert await reading == expected["sql"]
        assert await other == expected["third"]
        assert await tokens("legal") == expected["legal"]

        # An adapter that a client has loaded under another name never makes room.
        await client.post(
            "/load_lora_adapter", body={"lora_name": "kept", "lora_path": "pinned"}, cast_to=httpx.Response
        )
        for name in ("sql", "legal", "third"):
            assert await tokens(name) == expected[name]
            assert names() == {"kept", name}
        assert len(engine.loop.core.extras[AdapterTable].loaded) == 2


def test_on_demand_needs_a_folder():
    with pytest.raises(CallboardError, match="lora_on_demand loads adapters of lora_folder, which is not given"):
        HttpSettings(lora_on_demand=True)
