"""TRL's client for asynchronous GRPO drives a server, with the requests in tests/data/trl_requests.jsonl.

Each line is a call of TRL 1.16's VLLMClient, its arguments, and the request that it sends. The rollouts of its worker
are one request, ROLLOUT."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from actors.wire.weight_calls import Connect, Finish, GetState, Pause, Receive, Resume, Start
from runtime.base.config import EngineConfig
from runtime.base.weight_version import WeightVersion
from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.http.fake_engine import MODEL, FakeEngine, byte_tokenizer

REQUESTS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "trl_requests.jsonl").open()]
ROLLOUT = {
    "model": MODEL, "prompt": [65, 66], "max_tokens": 2048, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": (1 << 63) - 1,
}  # fmt: skip
UPDATE_CALLS = [GetState, Connect, Pause, Start, Receive, Finish, Resume]


def app_of(engine: FakeEngine, folder: Path, config: EngineConfig | None = None) -> Any:
    service = Service(engine, byte_tokenizer(), MODEL, config=config)
    return build_http_app(service, HttpSettings(lora_folder=str(folder)))


def new_engine() -> FakeEngine:
    return FakeEngine(weights=WeightVersion(), max_model_len=4096, weight_versions=[(0, "1")])


async def test_every_request_of_trl_is_served(tmp_path: Path):
    engine = new_engine()
    answers = {}
    transport = httpx.ASGITransport(app_of(engine, tmp_path, EngineConfig("m", max_loras=6, max_lora_rank=32)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for request in REQUESTS:
            body = {} if request["body"] is None else {"json": request["body"]}
            answer = await client.request(request["method"], request["path"], params=request["query"], **body)
            assert answer.status_code == 200, answer.text
            answers[request["call"]] = answer.json() if answer.text.startswith("{") else answer.text
        rollout = (await client.post("/v1/completions", json=ROLLOUT)).json()["choices"][0]
    assert [*map(type, engine.fake_weights.calls)] == UPDATE_CALLS
    assert answers["get_max_model_len"]["data"][0]["max_model_len"] == 4096
    config = answers["get_server_info"]["vllm_config"]
    assert config["model_config"] == {"model": MODEL, "dtype": "torch.float32", "max_model_len": 4096}
    assert config["lora_config"] == {"max_lora_rank": 32, "max_loras": 6}
    assert config["parallel_config"] == {"tensor_parallel_size": 1, "data_parallel_size": 1, "world_size": 1}
    assert answers["get_world_size"] == {"world_size": 2}
    assert rollout["token_ids"] == engine.script
    assert len(rollout["logprobs"]["token_logprobs"]) == len(engine.script)
    assert rollout["weight_versions"] == [{"version": "1", "start": 0, "end": len(engine.script)}]


@asynccontextmanager
async def recording_server(app: Any) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of a server on a socket, and the requests that it has received."""
    seen: list[dict[str, Any]] = []

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def read() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        await app(scope, read, send)
        query = dict(httpx.QueryParams(scope["query_string"].decode()))
        content = json.loads(body) if body else None
        seen.append({"method": scope["method"], "path": scope["path"], "query": query, "body": content})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(recorded, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        server.should_exit = True
        await running


@pytest.mark.long
async def test_trls_own_client_sends_these_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    reason = "TRL is not installed; pip install 'trl>=1.16'"
    client_module = pytest.importorskip("trl.experimental.async_grpo.vllm_client", reason=reason)
    accelerate = pytest.importorskip("accelerate")
    engine = new_engine()
    async with recording_server(app_of(engine, tmp_path)) as (url, seen):

        def drive() -> dict[str, Any]:
            accelerate.PartialState(cpu=True)  # TRL's logger wants it
            client = client_module.VLLMClient(url)
            return {each["call"]: getattr(client, each["call"])(*each["arguments"]) for each in REQUESTS}

        answers = await asyncio.to_thread(drive)
    sent = [{name: each[name] for name in ("method", "path", "query", "body")} for each in REQUESTS]
    assert seen == sent
    assert answers["get_dtype"] == "torch.float32"
    assert answers["get_world_size"] == 2
    assert answers["get_max_model_len"] == 4096
    assert [*map(type, engine.fake_weights.calls)] == UPDATE_CALLS
    assert (engine.fake_weights.version.serial, engine.fake_weights.is_paused) == (1, False)
