"""Several models of one `callboard serve`, which sleep when they are idle or when another one needs their memory."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.serve_command import START_S, Server

ONE_MODEL = 700_000_000  # bytes of memory for Ray: more than one of the models needs, and less than two


@pytest.fixture
def client(start: Callable[..., Server], tiny_path: Path, tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    clients = []

    def serving(*flags: str, **environment: str) -> httpx.Client:
        models = [{"served_model_name": name, "model": str(tiny_path)} for name in ("a", "b")]
        (tmp_path / "models.yaml").write_text(json.dumps({"models": models, "kv_cache_memory": 0.05}))
        server = start(*flags, words=["--config", str(tmp_path / "models.yaml")], **environment)
        server.wait_for("curl -N")
        clients.append(httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=START_S))
        return clients[-1]

    yield serving
    for each in clients:
        each.close()


def tokens(client: httpx.Client, model: str) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": "hello", "max_tokens": 16, "temperature": 0}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def loaded(client: httpx.Client) -> set[str]:
    return {model["name"] for model in client.get("/api/ps").json()["models"]}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_idle_models_sleep_and_wake_up(client):
    http = client("--idle-sleep", "1s")
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "b"]
    expected = tokens(http, "a")
    until(lambda: "b" not in loaded(http) and "a" not in loaded(http))
    assert tokens(http, "b") == expected  # the same file
    assert tokens(http, "a") == expected
    http.post("/api/generate", json={"model": "a", "keep_alive": -1})
    until(lambda: loaded(http) == {"a"})
    http.post("/api/generate", json={"model": "a", "keep_alive": 0})
    asleep = "scaled to zero; the next request starts an engine"
    until(lambda: http.get("/ready").json().get("phases") == {"a": asleep, "b": asleep})
    assert not loaded(http)


def test_models_swap_if_memory_is_short(client):
    http = client(RAY_OVERRIDE_RESOURCES=json.dumps({"memory": ONE_MODEL}))
    expected = tokens(http, "a")
    for name, other in ("ba", "ab"):
        assert loaded(http) == {other}
        assert tokens(http, name) == expected
        assert loaded(http) == {name}


@pytest.mark.rotated
def test_a_model_that_never_fits_is_refused(start: Callable[..., Server], tiny_path: Path):
    server = start("--idle-sleep", "1m", RAY_OVERRIDE_RESOURCES=json.dumps({"memory": 540_000_000}))
    assert server.wait(START_S) == 1
    assert server.output()[-1].startswith("callboard: tiny cannot be served: Too little memory; lower --")
    assert server.output()[-1].endswith("GiB are missing.")
