"""Lines of batches share the places of a front by API keys, and are asked again until their answers are whole."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runtime.base.model.pooling import Pooling
from runtime.base.types import FinishReason
from serve_app.apis.batches import worker as batches_module
from serve_app.apis.batches.places import Places
from serve_app.apis.batches.worker import _is_aborted
from tests.serve.test_batches import short_waits
from tests.support.engine.links import eventually
from tests.support.http.batches import COMPLETIONS, CountingEngine, created, ended, front, line, lines, results
from tests.support.http.fake_engine import FakeEngine

__all__ = ["short_waits"]  # a fixture of every test here


class HangingEngine(CountingEngine):
    """A request with min_tokens 1 never ends."""

    async def generate(self, request, on_engine=None):
        if request.params.min_tokens:
            self.requests.append(request)
            await asyncio.Event().wait()
        async for output in super().generate(request, on_engine):
            yield output


class AbortingEngine(FakeEngine):
    """Aborts the first answers, as a pause does."""

    num_aborts = 4

    def _outputs(self, request):
        self.fails_after = 2 if self.num_aborts > 0 else None
        self.failure = FinishReason.ABORT, "A pause of the server ended this request; send it again."
        self.num_aborts -= 1
        yield from super()._outputs(request)


async def test_requests_without_an_end_delay_no_other_key(tmp_path: Path):
    engine = HangingEngine()
    async with front(tmp_path, engine, batch_concurrency=4) as one:
        await created(one.client("one"), lines(20, min_tokens=1))
        await eventually(lambda: len(engine.requests) == 4)
        batch = await ended(one.client("two"), (await created(one.client("two"), lines(6))).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 6)


async def test_requests_that_wait_hold_no_place(tmp_path: Path, monkeypatch):
    engine = CountingEngine(busy=True)
    async with front(tmp_path, engine, batch_concurrency=2) as one:
        blocked = await created(one.client(), lines(9))
        await eventually(lambda: len(engine.requests) >= 2)
        await eventually(lambda: not one.batches._places._used.total())
        engine.busy = False
        batch = await ended(one.client(), (await created(one.client(), lines(3))).id)
        assert batch.status == "completed"
        await one.client().batches.cancel(blocked.id)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 8}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 8, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
async def test_an_aborted_line_is_asked_again(tmp_path: Path, monkeypatch, endpoint: str, body: dict[str, Any]):
    slept = asyncio.sleep
    engine = AbortingEngine(max_model_len=4096, pooling=Pooling("last"))
    async with front(tmp_path, engine) as one:
        monkeypatch.setattr(batches_module.asyncio, "sleep", lambda seconds: slept(min(seconds, 0.01)))
        batch = await ended(one.client(), (await created(one.client(), [line("a", endpoint, **body)], endpoint)).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)
        answer = (await results(one.client(), batch.output_file_id))["a"]["response"]
        assert answer["status_code"] == 200
        assert not any(choice["finish_reason"] == "abort" for choice in answer["body"].get("choices", []))
        assert answer["body"].get("status", "completed") == "completed"
    assert engine.num_aborts < 0


@pytest.mark.parametrize(
    ("answer", "is_aborted"),
    [
        (b'{"choices":[{"text":"a","finish_reason":"stop"},{"text":"","finish_reason":"abort"}]}', True),
        (b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","finish_reason":"stop"}]}', False),
        (b'{"choices":[{"text":"abort","finish_reason":null}],"metadata":{"finish_reason":"abort"}}', False),
        (b'{"status":"completed","metadata":{"status":"cancelled"}}', False),
        (b'{"status":"cancelled"}', True),
        (b'{"error":{"message":"abort"}}', False),
    ],
)
def test_an_aborted_answer_is_known_by_its_own_fields(answer: bytes, is_aborted: bool):
    assert _is_aborted(answer) is is_aborted


async def test_every_key_gets_its_share_beside_full_places():
    places, ends = Places(4), asyncio.Event()

    async def hold(owner: str) -> None:
        async with places.of(owner):
            await ends.wait()

    tasks = [asyncio.create_task(hold(owner)) for owner in "aaaaaaabbbbc"]
    await eventually(lambda: places._used == {"a": 4, "b": 2, "c": 1})
    cancelled = asyncio.create_task(hold("c"))
    await asyncio.sleep(0)
    cancelled.cancel()
    ends.set()
    await asyncio.gather(*tasks)
    assert not places._used.total()
    assert not places._asking.total()
