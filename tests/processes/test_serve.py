"""The whole server: Serve, HTTP, engine and runners as real processes with the real model, and kills in mid-stream."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(240)

MODEL = "smollm2"
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
def url(serve_url):
    """The application as `serve run` builds it, in deterministic mode so that tokens can be compared exactly."""
    import ray
    from ray import serve

    from serve_app.app import AppArgs, build_app

    args = AppArgs(
        served_model_name=MODEL,
        deterministic=True,
        max_num_seqs=8,
        kv_cache_memory=0.2,
        max_model_len=1024,
        num_fronts=2,
    )
    serve.run(build_app(args), name="callboard")
    yield serve_url
    serve.delete("callboard")
    assert ray.is_initialized()


def engine():
    from actors.directory import find_engines
    from actors.names import engines_of

    return find_engines(engines_of("callboard"))[-1]


def stats():
    import ray

    return ray.get(engine().stats.remote())


def test_the_openai_client_reads_plain_and_streamed_answers(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == [MODEL]
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    plain = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    assert plain.choices[0].message.content == "The capital of France is Paris."
    assert plain.choices[0].finish_reason == "stop"
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (42, 8)
    chunks = list(client.chat.completions.create(model=MODEL, messages=question, temperature=0, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The capital of France is Paris."
    whole = client.completions.create(model=MODEL, prompt=PROMPTS[1], max_tokens=40, temperature=0.8, seed=3)
    parts = client.completions.create(
        model=MODEL, prompt=PROMPTS[1], max_tokens=40, temperature=0.8, seed=3, stream=True
    )
    assert "".join(c.choices[0].text for c in parts) == whole.choices[0].text
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt=[5] * 2000)


def test_metrics_tell_of_all_fronts_and_the_engine(url):
    def scrape():
        text = httpx.get(f"{url}/metrics").text
        families = text_string_to_metric_families(text)
        return {s.name + s.labels.get("finished_reason", ""): s.value for f in families for s in f.samples}

    before = scrape()
    body = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:  # connections of their own: both fronts get some
        answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/completions", json=body), range(16)))
    assert {answer.status_code for answer in answers} == {200}
    time.sleep(1.2)  # the front that is not asked reports once a second
    after = scrape()
    new = {name: after[name] - before[name] for name in after}
    assert new["vllm:request_success_totallength"] == new["vllm:e2e_request_latency_seconds_count"] == 16
    assert new["vllm:prompt_tokens_total"] == new["vllm:request_prompt_tokens_sum"] == 16 * 5
    assert new["vllm:generation_tokens_total"] == new["vllm:request_generation_tokens_sum"] == 16 * 6
    assert new["vllm:inter_token_latency_seconds_count"] == 16 * 5
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0


class Person(BaseModel):
    name: str
    age: int


def test_structured_answers_fit_their_schema(url):
    """Extraction with OpenAI's client: plain, streamed, and as a pydantic model."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = "John is 30 years old. Give the person's name and age as JSON."
    body = {"model": MODEL, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 60}
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    plain = client.chat.completions.create(**body, response_format=form)
    assert json.loads(plain.choices[0].message.content) == {"name": "John", "age": 30}
    assert plain.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**body, response_format=form, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    parsed = client.chat.completions.parse(**body, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="John", age=30)
    cut = client.chat.completions.create(**body, response_format=form, stop=[","], logprobs=True)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ('{"name": "John"', "stop")
    assert "".join(entry.token for entry in cut.choices[0].logprobs.content).startswith('{"name": "John"')
    many = client.chat.completions.create(**body | {"temperature": 1.5}, response_format=form, n=8, seed=1)
    ended = [c.message.content for c in many.choices if c.finish_reason == "stop"]
    assert ended
    for text in ended:
        Person.model_validate_json(text)
    with pytest.raises(openai.BadRequestError, match="contains"):
        client.chat.completions.create(
            **body, response_format={"type": "json_schema", "schema": {"contains": {"type": "string"}}}
        )


async def read_all(url, counts):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def one(i):
        text = ""
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPTS[i], max_tokens=64, temperature=0.7 * (i % 2), seed=i, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].text
            counts[i] += 1
        return text

    async with client:
        return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))


async def watch_health(url, seen):
    async with httpx.AsyncClient() as client:
        while True:
            answer = await client.get(f"{url}/health")
            seen.append((answer.status_code, answer.text))
            await asyncio.sleep(0.05)


def pid_of(victim):
    import ray

    if victim == "runner":
        (actor,) = ray.get(engine().__ray_call__.remote(lambda engine: engine.runners.runners))
    elif victim == "engine":
        actor = engine()
    else:
        (name,) = (a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#Engine#" in a["name"])
        actor = ray.get_actor(name, "serve")
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


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


@pytest.mark.parametrize("victim", ["runner", "engine", "supervisor"])
async def test_a_kill_in_mid_stream_changes_no_text(url, undisturbed, victim):
    counts, seen = [0] * 8, []
    watch = asyncio.create_task(watch_health(url, seen))
    reading = asyncio.create_task(read_all(url, counts))
    while min(counts) < 6:
        await asyncio.sleep(0.01)
        assert not reading.done(), await reading
    pid = await asyncio.to_thread(pid_of, victim)
    assert min(64 - c for c in counts) > 5, "the kill must come in mid-stream"
    os.kill(pid, signal.SIGKILL)
    assert await reading == undisturbed
    await asyncio.sleep(0.2)
    watch.cancel()
    assert {200, 503} == {status for status, _ in seen}
    assert seen[-1][0] == 200
    assert all("restart" in text or "engine" in text for status, text in seen if status == 503)


async def test_a_client_that_leaves_frees_the_engine(url):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    stream = await client.completions.create(
        model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    assert (await asyncio.to_thread(stats))["running"] == 1
    await stream.close()
    await client.close()
    end = time.monotonic() + 1.0
    while (await asyncio.to_thread(stats))["running"]:
        assert time.monotonic() < end, "the request was not aborted within a second"
        await asyncio.sleep(0.02)


def test_another_ray_job_streams_through_the_handle(url):
    import ray

    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "docs" / "handle_call.py"),
            "What is the capital of France? Answer in one sentence.",
        ],
        env=os.environ
        | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "The capital of France is Paris.", done.stderr


async def test_deleting_the_application_lets_streams_finish(url):
    """As a redeployment does with the old replicas. The last test: the application is gone after it."""
    from ray import serve

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(
        model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = aiter(stream)
    await anext(chunks)
    await asyncio.to_thread(serve.delete, "callboard", _blocking=False)
    more = [chunk async for chunk in chunks]
    assert len(more) > 100, "it was nearly done before the application was deleted"
    assert more[-1].choices[0].finish_reason == "length"
    end = time.monotonic() + 20
    while "callboard" in (await asyncio.to_thread(serve.status)).applications:
        assert time.monotonic() < end, "an application without requests must not wait for the drain's timeout"
        await asyncio.sleep(0.1)
