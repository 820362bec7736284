"""Several models in one front: each request goes to its model, and each list shows all of them."""

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.wire.engine_client import EngineRefusal, Idleness, Refusal
from actors.wire.metrics import MetricValues, Snapshot
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.output.fields import FieldError
from serve_app.application import build_http_app
from serve_app.durations import Duration
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.service.sleep import ModelSleep
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings
from tests.support.http.fake_engine import FakeEngine, byte_tokenizer

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


class SleepingEngine(FakeEngine):
    """An engine that starts on request. Before its first start, only its expected facts are known."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.real, self.info = self.info, replace(self.info, fingerprint="")
        self.is_awake, self.num_starts, self.idle = False, 0, Idleness(0.0, -1.0)
        self.refusal: CallboardError | None = None

    def engines(self) -> list[str]:
        return super().engines() if self.is_awake else []

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        return await super().report(figures) if self.is_awake else {}

    async def started(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.num_starts += not self.is_awake
        self.is_awake, self.info = True, self.real

    async def keep(self, seconds: float | None) -> list[Idleness]:
        if seconds is not None:
            self.idle = Idleness(self.idle.idle_s, seconds)
        return [self.idle] if self.is_awake else []


class Server:
    """Model a with two names, and model b, which sleeps after a minute."""

    def __init__(self) -> None:
        self.a, self.b = FakeEngine("from a"), SleepingEngine("from b")
        tokenizer = byte_tokenizer(CHAT)
        services = [
            Service(self.a, tokenizer, "a", None, ("alias",)),
            Service(self.b, tokenizer, "b", sleep=ModelSleep(self.b, 60.0)),
        ]
        self.models = Models(services)
        transport = httpx.ASGITransport(build_http_app(self.models))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def complete(self, **fields) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 64, **fields})

    async def listed(self, path: str) -> list[str]:
        return [model["name"] for model in (await self.http.get(path)).json()["models"]]

    async def generate(self, **fields) -> httpx.Response:
        body = {"model": "b", "stream": False, **fields}
        answer = await self.http.post("/api/generate", json=body)
        await asyncio.sleep(0)  # the idle time is set after the answer
        return answer


@pytest.fixture
async def server():
    found = Server()
    async with found.http:
        yield found


# ---- which model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("a", "from a"), ("alias", "from a"), ("b", "from b"), (None, "from a")])
async def test_a_request_goes_to_its_model(server: Server, name: str | None, text: str):
    answer = (await server.complete(model=name)).json()
    assert answer["choices"][0]["text"] == text
    assert answer["model"] == text.removeprefix("from ")


async def test_an_unknown_model_is_a_404_with_all_names(server: Server):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        answer = await server.http.post(path, json={"model": "c", **body})
        assert answer.status_code == 404
        assert "There is no model 'c' here; this server has 'a', 'alias', 'b'." in answer.text


async def test_an_adapter_belongs_to_its_model(server: Server):
    await server.b.adapters.load("own", "/adapters/own")
    assert (await server.complete(model="own")).json()["choices"][0]["text"] == "from b"
    assert server.b.requests[-1].adapter


async def test_an_adapter_takes_no_name_of_another_model(server: Server):
    with pytest.raises(FieldError, match="lora_name is 'b', which is another model's name"):
        await server.models.load_adapter("b", "/adapters/b", True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_all_apis_choose_the_model(server: Server, path: str):
    message = {"role": "user", "content": "x"}
    prompt = {"input": "x"} if path.endswith("responses") else {"messages": [message], "max_tokens": 64}
    answer = await server.http.post(path, json={"model": "b", **prompt})
    assert (answer.status_code, answer.json()["model"]) == (200, "b")
    assert (len(server.a.requests), len(server.b.requests)) == (0, 1)


async def test_an_abort_reaches_all_models(server: Server):
    await server.http.post("/v1/abort", json={"request_id": "r"})
    assert server.a.aborts == server.b.aborts == ["r"]


# ---- a sleeping model ------------------------------------------------------------------------------------------------


async def test_a_sleeping_model_needs_no_engine_for_its_facts(server: Server):
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("a", "a"), ("alias", "a"), ("b", "b")]
    assert (await server.http.post("/tokenize", json={"model": "b", "prompt": "xy"})).json()["count"] == 2
    assert (await server.http.post("/api/show", json={"model": "b"})).json()["template"] == CHAT
    assert await server.listed("/api/tags") == ["a", "alias", "b"]
    assert not server.b.num_starts


async def test_a_request_starts_an_engine_and_has_its_fingerprint(server: Server):
    answer = await server.complete(model="b")
    assert (server.b.num_starts, answer.json()["system_fingerprint"]) == (1, "fp_f")
    await server.complete(model="b")
    assert server.b.num_starts == 1


async def test_a_refused_start_is_the_answer(server: Server):
    server.b.refusal = EngineRefusal("The request waited longer than queue_timeout_s.", Refusal.LATE)
    assert (await server.complete(model="b")).status_code == 504
    server.b.refusal = CallboardError("No engine could be started.")
    answer = await server.complete(model="b")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "No engine could be started.")


async def test_ready_names_the_sleeping_models(server: Server):
    ready = (await server.http.get("/ready")).json()
    phase = "scaled to zero; the next request starts an engine"
    assert ready == {"status": "ready", "phase": f"b: {phase}.", "phases": {"b": phase}}
    await server.b.started()
    assert (await server.http.get("/ready")).json() == {"status": "ready"}


async def test_metrics_have_all_models(server: Server):
    async def values(name: str) -> dict[str, float]:
        families = text_string_to_metric_families((await server.http.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels["model_name"]: sample.value for sample in samples}

    assert await values("callboard:engines") == {"a": 1, "b": 0}
    await server.complete(model="b")
    assert await values("callboard:engines") == {"a": 1, "b": 1}
    assert await values("vllm:request_prompt_tokens_count") == {"a": 0, "b": 1}


# ---- Ollama's keep_alive ---------------------------------------------------------------------------------------------


async def test_ps_shows_loaded_models_and_their_ends(server: Server):
    assert await server.listed("/api/ps") == ["a", "alias"]
    await server.complete(model="b")
    for idle, seconds in ((Idleness(10.0, -1.0), 50), (Idleness(10.0, 300.0), 290), (Idleness(90.0, 60.0), 0)):
        server.b.idle = idle
        shown = (await server.http.get("/api/ps")).json()["models"]
        assert shown[0]["expires_at"] == "9999-12-31T23:59:59Z"
        end = datetime.fromisoformat(shown[-1]["expires_at"])
        assert shown[-1]["name"] == "b"
        assert timedelta(seconds=seconds - 60) < end - datetime.now(UTC) <= timedelta(seconds=seconds)
    server.b.idle = Idleness(10.0, math.inf)
    assert (await server.http.get("/api/ps")).json()["models"][-1]["expires_at"] == "9999-12-31T23:59:59Z"


@pytest.mark.parametrize(("value", "seconds"), [("5m", 300.0), (90, 90.0), (-1, math.inf), ("-1m", math.inf), (0, 0.0)])
async def test_keep_alive_sets_the_idle_time(server: Server, value: object, seconds: float):
    answer = await server.generate(prompt="x", keep_alive=value)
    assert "x-callboard-ignored-fields" not in answer.headers
    assert server.b.idle.keep_s == seconds


async def test_an_empty_request_loads_and_unloads(server: Server):
    assert (await server.generate()).json()["done_reason"] == "load"
    assert (server.b.num_starts, server.b.idle.keep_s) == (1, -1.0)
    assert (await server.generate(keep_alive=0)).json()["done_reason"] == "unload"
    assert (server.b.num_starts, server.b.idle.keep_s) == (1, 0.0)


async def test_unloading_starts_no_engine(server: Server):
    assert (await server.generate(keep_alive="0s")).json()["done_reason"] == "unload"
    assert not server.b.num_starts


async def test_a_model_that_never_sleeps_ignores_keep_alive(server: Server):
    answer = await server.generate(model="a", prompt="x", keep_alive=0)
    assert answer.headers["x-callboard-ignored-fields"] == "keep_alive"
    assert (await server.generate(model="a", keep_alive=0)).json()["done_reason"] == "load"


async def test_a_wrong_keep_alive_is_named(server: Server):
    answer = await server.generate(prompt="x", keep_alive="soon")
    assert answer.status_code == 400
    assert "keep_alive" in answer.json()["error"]
    assert "such as 30s, 10m or 1h30m" in answer.json()["error"]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5", 1.5),
        ("30s", 30),
        ("10m", 600),
        ("1h30m", 5400),
        ("500ms", 0.5),
        (7, 7),
        ("-1", -1),
        ("-2m", -120),
    ],
)
def test_durations(text: object, seconds: float):
    assert Duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "10 m", "1m x", True, None, "nan", "--5s", "5s" * 40])
def test_other_texts_are_no_durations(text: object):
    with pytest.raises(ValueError, match="is not a duration"):
        Duration(text)


def models(*given: tuple[str, tuple[str, ...]], **scaling) -> tuple[ModelSettings, ...]:
    return ModelSettings.of_all([(EngineConfig(model), names, ScalingSettings(**scaling)) for model, names in given])


def test_several_models_may_sleep_and_one_does_not():
    assert [m.scaling.idle_sleep for m in models(("m", ()))] == [None]
    assert [m.scaling.idle_sleep for m in models(("m", ()), ("n", ()))] == [math.inf] * 2
    assert [m.scaling.idle_sleep for m in models(("m", ()), ("n", ()), idle_sleep=9.0)] == [9.0] * 2
    assert [m.scaling.least for m in models(("m", ()), ("n", ()), min_replicas=1)] == [1, 1]


def test_engines_of_each_model_have_a_deployment():
    found = models(("org/m", ()), ("org/n", ()), ("x", ("fast one",)))
    assert [model.deployment for model in found] == ["Engine", "Engine-org-n", "Engine-fast-one"]


def test_two_models_with_a_name_are_refused():
    with pytest.raises(CallboardError, match="Two models are called 'x'; give one another served_model_name"):
        models(("m", ("x",)), ("n", ("y", "x")))


def test_idle_sleep_and_min_replicas_exclude_each_other():
    with pytest.raises(CallboardError, match="idle_sleep ends all replicas of a model, but min_replicas is 1"):
        ScalingSettings(idle_sleep=Duration("10m"), min_replicas=1)


async def test_an_adapter_belongs_to_the_model_that_its_load_names(tmp_path):
    server = Server()
    app = build_http_app(server.models, HttpSettings(lora_folder=str(tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        load = {"lora_name": "sql", "lora_path": "sql"}
        for base, status in (("nope", 404), ("b", 200), (None, 400), ("a", 400)):  # b has the name then
            body = load | ({} if base is None else {"base_model_name": base})
            assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == status
        assert (server.b.num_starts, list(server.b.adapters.states), list(server.a.adapters.states)) == (1, ["sql"], [])
        cards = (await http.get("/v1/models")).json()["data"]
        assert {card["id"]: card["parent"] for card in cards} == {"a": None, "alias": None, "b": None, "sql": "b"}
        answer = await http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "from b"
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
        assert "sql" not in server.b.adapters.served()
