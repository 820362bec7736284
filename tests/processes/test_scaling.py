"""The engines of an application scale with its load: none, one, two, one, none, and one again for a request."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "tiny"
PROMPTS = ["Once upon a time, in a small village by the sea,", "def fibonacci(n):\n"]
MAX_TOKENS = 16_000  # a stream is stopped long before
ROWS = 4  # of each engine


def sampling(prompt: int) -> dict[str, Any]:
    return {"temperature": 0.7 * prompt, "seed": 1}


def deploy(model: Path) -> None:
    """As `serve deploy` does with a file."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    engine = {
        "model": str(model),
        "deterministic": True,
        "kv_cache_memory": 0.1,
        "kv_tier_memory": 0,
        "num_threads": 1,
        "max_num_seqs": ROWS,
    }
    scaling = {"max_replicas": 2, "scale_in_delay_s": 1.0, "idle_sleep": "2s"}
    args = {"served_model_name": MODEL, "num_fronts": 1, "max_num_seqs": ROWS, **engine, **scaling}
    application = {"name": "callboard", "import_path": "serve_app.app:build_app", "args": args}
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))


@pytest.fixture(scope="module")
def url(serve_url, tiny_path):
    from ray import serve

    deploy(tiny_path)
    yield serve_url
    serve.delete("callboard")


def engines() -> list[str]:
    from actors.ray.names import engines_of, living_actors

    return living_actors(engines_of("callboard"))


async def is_ready(url: str, phase: str = "") -> bool:
    """True if the front reports that it is ready, in this phase."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        try:
            ready = await client.get("/ready")
        except httpx.HTTPError:  # HAProxy lacks a front so far
            return False
        if ready.status_code != 200:
            return False
        assert (await client.get("/health")).status_code == 200
        return phase in ready.text


async def until(condition, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.2)


async def there_are(count: int) -> bool:
    return len(await asyncio.to_thread(engines)) == count


class Reader:
    """One stream of a prompt, read in the background until it is closed."""

    def __init__(self, url: str, prompt: int) -> None:
        self._url, self.prompt, self.text, self.first_at = url, prompt, "", 0.0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = {"prompt": PROMPTS[self.prompt], **sampling(self.prompt), "max_tokens": MAX_TOKENS, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.first_at = self.first_at or time.monotonic()
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    async def more(self, num_characters: int = 40) -> None:
        wanted = len(self.text) + num_characters

        async def has_more() -> bool:
            if self.task.done():
                self.task.result()
                raise AssertionError("the stream has ended")
            return len(self.text) >= wanted

        await until(has_more, "more text of a stream")

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def ask(name: str, what: str) -> Any:
    """The answer of an engine, or None while it is starting."""
    import ray

    from actors.ray.names import NAMESPACE

    try:
        return await ray.get_actor(name, NAMESPACE).__getattr__(what).remote()
    except (ValueError, ray.exceptions.RayError):
        return None


@pytest.mark.thorough
async def test_engines_scale_with_the_load(url, tiny_path):
    began = time.monotonic()
    say = lambda what: print(f"{time.monotonic() - began:5.1f} s  {what}")  # noqa: E731
    await until(lambda: is_ready(url), "ready, with the engine that the front has asked for")
    say("ready")
    readers = [Reader(url, i % 2) for i in range(ROWS)]
    await until(lambda: there_are(2), "a second engine")
    say("a second engine starts")
    second = (await asyncio.to_thread(engines))[1]

    async def is_shared() -> bool:
        figures = await ask(second, "figures")
        if figures is not None and not figures.num_live:  # it has loaded its model
            readers.append(Reader(url, len(readers) % 2))
            await readers[-1].more()
        return figures is not None and figures.num_live > 0

    await until(is_shared, "a stream on the second engine")
    say(f"it serves the last of {len(readers)} streams")
    for reader in readers[:-1]:
        await reader.close()
    kept = readers[-1], Reader(url, 1)
    await kept[1].more()
    await until(lambda: there_are(1), "an engine that goes")
    say("one engine has gone, and moved its stream")
    for reader in kept:
        await reader.more()
        await reader.close()
    await until(lambda: is_ready(url, "scaled to zero"), "no engine")
    say("no engine is left")
    last, asked_at = Reader(url, 0), time.monotonic()

    async def is_loaded() -> bool:
        names = await asyncio.to_thread(engines)
        return bool(names) and await ask(names[0], "figures") is not None

    await until(is_loaded, "an engine for the request")
    ready_at = time.monotonic()
    await last.more(1)
    say(f"ready {ready_at - asked_at:.2f} s after the request, the first token {last.first_at - ready_at:+.2f} s later")
    assert last.first_at - ready_at < 60  # quiet, it is a tenth of a second
    undisturbed = {0: last, 1: Reader(url, 1)}
    for reader in kept:
        whole = undisturbed[reader.prompt]
        await whole.more(max(1, len(reader.text) - len(whole.text)))
        assert reader.text == whole.text[: len(reader.text)]
        say(f"compared {len(reader.text)} characters")
    for reader in undisturbed.values():
        await reader.close()
