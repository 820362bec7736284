"""Routes for trainers: pauses, updates of the weights, and their refusals."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from actors.wire.engine_client import WeightsRefused
from actors.wire.weight_calls import Connect, Discard, Finish, Pause, Receive, Start, WeightCall, WeightState
from runtime.base.types import CallboardError
from runtime.base.weight_version import WeightVersion
from serve_app import cli
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import eventually
from tests.support.http.fake_engine import MODEL, FakeEngine, assert_error, byte_tokenizer

TENSORS = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
GROUP = {"master_address": "10.0.0.1", "master_port": 29600, "rank_offset": 1, "world_size": 3}
POSTS = {  # route -> a right body, or None without one
    "/pause": None, "/resume": None, "/init_weight_transfer_engine": {"init_info": GROUP},
    "/shutdown_weight_transfer_engine": None, "/start_weight_update": None,
    "/update_weights": {"update_info": TENSORS}, "/finish_weight_update": None, "/discard_weight_update": None,
    "/update_weight_version": {"new_version": "b"},
}  # fmt: skip
GETS = ("/is_paused", "/weight_info", "/get_world_size")


def new_engine(**options) -> FakeEngine:
    return FakeEngine(weights=WeightVersion(), **options)


@asynccontextmanager
async def front(engine: FakeEngine, **settings: object):
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), HttpSettings(**settings))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        async def send(path: str, body: dict | None = None, method: str = "", **more) -> httpx.Response:
            if method == "GET" or path in GETS or path.partition("?")[0] in GETS:
                return await client.get(path, **more)
            return await client.post(path, **({} if body is None else {"json": body}), **more)

        yield send


async def test_an_update_from_pause_to_resume():
    engine = new_engine()
    async with front(engine) as send:
        for path, body, answer in (
            ("/init_weight_transfer_engine", {"init_info": GROUP}, {"message": "Weight transfer initialized"}),
            ("/pause?mode=keep", None, {"status": "paused"}),
            ("/is_paused", None, {"is_paused": True}),
            ("/start_weight_update", {"is_checkpoint_format": True}, {"message": "Weight update started"}),
            ("/update_weights", {"update_info": TENSORS}, {"message": "Weights updated"}),
            ("/update_weights", {"update_info": [TENSORS, TENSORS]}, {"message": "Weights updated"}),
            ("/finish_weight_update", {"weight_version": "step 7"},
             {"message": "Weight update finished", "weight_version": "step 7", "serial": 1, "stored": True}),
            ("/resume", None, {"status": "resumed"}),
            ("/is_paused", None, {"is_paused": False}),
            ("/update_weight_version", {"new_version": 8}, {"success": True, "new_version": "8"}),
            ("/shutdown_weight_transfer_engine", None, {"message": "Weight transfer shut down"}),
        ):  # fmt: skip
            response = await send(path, body)
            assert (response.status_code, response.json()) == (200, answer)
    calls = engine.fake_weights.calls
    expected = Pause(mode="keep"), Connect(GROUP), Receive(update_info=[TENSORS, TENSORS]), Finish("step 7")
    assert all(call in calls for call in expected)
    assert [len(call.update_id) for call in calls if isinstance(call, Start)] == [32]


@pytest.mark.parametrize(
    ("query", "mode", "kv"),
    [
        ("", "abort", "recompute"),
        ("?mode=wait&clear_cache=false", "wait", "recompute"),
        ("?mode=finish", "wait", "recompute"),
        ("?mode=keep&kv=keep", "keep", "keep"),
    ],
)
async def test_modes_of_a_pause(query: str, mode: str, kv: str):
    engine = new_engine()
    async with front(engine) as send:
        assert (await send(f"/pause{query}")).status_code == 200
    assert engine.fake_weights.calls == [Pause(mode=mode, kv=kv)]


async def test_a_pause_shows_where_a_server_is_looked_at():
    async with front(new_engine()) as send:
        for path, status in (("/ready", "ready"), ("/health", "ok")):
            await send("/pause?mode=keep&lease_s=20.5")
            assert (await send(path, method="GET")).json() == {
                "status": status,
                "phase": "paused; requests wait for POST /resume",
            }
            await send("/resume")
            assert (await send(path, method="GET")).json() == {"status": status}


@pytest.mark.parametrize(("path", "body"), [("/pause?mode=wait", None), ("/update_weights", {"update_info": TENSORS})])
async def test_a_call_ends_with_its_client(path: str, body: dict | None):
    engine, left = new_engine(), asyncio.Event()
    engine.fake_weights.update_id = "x"
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), HttpSettings())
    cancelled = asyncio.Event()

    async def call(call: WeightCall) -> dict:
        engine.fake_weights.calls.append(call)
        if isinstance(call, Discard):
            return {"0": None}
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    engine.weights = call
    sent = [{"type": "http.request", "body": b"" if body is None else msgspec.json.encode(body)}]

    async def receive() -> dict:
        if sent:
            return sent.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None: ...

    route, _, query = path.partition("?")
    headers = [(b"host", b"localhost")] + ([] if body is None else [(b"content-type", b"application/json")])
    scope = {"type": "http", "method": "POST", "path": route, "root_path": "", "query_string": query.encode(),
             "headers": headers, "client": ("127.0.0.1", 1)}  # fmt: skip
    serving = asyncio.create_task(app(scope, receive, send))
    await eventually(lambda: engine.fake_weights.calls)
    left.set()
    await asyncio.wait_for(cancelled.wait(), 30)
    await serving
    calls = [*map(type, engine.fake_weights.calls)]
    assert calls == ([Pause] if body is None else [Receive, Discard])


async def test_bodies_that_may_be_left_out():
    engine = new_engine()
    async with front(engine) as send:
        for body in (None, {}, {"weight_version": None, "wait_stored": None}):
            assert (await send("/start_weight_update", None if body is None else {})).status_code == 200
            assert (await send("/finish_weight_update", body)).status_code == 200
        await send("/start_weight_update")
        await send("/finish_weight_update", {"weight_version": 12, "wait_stored": True, "kv": "keep"})
    finishes = [call for call in engine.fake_weights.calls if isinstance(call, Finish)]
    assert finishes == [*[Finish()] * 3, Finish("12", True, "keep")]


async def test_an_update_that_is_dropped_changes_nothing():
    async with front(new_engine()) as send:
        await send("/start_weight_update")
        assert (await send("/weight_info")).json()["updating"]
        assert (await send("/discard_weight_update")).json() == {"message": "Weight update discarded"}
        info = (await send("/weight_info")).json()
        assert (info["weight_version"], info["serial"], info["updating"]) == ("default", 0, False)


async def test_calls_in_a_wrong_order_are_conflicts():
    async with front(new_engine()) as send:
        for path, body in (("/update_weights", {"update_info": TENSORS}), ("/finish_weight_update", None)):
            assert_error(await send(path, body), 409, None, "No update", "no_weight_update")
        await send("/start_weight_update")
        assert_error(await send("/start_weight_update"), 409, None, "Another update", "weights_busy")


@pytest.mark.parametrize("path", [*POSTS, *GETS])
async def test_trainers_need_the_flag(path: str):
    engine = FakeEngine()
    async with front(engine) as send:
        refused = await send(path, POSTS.get(path))
        assert_error(refused, 403, None, "--weight-updates", "weight_updates_not_allowed")
    assert engine.fake_weights.calls == []


@pytest.mark.parametrize("path", [*POSTS, *GETS])
async def test_trainers_need_the_key_and_the_origin(path: str):
    async with front(new_engine(), api_key=("k",)) as send:
        assert_error(await send(path, POSTS.get(path)), 401, None, "API key", "invalid_api_key")
    async with front(new_engine()) as send:
        refused = await send(path, POSTS.get(path), headers={"origin": "http://evil.example"})
        assert_error(refused, 403, None, "--cors-origin", "origin_not_allowed")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/pause?mode=now", None, "mode", "'abort', 'wait', 'finish' or 'keep'"),
        ("/pause?lease_s=0", None, "lease_s", "0"),
        ("/pause?lease_s=inf", None, "lease_s", ""),
        ("/pause?kv=drop", None, "kv", "'recompute' or 'keep'"),
        ("/pause?clear_cache=perhaps", None, "clear_cache", ""),
        ("/get_world_size?include_dp=2", None, "include_dp", ""),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format", "leave it out"),
        ("/init_weight_transfer_engine", {}, "init_info", "is missing"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}, "init_info", "world_size"),
        ("/update_weights", {}, "update_info", "is missing"),
        ("/update_weights", {"update_info": "all"}, "update_info", "send an object"),
        ("/update_weights", {"update_info": [TENSORS, 3]}, "update_info", "update_info[1]"),
        ("/update_weights", {"update_info": {**TENSORS, "shapes": []}}, "update_info", "shapes"),
        ("/update_weights", {"update_info": {**TENSORS, "ipc_handles_pickled": "gASV"}}, "update_info", "as JSON"),
        ("/update_weights", {"update_info": {"paths": []}}, "update_info", "paths"),
        ("/finish_weight_update", {"weight_version": 1.5}, "weight_version", "string"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version", "at least 1"),
        ("/finish_weight_update", {"weight_version": "a\nb"}, "weight_version", "printed"),
        ("/finish_weight_update", {"wait_stored": 1}, "wait_stored", "boolean"),
        ("/finish_weight_update", {"kv": "drop"}, "kv", "'recompute' or 'keep'"),
        ("/update_weight_version", {"new_version": None}, "new_version", "string"),
    ],
)
async def test_a_field_at_fault_is_named(path: str, body: dict | None, param: str, says: str):
    engine = new_engine()
    async with front(engine) as send:
        await send("/start_weight_update")
        assert_error(await send(path, body), 400, param, says)
    assert [*map(type, engine.fake_weights.calls)] == [Start]


@pytest.mark.parametrize("body", [b"[]", b"7"])
async def test_an_update_must_be_an_object(body: bytes):
    async with front(new_engine()) as send:
        json_type = {"content-type": "application/json"}
        assert_error(await send("/update_weights", content=body, headers=json_type), 400, None, "JSON object")
        broken = await send("/update_weights", content=b'{"update_info": {', headers=json_type)
        assert_error(broken, 400, None, "not valid JSON", "invalid_json")
        deep = b'{"update_info":' + b"[" * 100_000
        assert_error(await send("/update_weights", content=deep, headers=json_type), 400, None, "", "invalid_json")
        assert_error(await send("/update_weights", content=b"{}"), 415, None, "", "unsupported_media_type")


async def test_an_update_of_a_large_model_fits():
    """The 70,272 matrices of 384 experts in 61 layers."""
    engine = new_engine()
    matrices = [f"{expert}.{name}_proj" for expert in range(384) for name in ("up", "gate", "down")]
    names = [f"model.layers.{layer}.mlp.experts.{matrix}.weight" for layer in range(61) for matrix in matrices]
    info = {"names": names, "dtype_names": ["bfloat16"] * len(names), "shapes": [[7168, 2048]] * len(names)}
    content = msgspec.json.encode({"update_info": info})
    assert 4 << 20 < len(content) < HttpSettings().longest_body(False)
    async with front(engine) as send:
        await send("/start_weight_update")
        response = await send("/update_weights", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
    assert engine.fake_weights.calls[-1].update_info == info


async def test_paths_must_lead_into_the_folder(tmp_path: Path):
    folder = tmp_path / "weights"
    (folder / "step1").mkdir(parents=True)
    (folder / "outside").symlink_to(tmp_path)
    (folder / "link").symlink_to(folder / "step1")
    engine = new_engine()
    async with front(engine, weight_folder=str(folder)) as send:
        await send("/start_weight_update")
        for path in ("..", "/etc", "../weights2", "outside/x", str(tmp_path), "a\0b"):
            refused = await send("/update_weights", {"update_info": {"paths": ["step1", path]}})
            assert_error(refused, 400, "update_info.paths.1", "")
        parts = [{"paths": ["link", str(folder / "new.safetensors")]}, {"paths": ["."]}]
        assert (await send("/update_weights", {"update_info": parts})).status_code == 200
        refused = await send("/update_weights", {"update_info": [parts[1], {"paths": ["outside"]}]})
        assert_error(refused, 400, "update_info.1.paths.0", "not in this server's folder of weights")
    sent = [call.update_info for call in engine.fake_weights.calls if isinstance(call, Receive)]
    assert sent == [[{"paths": [f"{folder}/step1", f"{folder}/new.safetensors"]}, {"paths": [str(folder)]}]]
    async with front(new_engine()) as send:
        refused = await send("/update_weights", {"update_info": {"paths": ["/tmp"]}})
        assert_error(refused, 403, "update_info.paths", "--weight-folder", "weight_files_not_allowed")


async def test_an_adapter_is_replaced_by_the_same_call(tmp_path: Path):
    (tmp_path / "policy-2").mkdir()
    engine = new_engine()
    async with front(engine, weight_folder=str(tmp_path)) as send:
        for _ in range(2):
            info = {"lora_name": "policy", "paths": ["policy-2"]}
            assert (await send("/update_weights", {"update_info": info})).json() == {"message": "Adapter updated"}
        assert engine.adapters.served().keys() == {"policy"}
        for path in ("..", "/etc"):
            refused = await send("/update_weights", {"update_info": {"lora_name": "policy", "paths": [path]}})
            assert_error(refused, 400, "update_info.paths.0", "")
        refused = await send("/update_weights", {"update_info": {"lora_name": "policy", "paths": []}})
        assert refused.status_code == 400
    assert engine.fake_weights.calls == []


class Engines(FakeEngine):
    """An engine that answers calls about weights so, or fails so."""

    def __init__(self, found: dict | Exception) -> None:
        super().__init__(weights=WeightVersion())
        self.found = found

    async def weights(self, call: WeightCall) -> dict:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def facts(version: str, serial: int, **changed: bool) -> WeightState:
    same = {"paused": True, "stored": True, "updating": False, "world_size": 4}
    return WeightState(version=version, serial=serial, **(same | changed))


async def test_the_oldest_engine_counts():
    async with front(Engines({"b": facts("c", 3, paused=False), "a": facts("b", 2, stored=False)})) as send:
        info = (await send("/weight_info")).json()
        assert info.pop("engines") == [
            {"engine": "a", "weight_version": "b", "serial": 2, "stored": False, "updating": False, "paused": True},
            {"engine": "b", "weight_version": "c", "serial": 3, "stored": True, "updating": False, "paused": False},
        ]
        assert info == {"weight_version": "b", "serial": 2, "stored": False, "updating": False, "paused": False}
        assert (await send("/get_world_size")).json() == {"world_size": 8}
        assert (await send("/get_world_size?include_dp=false")).json() == {"world_size": 4}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WeightsRefused("Another update is open.", "busy"), 409, "weights_busy"),
        (WeightsRefused("No update is open.", "not_open"), 409, "no_weight_update"),
        (WeightsRefused("The tensor a is not the model's.", "bad_request"), 400, None),
        (WeightsRefused("No engine is ready.", "unavailable"), 503, "engine_unavailable"),
        (CallboardError("The runners ended."), 500, "engine_error"),
    ],
)
async def test_refusals_of_engines_have_statuses(error: Exception, status: int, code: str | None):
    async with front(Engines(error)) as send:
        for path in ("/resume", "/weight_info", "/finish_weight_update"):
            response = await send(path)
            assert_error(response, status, None, str(error), code)
            assert ("retry-after" in response.headers) == (status == 503)


async def test_trainers_wait_while_engines_are_lost():
    async with front(new_engine(reason="The engine is restarting.")) as send:
        for path in ("/pause", "/weight_info", "/start_weight_update"):
            assert_error(await send(path), 503, None, "restarting", "engine_unavailable")


async def test_a_late_answer_ends_with_the_timeout():
    class Slow(FakeEngine):
        async def weights(self, call: WeightCall) -> dict:
            await asyncio.Event().wait()
            return {}

    async with front(Slow(weights=WeightVersion()), request_timeout_s=0.01) as send:
        assert_error(await send("/finish_weight_update"), 504, None, "request_timeout_s", "request_timeout")


async def test_unsupported_calls_of_vllm_have_a_remedy():
    async with front(new_engine()) as send:
        assert_error(await send("/start_draft_weight_update"), 400, None, "leave this call out", "draft_keeps_weights")
        assert_error(await send("/weight_checker"), 400, None, "/weight_info", "no_weight_checksums")


async def test_several_requests_are_aborted_by_their_ids():
    engine = FakeEngine()
    async with front(engine, api_key=("k",)) as send:
        key = {"authorization": "Bearer k"}
        response = await send("/abort_requests", {"request_ids": ["cmpl-1", "cmpl-2"]}, headers=key)
        assert response.json() == {"status": "aborted", "aborted": 2}
        for body in ({}, {"request_ids": None}, {"request_ids": []}):
            refused = await send("/abort_requests", body, headers=key)
            assert_error(refused, 400, "request_ids", "POST /pause?mode=abort")
    owners, names = zip(*(name.split("/") for name in engine.aborts), strict=True)
    assert names == ("cmpl-1", "cmpl-2")
    assert len(set(owners)) == 1


def test_a_refusal_crosses_processes():
    error = pickle.loads(pickle.dumps(WeightsRefused("Another update is open.", "busy")))
    assert (str(error), error.code) == ("Another update is open.", "busy")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "a.example"])
def test_updates_elsewhere_need_keys(host: str):
    with pytest.raises(CallboardError, match=r"weight_updates lets any client of .*; give api_key, or listen"):
        HttpSettings().check_weight_updates(host)
    HttpSettings(api_key=("k",)).check_weight_updates(host)
    HttpSettings().check_weight_updates("127.0.0.1")


def test_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = []
    monkeypatch.setattr("serve_app.server.serve.serve", asked.append)
    here = Path.cwd()
    flags = ["--weight-updates", "--weight-store", "s", "--weight-folder", "f"]
    assert cli.main(["serve", "m", *flags]) == 0
    (model,) = asked[0].models
    assert model.config.weight_updates
    assert (model.config.weight_store, asked[0].http.weight_folder) == (f"{here}/s", f"{here}/f")
    for argv, says in (
        (["--weight-updates", "--host", "0.0.0.0"], "give --api-key"),
        (["--weight-folder", "f"], "--weight-folder is given"),
        (["--weight-store", "s"], "--weight-store is given"),
    ):
        assert cli.main(["serve", "m", *argv]) != 0
        assert says in capsys.readouterr().err
