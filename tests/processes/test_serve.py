"""The whole server: Serve, HTTP, engine and runners as real processes. Kills are tested in test_faults.py."""

import asyncio
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.tools.replay import replay
from tests.support.processes.ready import wait_for_model

MODEL = "tiny"
MAX_TOKENS = 500  # of a stream: long enough to have all in progress at once
ROOT = Path(__file__).parents[2]
PROMPTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colors are",
    "My favourite recipe begins with",
    "The capital of France is",
    "In the year 2050, people will",
    "Dear Sir or Madam,\n",
    "1, 2, 3, 4, 5,",
]


@pytest.fixture(scope="module")
def url(serve_url, tiny_path):
    """The application as `serve run` builds it, in deterministic mode so that tokens can be compared exactly."""
    import ray
    from ray import serve

    from callboard.app import AppArgs, build_app

    args = AppArgs(
        model=str(tiny_path),
        served_model_name=MODEL,
        deterministic=True,
        max_num_seqs=8,
        kv_cache_memory=0.2,
        kv_tier_memory=0,
        num_fronts=2,
    )
    serve.run(build_app(args), name="callboard")
    wait_for_model(serve_url, MODEL)
    yield serve_url
    serve.delete("callboard")
    assert ray.is_initialized()


def engine():
    from actors.ray.directory import find_engines
    from actors.ray.names import engines_of

    return find_engines(engines_of("callboard"))[-1]


def stats():
    import ray

    return ray.get(engine().stats.remote())


def test_an_unwritable_log_blocks_no_replica(url):
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [ray.get_actor(name, "serve") for name in names if name.startswith("SERVE_REPLICA::callboard#")]
    reports = [replica.__ray_call__.remote(lambda _: logging.raiseExceptions) for replica in replicas]
    assert ray.get(reports) == [False] * 3


def test_metrics_cover_all_fronts_and_the_engine(url):
    def scrape():
        text = httpx.get(f"{url}/metrics").text
        families = text_string_to_metric_families(text)
        return {s.name + s.labels.get("finished_reason", ""): s.value for f in families for s in f.samples}

    before = scrape()
    body = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:  # connections of their own: both fronts get some
        answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/completions", json=body), range(16)))
    assert {answer.status_code for answer in answers} == {200}
    time.sleep(1.2)  # the other front reports once a second
    after = scrape()
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new["vllm:request_success_totallength"] == new["vllm:e2e_request_latency_seconds_count"] == 16
    assert new["vllm:prompt_tokens_total"] == new["vllm:request_prompt_tokens_sum"] == 16 * 5
    assert new["vllm:generation_tokens_total"] == new["vllm:request_generation_tokens_sum"] == 16 * 6
    assert new["vllm:inter_token_latency_seconds_count"] == 16 * 5
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0


