"""A changed Serve config replaces only the replicas that use the change. Serve's own scaling counts requests."""

from pathlib import Path
from typing import Any

from tests.support.processes.reader import Reader, until

APP = "words"
PREFIX = "/words"


def deploy(model: Path, num_rows: int, **scaling: Any) -> None:
    """As `serve deploy` does with a file."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    models = [{"model": str(model), "served_model_name": name} for name in ("a", "b")]
    models[0]["max_num_seqs"] = num_rows
    engine = {"deterministic": True, "kv_cache_memory": 0.05, "num_threads": 1, "device": "cpu", "min_replicas": 1}
    application = {
        "name": APP,
        "route_prefix": PREFIX,
        "import_path": "serve_app.app:build_app",
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


def is_running() -> bool:
    found = deployments()
    return bool(found) and all(one.status == "HEALTHY" for one in found.values())


async def test_a_change_replaces_only_what_uses_it(serve_url, tiny_path):
    from ray import serve

    async def runs() -> bool:
        return is_running()

    deploy(tiny_path, 8)
    await until(runs, "running")
    engines = {name: replicas(name) for name in ("Engine", "Engine-b")}
    readers = [Reader(serve_url + PREFIX, i % 2, "b") for i in range(3)]
    for reader in readers:
        await reader.more()

    deploy(tiny_path, 9)

    async def is_replaced() -> bool:
        return replicas("Engine").isdisjoint(engines["Engine"]) and is_running()

    await until(is_replaced, "another engine of a")
    assert replicas("Engine-b") == engines["Engine-b"]
    for reader in readers:  # their front leaves, too, when they have ended
        await reader.more()

    scaling = {"max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0, "look_back_period_s": 1}
    deploy(tiny_path, 9, **scaling, metrics_interval_s=0.5)

    async def grows() -> bool:
        return sum(deployments()["Engine-b"].replica_states.values()) == 2

    await until(grows, "a second engine of b, as Serve counts three requests")
    assert engines["Engine-b"] < replicas("Engine-b") | engines["Engine-b"]
    whole = Reader(serve_url + PREFIX, 0, "b")
    await whole.more(len(readers[0].text))
    assert readers[0].text == whole.text[: len(readers[0].text)]
    for reader in [*readers, whole]:
        await reader.close()
    serve.delete(APP)
