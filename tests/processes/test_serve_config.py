"""A changed Serve config replaces only the replicas that use the change. Serve's own scaling counts requests."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.ready import wait_for_model

APP = "words"


def deploy(model: Path, num_rows: int, **scaling: Any) -> None:
    """As `serve deploy` does with a file."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    models = [{"model": str(model), "served_model_name": name} for name in ("a", "b")]
    models[0]["max_num_seqs"] = num_rows
    engine = {
        "deterministic": True,
        "kv_cache_memory": 0.05,
        "kv_tier_memory": 0,
        "num_threads": 1,
        "device": "cpu",
        "min_replicas": 1,
    }
    application = {
        "name": APP,
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "runtime_env": {"env_vars": {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}},  # until HAProxy knows
        "args": {"models": models, "num_fronts": 1, "drain_timeout_s": 600, **engine},
        "deployments": [{"name": "Engine-b", "autoscaling_config": scaling}] if scaling else [],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))


def deployments() -> dict[str, Any]:
    from ray import serve

    found = serve.status().applications[APP]
    assert found.status != "DEPLOY_FAILED", found
    return dict(found.deployments)


def replicas(deployment: str) -> set[str]:
    """Names of its living replicas."""
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return {name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#{deployment}#")}


def num_replicas(deployment: str) -> int:
    """Its replicas in any state; 0 while Serve applies a config."""
    found = deployments().get(deployment)
    return sum(found.replica_states.values()) if found else 0


def is_running() -> bool:
    found = deployments()
    return bool(found) and all(one.status == "HEALTHY" for one in found.values())


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 600  # only a fault reaches it
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.5)


async def keep_asking(url: str, answers: list[str]) -> None:
    """Send model b one request after the other."""
    body = {"model": "b", "prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=None) as http:
        while True:
            answer = await http.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["text"])


async def test_a_change_replaces_only_what_uses_it(serve_url, tiny_path):
    from ray import serve

    deploy(tiny_path, 8)
    await until(is_running, "running")
    await asyncio.to_thread(wait_for_model, serve_url, "b")
    first = {name: replicas(name) for name in ("Engine", "Engine-b")}
    answers: list[str] = []
    clients = [asyncio.create_task(keep_asking(serve_url, answers)) for _ in range(3)]

    async def more_answers() -> None:
        wanted = len(answers) + 4
        await until(lambda: len(answers) >= wanted or any(client.done() for client in clients), "answers")
        assert not any(client.done() for client in clients), [client.result() for client in clients if client.done()]

    await more_answers()
    deploy(tiny_path, 9)
    await until(lambda: replicas("Engine").isdisjoint(first["Engine"]) and is_running(), "another engine of a")
    await more_answers()
    assert replicas("Engine-b") == first["Engine-b"]

    scaling = {"max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0, "look_back_period_s": 1}
    deploy(tiny_path, 9, **scaling, metrics_interval_s=0.5)
    await until(lambda: num_replicas("Engine-b") == 2, "a second engine of b, for which Ray may lack room")
    await more_answers()
    assert first["Engine-b"] <= replicas("Engine-b")
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert len(set(answers)) == 1
    serve.delete(APP)
