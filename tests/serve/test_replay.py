"""Every answer names its seed; sent back, it gives the same answer, and `callboard replay` shows it."""

import gc
import hashlib
import json
import re
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import openai
import pytest
from starlette.testclient import TestClient

from runtime.base.types import CallboardError, Request
from runtime.output.processor import Delta
from serve_app import cli
from serve_app.apis.chat.endpoint import CHAT
from serve_app.application import build_http_app
from serve_app.service.recorded import RecordedRequests
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from serve_app.tools.replay import replay
from tests.support.http.fake_engine import EOS, MODEL, FakeEngine, byte_tokenizer, chat, client_of

URL = "http://test"


class Seeded(FakeEngine):
    """Writes a text that follows from the seed, and from `salt`."""

    salt = 0

    def _outputs(self, request: Request):
        self.script = [*hashlib.sha256(b"%d%d" % (request.seed, self.salt)).hexdigest()[:9].encode(), EOS]
        yield from super()._outputs(request)


@pytest.fixture
def engine() -> Seeded:
    return Seeded()


@pytest.fixture
def server(engine: Seeded, monkeypatch) -> TestClient:
    settings = HttpSettings(api_key=("one", "two"), recorded_request_bytes=5_000)
    app = build_http_app(Service(engine, byte_tokenizer(), MODEL), settings)
    client = TestClient(app, base_url=URL, headers={"authorization": "Bearer one"})
    monkeypatch.setattr(
        "serve_app.tools.replay.httpx.request", lambda *args, timeout, **more: client.request(*args, **more)
    )
    return client


