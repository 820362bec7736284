"""The whole application while its engines change: frozen, scaled, redeployed with other settings and with another
model, or lost with their node.

One Ray of two nodes and one application serve all cases, in this order. Each disturbed stream is compared with the
undisturbed answer, up to its length when the application has settled.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from actors.ray.placement import FRONT_CPUS
from runtime.base.types import SamplingParams
from runtime.llm import LLM
from tests.support.models.tiny_gguf import write_tiny_gguf

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
    args["kv_tier_memory"] = 0
    limits = {"num_threads": 1, "num_fronts": 1, "drain_timeout_s": 60, **changed}
    # As on a cluster (30 s), a replaced front is still reachable while HAProxy learns of the new one.
    variables = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}
    front = {"num_cpus": FRONT_CPUS, "resources": {HEAD_NODE: 0.001}, "runtime_env": {"env_vars": variables}}
    application = {
        "name": "callboard",
        "import_path": "serve_app.app:build_app",
        "args": args | limits,
        "deployments": [
            {"name": "Engine", "num_replicas": num_replicas},
            # Streams end with the node of their front, so it stays on the node that no test kills.
            {"name": "Front", "ray_actor_options": front},
        ],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))


@pytest.fixture(scope="module")
def second_node(ray_session):
    """A node for one more engine. The session's own has room for two and a front, or for one while it is redeployed."""
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
    from actors.ray.names import engines_of, living_actors

    return living_actors(engines_of("callboard"))


async def served(client: httpx.AsyncClient) -> set[str]:
    """The engines in /metrics, which are the engines that the front is linked to; none unless it is ready."""
    try:
        if (await client.get("/ready")).status_code != 200:
            return set()
        text = (await client.get("/metrics")).text
    except httpx.HTTPError:  # HAProxy lacks a front for a moment
        return set()
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return {line.partition('engine="')[2].partition('"')[0] for line in lines}


async def settle(url: str, num_engines: int, seconds: float = 120, without: str = "") -> None:
    """Wait until the front is ready and is linked to exactly `num_engines` engines."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            found = await served(client)
            living = await asyncio.to_thread(engines)
            if len(found) == len(living) == num_engines and without not in living:
                return
            assert time.monotonic() < end, f"{num_engines} engines were to be served: {found}, living: {living}"
            await asyncio.sleep(0.5)


async def deploy_other(url: str, path: Path) -> None:
    """Serve another model from three engines, in two steps.

    With more replicas and other `args` at once, Serve stops no old replica before the additional ones run. The nodes
    lack room for that."""
    from ray import serve

    for num_replicas in (1, 3):
        deploy(path, num_replicas, max_num_seqs=60)
        end = time.monotonic() + 120
        while (found := serve.status().applications["callboard"]).status != "RUNNING":
            assert time.monotonic() < end, found
            await asyncio.sleep(0.5)
        await settle(url, num_replicas)


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
        """Wait until each stream has `num_characters` more, or has ended."""
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

    from actors.ray.names import NAMESPACE

    for name in engines():
        stats = await ray.get_actor(name, NAMESPACE).stats.remote()
        if stats["running"]:
            return name, stats["pid"]
    raise AssertionError("no engine computes anything")


@pytest.mark.thorough
async def test_a_frozen_engine_process(url, undisturbed):
    async with Reading(url) as reading:
        name, pid = await busy_engine()
        os.kill(pid, signal.SIGSTOP)
        await reading.more(40)
        await settle(url, 2, without=name)
        reading.check(undisturbed)


class Clients:
    """Many clients. Each sends the next request soon after an answer, on the same connection. Nothing is tried
    twice."""

    NUM, MAX_TOKENS, REST_S = 8, 150, 1.0  # the rest leaves cores for engines that start

    def __init__(self, url: str, answers: dict[str, list[str]]) -> None:
        self._url, self._answers = url, answers
        self.answered = Counter[str]()  # by the model that answered

    async def _ask(self, client: httpx.AsyncClient, i: int) -> None:
        body = {"model": MODEL, "prompt": PROMPTS[i], **sampling(i), "max_tokens": self.MAX_TOKENS, "ignore_eos": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        assert line == "", line  # behind the last event
        (model,) = (name for name, texts in self._answers.items() if texts[i] == text)
        self.answered[model] += 1

    async def _keep_asking(self, i: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            while not self._stopping:
                await self._ask(client, i)
                await asyncio.sleep(self.REST_S)

    async def __aenter__(self) -> "Clients":
        self._stopping = False
        self._tasks = [asyncio.create_task(self._keep_asking(i % len(PROMPTS))) for i in range(self.NUM)]
        return self

    async def __aexit__(self, *_) -> None:
        """Running requests end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def get(self, model: str, seconds: float = 60) -> None:
        """Wait until each has had another answer, on average, and none got another model's."""
        end, before = time.monotonic() + seconds, self.answered[model]
        while self.answered[model] < before + self.NUM:
            assert time.monotonic() < end, self.answered
            await asyncio.wait(self._tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                if task.done():
                    task.result()


@pytest.fixture(scope="module")
def other_path(tmp_path_factory) -> Path:
    """As `tiny_path`, with other numbers."""
    path = tmp_path_factory.mktemp("other") / "tiny.gguf"
    return write_tiny_gguf(path, llama__context_length=16384, llama__rope__freq_base=50.0)


@pytest.fixture(scope="module")
def answers(tiny_path, other_path) -> dict[str, list[str]]:
    """Of both models to the clients."""
    texts = {}
    for name, path in (("tiny", tiny_path), ("other", other_path)):
        llm = LLM(str(path), deterministic=True, num_threads=1, kv_cache_memory=0.1)
        limits = {"max_tokens": Clients.MAX_TOKENS, "ignore_eos": True}
        params = [SamplingParams(**sampling(i) | limits) for i in range(len(PROMPTS))]
        texts[name] = [answer.text for answer in llm.generate(PROMPTS, params)]
    assert not set(texts["tiny"]) & set(texts["other"])
    return texts


@pytest.mark.thorough
async def test_updates_interrupt_no_stream(url, undisturbed, answers, tiny_path, other_path):
    """In one life: fewer replicas, other settings, another model, more replicas. Where there is room, new replicas of
    an update start before the old ones stop, also for the only front."""
    async with Reading(url) as reading, Clients(url, answers) as clients:
        await clients.get("tiny")
        deploy(tiny_path, 1)
        await settle(url, 1)
        (before,) = engines()
        deploy(tiny_path, 1, max_num_seqs=60)
        await settle(url, 1, without=before)
        await clients.get("tiny")
        assert set(clients.answered) == {"tiny"}
        await reading.more(40)  # the longest streams have been on each of the engines
        reading.check(undisturbed)
    async with Clients(url, answers) as clients:
        await clients.get("tiny")
        await deploy_other(url, other_path)
        await clients.get("other")


@pytest.mark.thorough
async def test_a_removed_node_interrupts_no_stream(url, answers, other_path, second_node):
    await deploy_other(url, other_path)
    async with Clients(url, answers) as clients:
        await clients.get("other")
        second_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        await clients.get("other")
        await settle(url, 2)
