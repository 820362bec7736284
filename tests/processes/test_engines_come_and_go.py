"""The whole application while its engines change: frozen, scaled in and out, redeployed, gone with their node.

One Ray of two nodes and one application serve all cases, in this order. Of each disturbed stream as much is compared
with the undisturbed answer as there is when everything has settled.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from actors.placement import FRONT_CPUS
from runtime.core.types import SamplingParams
from runtime.llm import LLM

pytestmark = pytest.mark.timeout(280)

MODEL = "tiny"
HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to it
PROMPTS = ["Once upon a time, in a small village by the sea,", "def fibonacci(n):\n"]
MAX_TOKENS = 4000


def sampling(i: int) -> dict[str, Any]:
    """Of a prompt."""
    return {"max_tokens": MAX_TOKENS, "temperature": 0.7 * i, "seed": i}


def deploy(model: Path, num_replicas: int, **changed) -> None:
    """As `serve deploy` does with a file: other `args` are a redeployment, another number of replicas is not."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    args = {"model": str(model), "served_model_name": MODEL, "deterministic": True, "kv_cache_memory": 0.1}
    limits = {"num_threads": 1, "num_fronts": 1, "drain_timeout_s": 60, **changed}
    application = {
        "name": "callboard",
        "import_path": "serve_app.app:build_app",
        "args": args | limits,
        "deployments": [
            {"name": "Engine", "num_replicas": num_replicas},
            # Streams end with the node of their front, so it stays on the one that no test kills.
            {"name": "Front", "ray_actor_options": {"num_cpus": FRONT_CPUS, "resources": {HEAD_NODE: 0.001}}},
        ],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))


@pytest.fixture(scope="module")
def second_node(ray_session):
    """A node for one engine more; the session's own has room for two and a front, or for one while it is redeployed."""
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    params = RayParams(
        gcs_address=ray.get_runtime_context().gcs_address,
        node_ip_address="127.0.0.1",
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100 << 20,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,
    )
    node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    yield node
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
    end = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 1:  # Ray would place actors there until it has noticed
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def url(serve_url, second_node, tiny_path):
    from ray import serve

    deploy(tiny_path, 2)
    yield serve_url
    serve.delete("callboard")


def engines() -> list[str]:
    from actors.names import engines_of, living_actors

    return living_actors(engines_of("callboard"))


async def served(client: httpx.AsyncClient) -> set[str]:
    """The engines that /metrics tells of, which is those that the front is linked to; none unless it is ready."""
    try:
        if (await client.get("/ready")).status_code != 200:
            return set()
        text = (await client.get("/metrics")).text
    except httpx.HTTPError:  # HAProxy knows no front for a moment
        return set()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return {line.partition('engine="')[2].partition('"')[0] for line in lines}


async def settle(url: str, num_engines: int, seconds: float = 120, without: str = "") -> None:
    """Wait until the front is ready, and linked to so many engines, and there are no others."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        while True:
            found = await served(client)
            living = await asyncio.to_thread(engines)
            if len(found) == len(living) == num_engines and without not in living:
                return
            assert time.monotonic() < end, f"{num_engines} engines were to be served: {found}, living: {living}"
            await asyncio.sleep(0.2)


class Reading:
    """Streams of all prompts, read side by side."""

    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.texts = [""] * len(PROMPTS)
        self.done = [False] * len(PROMPTS)

    async def _read(self, i: int) -> None:
        stream = await self._client.completions.create(
            model=MODEL, prompt=PROMPTS[i], **sampling(i), stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            self.texts[i] += chunk.choices[0].text
        self.done[i] = True

    async def __aenter__(self) -> "Reading":
        self._tasks = [asyncio.create_task(self._read(i)) for i in range(len(PROMPTS))]
        await self.more(20)
        return self

    async def __aexit__(self, *_) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    async def more(self, num_characters: int, seconds: float = 60) -> None:
        """Wait until each stream has so much more, or has come to its end."""
        before, end = [len(text) for text in self.texts], time.monotonic() + seconds
        while not all(d or len(t) >= b + num_characters for d, t, b in zip(self.done, self.texts, before, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < end, "a stream stands still"
            await asyncio.sleep(0.02)

    async def all(self) -> list[str]:
        await asyncio.gather(*self._tasks)
        return self.texts

    def check(self, undisturbed: list[str]) -> None:
        for text, whole, done in zip(self.texts, undisturbed, self.done, strict=True):
            assert text == whole[: len(text)]
            assert not done or text == whole


@pytest.fixture(scope="module")
def undisturbed(url, tiny_path) -> list[str]:
    """The answers, computed here while the engines start."""
    llm = LLM(str(tiny_path), deterministic=True, num_threads=1, kv_cache_memory=0.1)
    params = [sampling(i) for i in range(len(PROMPTS))]
    answers = llm.generate(PROMPTS, [SamplingParams(ignore_eos=True, **fields) for fields in params])
    asyncio.run(settle(url, 2))
    return [answer.text for answer in answers]


async def busy_engine() -> tuple[str, int]:
    """The name and process of an engine that computes a stream."""
    import ray

    from actors.names import NAMESPACE

    for name in engines():
        stats = await ray.get_actor(name, NAMESPACE).stats.remote()
        if stats["running"]:
            return name, stats["pid"]
    raise AssertionError("no engine computes anything")


async def test_a_frozen_engine_process(url, undisturbed):
    async with Reading(url) as reading:
        name, pid = await busy_engine()
        os.kill(pid, signal.SIGSTOP)
        frozen_at = time.monotonic()
        await reading.more(40, 8)  # the stream has moved: its engine would be replaced only after ten seconds
        print(f"streams went on {time.monotonic() - frozen_at:.1f} s after the stop")
        await settle(url, 2, without=name)
        reading.check(undisturbed)


async def test_scale_in(url, undisturbed, tiny_path):
    async with Reading(url) as reading:
        deploy(tiny_path, 1)
        await settle(url, 1)
        await reading.more(40)
        reading.check(undisturbed)


async def test_a_redeployment_with_changed_settings(url, undisturbed, tiny_path):
    (before,) = engines()
    async with Reading(url) as reading:
        deploy(tiny_path, 1, max_num_seqs=6)
        await settle(url, 1, without=before)
        await reading.more(40)
        reading.check(undisturbed)


async def test_scale_out_and_a_node_that_goes(url, undisturbed, tiny_path, second_node):
    deploy(tiny_path, 3, max_num_seqs=6)
    await settle(url, 3)
    async with Reading(url) as reading:
        second_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        await reading.more(40, 20)
        await settle(url, 2)
        reading.check(undisturbed)