ASKED = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "a"], "n": 2, "logprobs": 1, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "seed": -3}),
    ("/v1/chat/completions", chat(n=2, stream=True)),
    ("/v1/responses", {"input": "hi", "store": False, "stream": True}),
    ("/v1/messages", {"messages": chat()["messages"], "max_tokens": 20}),
    ("/api/chat", {"model": MODEL, "messages": chat()["messages"]}),
    ("/completion", {"prompt": "a", "stream": True}),
    ("/completion", {"prompt": "a", "response_fields": ["content", "seed", "id", "system_fingerprint"]}),
    ("/api/generate", {"model": MODEL, "prompt": "a", "stream": False, "options": {"seed": 3}}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_an_answer_is_drawn_again(server: TestClient, engine: Seeded, path: str, body: dict, capsys, tmp_path: Path):
    response = server.post(path, json={**body, "request_id": "mine"})
    assert response.headers["x-callboard-system-fingerprint"] == "fp_f"
    seeds = {request.seed for request in engine.requests}
    if "seed" not in body:
        assert all(0 <= seed < 1 << 53 for seed in seeds)
    if not isinstance(body.get("prompt"), list):
        assert int(response.headers["x-callboard-seed"]) in seeds
        assert f'"seed":{response.headers["x-callboard-seed"]}' in response.text or path == "/v1/messages"
    first = [(r.seed, r.token_ids) for r in engine.requests]

    file = str(tmp_path / "exchange.json")
    name = re.search('"id":"([^"]*)"', response.text)[1] if path == "/v1/responses" else "mine"
    assert cli.main(["replay", name, "--url", URL, "--api-key", "one", "--save", file]) == 0
    assert [(r.seed, r.token_ids) for r in engine.requests[len(first) :]] == first
    told = capsys.readouterr().out
    assert "the same, to the bit" in told
    assert re.search(r": [0-9]+ tokens in [1-9] parts\n", told)
    assert cli.main(["replay", file, "--url", URL, "--api-key", "one"]) == 0
    engine.salt = 1
    assert cli.main(["replay", file, "--url", URL, "--api-key", "one"]) == 1
    assert "was" in capsys.readouterr().out.splitlines()[-2]


def test_one_seed_for_each_prompt(server: TestClient):
    """Equal prompts without a seed get different answers. They can be replayed together or one by one."""
    first = server.post("/v1/completions", json={"prompt": ["a", "a"], "n": 2}).json()["choices"]
    assert len({choice["text"] for choice in first}) == 4
    seeds = [first[0]["seed"], first[2]["seed"]]
    assert server.post("/v1/completions", json={"prompt": ["a", "a"], "n": 2, "seed": seeds}).json()["choices"] == first
    for choice in first:
        alone = server.post("/v1/completions", json={"prompt": "a", "seed": choice["seed"]}).json()["choices"][0]
        assert alone == choice | {"index": 0}
    refused = server.post("/v1/completions", json={"prompt": "a", "seed": seeds})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seed")


def test_requests_that_cannot_be_replayed_are_reported(server: TestClient, tmp_path: Path):
    server.post("/v1/completions", json={"prompt": "a", "request_id": "mine"})
    for source, key, says in (("mine", "two", "no front"), ("mine", None, "API key"), ("other", "one", "no front")):
        server.headers.pop("authorization", None)
        with pytest.raises(CallboardError, match=says):
            replay(source, URL, key, None)
    server.headers["authorization"] = "Bearer one"
    for i in range(9):  # more than fits
        server.post("/v1/completions", json={"prompt": "a" * 100 * (i % 2), "request_id": f"{i}"})
    assert server.get("/v1/requests/mine").status_code == 404
    assert server.get("/v1/requests/cmpl-8").status_code == 404  # refused: no prompt
    assert server.get("/v1/requests/cmpl-7").json()["choices"][0]["finish_reason"] == "stop"
    file = tmp_path / "x.json"
    for text in ("no JSON", json.dumps({"request": {}}), json.dumps({"request": {}, "answer": {"object": "x"}})):
        file.write_text(text)
        with pytest.raises(CallboardError, match="must hold a JSON object with a request and its answer"):
            replay(str(file), URL, "one", None)


def test_ids_of_two_keys_do_not_replace_each_other(server: TestClient):
    for key, prompt in (("one", "a"), ("two", "b")):
        headers = {"authorization": f"Bearer {key}", "x-request-id": "same"}
        assert server.post("/v1/completions", json={"prompt": prompt}, headers=headers).status_code == 200
    for key, prompt in (("one", "a"), ("two", "b")):
        found = server.get("/v1/requests/same", headers={"authorization": f"Bearer {key}"})
        assert (found.status_code, found.json()["request"]["prompt"]) == (200, prompt)


@pytest.mark.parametrize("running", [False, True])
def test_recorded_requests_count_their_memory(running: bool):
    service, most = Service(FakeEngine(max_model_len=100_000), byte_tokenizer(), MODEL), 400_000
    messages = [{"role": "user", "content": "a"}] * 200
    bodies = [json.dumps({"messages": messages, "n": 4, "user": f"{i}"}).encode() for i in range(60)]
    service.prepare(CHAT, CHAT.read(bodies[0]))
    recorded, going = RecordedRequests(most, []), []
    gc.collect()
    tracemalloc.start()
    for i in range(len(bodies)):
        body = bytes(bytearray(bodies[i]))  # a copy that only the record holds
        prepared = recorded.begin(service.prepare(CHAT, CHAT.read(body), f"{i}"), CHAT.path, body)
        for _ in range(300):
            prepared.on_delta(Delta(0, token_ids=[1] * 10, finish_reason=None))
        if running:
            going.append(prepared.on_delta)
    del prepared, body
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert recorded._num_bytes <= most
    assert len(recorded._kept) > 5
    assert held < 1.3 * most + 100_000


def test_file_cannot_lead_to_another_host(tmp_path: Path, monkeypatch):
    """The client's API key would go there."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"path": "@127.0.0.2:9/", "seed": 1, "request": {}, "answer": {}}))
    monkeypatch.setattr("serve_app.tools.replay.httpx.request", Mock(side_effect=AssertionError("it was sent")))
    with pytest.raises(CallboardError, match=r"has the path '@127\.0\.0\.2:9/'; it must be one of /v1/completions"):
        replay(str(file), URL, "one", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_reads_the_seed(stream: bool):
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=client_of(Seeded()), max_retries=0)
    made = await client.chat.completions.create(**chat(), stream=stream)
    last = [chunk async for chunk in made][-1] if stream else made
    again = await client.chat.completions.create(**chat(), seed=last.choices[0].seed)
    assert (again.choices[0].seed, again.system_fingerprint) == (last.choices[0].seed, last.system_fingerprint)