def test_every_front_finds_a_response(url):
    def ask(method: str, path: str = "", **body):
        """On a connection of its own, which may be either front's."""
        return httpx.request(method, f"{url}/v1/responses{path}", json=body or None, timeout=60)

    def front_of(response) -> str:
        return response["id"].split("_")[1]

    def create(until, **body):
        """A response with the id of a suitable front."""
        for _ in range(100):
            answer = ask("POST", input="Once", max_output_tokens=4, **body)
            assert answer.status_code == 200, answer.text
            if until(front_of(answer.json())):
                return answer.json()
        raise AssertionError("all requests go to one front")

    first = create(lambda front: True)
    mine, name = front_of(first), first["id"]
    second = create(lambda front: front != mine, previous_response_id=name)
    contents = [item["content"] for item in ask("GET", f"/{second['id']}/input_items?order=asc").json()["data"]]
    assert [content[0]["text"] for content in contents] == ["Once", first["output"][0]["content"][0]["text"], "Once"]
    assert {ask("GET", f"/{name}").text for _ in range(6)} == {ask("GET", f"/{name}").text}

    long = {"background": True, "extra": 1, "input": "Once", "ignore_eos": True}
    running = [ask("POST", max_output_tokens=5000, **long).json() for _ in range(2)]
    assert [ask("POST", f"/{r['id']}/cancel").json()["status"] for r in running] == ["cancelled"] * 2
    streamed = ask("POST", max_output_tokens=40, stream=True, **long)
    numbers = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    made = json.loads(numbers[0].removeprefix("data: "))["response"]["id"]
    for _ in range(4):
        tail = ask("GET", f"/{made}?stream=true&starting_after=2").text
        assert [line for line in tail.splitlines() if line.startswith("data: ")] == numbers[3:]
    assert ask("DELETE", f"/{name}").json()["deleted"]
    for missing, says in ((name, "stored"), (name.replace(mine, "gone"), "has ended")):
        for _ in range(4):
            answer = ask("GET", f"/{missing}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
            assert says in answer.json()["error"]["message"]


DONE = 1 << 30


async def read_all(url, counts):
    """The texts of all prompts; `counts` holds how many chunks of each have arrived, or that it is done."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def one(i):
        text = ""
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPTS[i], max_tokens=MAX_TOKENS, temperature=0.7 * (i % 2), seed=i, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].text
            counts[i] += 1
        counts[i] = DONE
        return text

    async with client:
        return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))


@pytest.fixture(scope="module")
def undisturbed(url):
    return asyncio.run(read_all(url, [0] * 8))


async def test_streams_go_through_both_fronts(url, undisturbed):
    """HAProxy spreads connections over the fronts; each front has a link of its own to the engine."""
    counts = [0] * 8
    reading = asyncio.create_task(read_all(url, counts))
    while min(counts) < 2:
        await asyncio.sleep(0.01)
    shares = (await asyncio.to_thread(stats))["streams"]
    assert len(shares) == 2
    assert min(shares) >= 2
    assert await reading == undisturbed


async def test_a_client_that_leaves_frees_the_engine(url):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    stream = await client.completions.create(
        model=MODEL, prompt="Once", max_tokens=16_000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    assert (await asyncio.to_thread(stats))["running"] == 1
    await stream.close()
    await client.close()
    end = time.monotonic() + 10.0  # the request itself would take longer: a step takes a millisecond and more
    while (await asyncio.to_thread(stats))["running"]:
        assert time.monotonic() < end, "the request was not aborted"
        await asyncio.sleep(0.02)


def test_a_replay_gets_the_same_tokens(url, capsys):
    """The replay is the same from any front, and with any other work beside it."""
    body = {"prompt": "Once", "n": 2, "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/completions", json=body).json(), range(4)))
    assert len({choice["text"] for answer in answers for choice in answer["choices"]}) == 8
    for answer in answers[:2]:
        assert replay(answer["id"], url, None, None) == 0, capsys.readouterr().out


@pytest.mark.parametrize("by_reference", [True, False])  # Serve's default transport, and that of FAST_SERVE
async def test_handle_ends_with_its_caller(url, by_reference):
    import ray
    from ray import serve

    @ray.remote(num_cpus=0)
    class Caller:
        """Gets a whole answer, and the first chunk of an endless one."""

        def call(self) -> tuple[dict, dict]:
            handle = serve.get_app_handle("callboard").options(_by_reference=by_reference)
            body = {"prompt": "Once", "ignore_eos": True}
            whole = handle.completions.remote({**body, "max_tokens": 8}).result()
            endless = {**body, "max_tokens": 16_000}
            self.answers = [handle.completions.remote(endless), handle.options(stream=True).generate.remote(endless)]
            self.answers.append(handle.options(stream=True).completions.remote({**endless, "stream": True}))
            return whole, next(iter(self.answers[-1]))

    caller = Caller.remote()
    whole, chunk = await caller.call.remote()
    assert whole["usage"]["completion_tokens"] == 8
    assert chunk["choices"][0]["text"]
    while (await asyncio.to_thread(stats))["running"] < 3:
        await asyncio.sleep(0.02)
    ray.kill(caller)
    end = time.monotonic() + 10.0
    while (await asyncio.to_thread(stats))["running"]:
        assert time.monotonic() < end, "the requests of a dead caller run on"
        await asyncio.sleep(0.1)


async def test_deleting_the_application_lets_streams_finish(url):
    """As a redeployment does with the old replicas. The last test: the application is gone after it."""
    from ray import serve

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(
        model=MODEL, prompt="Once", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = aiter(stream)
    await anext(chunks)
    await asyncio.to_thread(serve.delete, "callboard", _blocking=False)
    more = [chunk async for chunk in chunks]
    assert len(more) > 100, "it was nearly done before the application was deleted"
    assert more[-1].choices[0].finish_reason == "length"
    end = time.monotonic() + 60
    while "callboard" in (await asyncio.to_thread(serve.status)).applications:
        assert time.monotonic() < end, "an application without requests must not wait for the drain's timeout"
        await asyncio.sleep(0.1)
