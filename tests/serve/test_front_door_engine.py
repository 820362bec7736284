"""HTTP over real sockets, link and engine loop together, with clients that leave, come late, read slowly or are too
many.

Only the runner is a fake (fake_runner.py), as slow as a test needs it.
"""

import asyncio
import gc
import json
import socket

import httpx
import openai
import pytest

from serve_app.application import build_http_app
from serve_app.service.service import Service
from serve_app.settings import HttpSettings
from tests.support.engine.links import Engine, eventually, hurry, link_to, read, request
from tests.support.http.fake_engine import MODEL, byte_tokenizer
from tests.support.http.serving import body, live, serving


def state(engine):
    s = engine.loop.core.scheduler
    if len(s.waiting):
        return "queued"
    last = s.running[-1] if s.running else None
    return "" if last is None else "prefill" if last.num_computed < last.prompt_len else "decode"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_is_aborted(when: str, stream: bool):
    async with (
        serving(delay_s=0.05, max_num_seqs=1, max_num_batched_tokens=8) as (engine, url),
        httpx.AsyncClient() as c,
    ):
        others = 0
        if when == "queued":
            first = asyncio.create_task(c.post(f"{url}/v1/completions", json=body(num_prompt=1, max_tokens=400)))
            await eventually(lambda: state(engine) == "decode")
            others = 1
        num_prompt, max_tokens = (400, 100) if when == "prefill" else (5, 400)
        victim = asyncio.create_task(
            c.post(f"{url}/v1/completions", json=body(num_prompt, max_tokens, stream=stream), timeout=60)
        )
        await eventually(lambda: state(engine) == when)
        victim.cancel()
        await eventually(lambda: live(engine) == others, seconds=5)  # the whole would take 7 s and more
        if others:
            assert not first.done()
            first.cancel()
        await eventually(lambda: live(engine) == 0)
        assert engine.loop.stats()["waiting_tokens"] == 0


async def test_the_queue_is_limited_in_requests_and_in_tokens():
    limits = {"max_num_seqs": 1, "max_queued_requests": 3, "max_queued_tokens": 50}
    async with serving(delay_s=0.005, **limits) as (engine, url):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)

        async def complete(**fields):
            fields = body(**fields)
            extra = {"ignore_eos": fields.pop("ignore_eos")}
            return await client.completions.create(model=MODEL, **fields, extra_body=extra)

        running = asyncio.create_task(complete(num_prompt=1, max_tokens=400))
        await eventually(lambda: state(engine) == "decode")
        waiting = [asyncio.create_task(complete(num_prompt=20, max_tokens=1)) for _ in range(2)]
        await eventually(lambda: engine.loop.stats()["waiting_tokens"] == 40)
        with pytest.raises(openai.RateLimitError, match="40 tokens waiting and this request has 11") as error:
            await complete(num_prompt=11)
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60
        assert error.value.body["code"] == "engine_busy"
        waiting.append(asyncio.create_task(complete(num_prompt=10, max_tokens=1)))  # it just fits
        await eventually(lambda: engine.loop.stats()["waiting"] == 3)
        with pytest.raises(openai.RateLimitError, match="3 requests waiting"):
            await complete(num_prompt=1, stream=True)
        running.cancel()
        for answer in await asyncio.gather(*waiting):
            assert answer.usage.completion_tokens == 1
        # An empty queue takes a prompt of any length.
        assert (await complete(num_prompt=60, max_tokens=1)).usage.prompt_tokens == 60


async def test_retry_after_is_the_time_to_drain_the_queue():
    async with serving(delay_s=0.001, max_num_seqs=1) as (engine, _):
        loop = engine.loop
        assert loop.requests.limits._retry_after_s(100) == 1.0  # nothing has finished yet
        loop.requests.limits._finish_times.extend([10.0, 10.5, 11.0, 11.5])  # one every half second
        assert loop.requests.limits._retry_after_s(7) == 3.5
        assert loop.requests.limits._retry_after_s(1) == 1.0
        assert loop.requests.limits._retry_after_s(1000) == 60.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_gets_504(stream: bool):
    async with serving(delay_s=0.01, max_num_seqs=1, queue_timeout_s=0.15) as (engine, url), httpx.AsyncClient() as c:
        first = asyncio.create_task(c.post(f"{url}/v1/completions", json=body(max_tokens=60), timeout=60))
        await eventually(lambda: state(engine) == "decode")
        answer = await c.post(f"{url}/v1/completions", json=body(stream=stream))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert (await first).status_code == 200  # it took longer, but it had begun in time


async def test_a_waiting_stream_is_kept_alive_and_fails_as_an_event():
    settings = HttpSettings(keep_alive_s=0.05)
    async with (
        serving(settings, delay_s=0.05, max_num_seqs=1, queue_timeout_s=3600.0) as (engine, url),
        httpx.AsyncClient(timeout=60) as c,
    ):
        first = asyncio.create_task(c.post(f"{url}/v1/completions", json=body(max_tokens=400)))
        await eventually(lambda: state(engine) == "decode")
        async with c.stream("POST", f"{url}/v1/completions", json=body(stream=True)) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            comments = [await anext(lines) for _ in range(6)]
            assert comments == [": the request waits", ""] * 3
            limits = engine.loop.requests.limits
            engine.loop._call(lambda: limits._deadlines.extend((0.0, state) for _, state in [limits._deadlines.pop()]))
            *comments, error, _, done, _ = [line async for line in lines]
        assert set(comments) <= {": the request waits", ""}
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "queue_timeout"
        assert done == "data: [DONE]"
        hurry(engine)
        await first
        # A comment harms no reader, and the rest is the whole answer.
        again = asyncio.create_task(c.post(f"{url}/v1/completions", json=body(max_tokens=15), timeout=60))
        await eventually(lambda: state(engine) == "decode")
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        chunks = [
            c async for c in await client.completions.create(model=MODEL, prompt=[1, 2], max_tokens=5, stream=True)
        ]
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        await again


@pytest.mark.parametrize("first", [b": the request waits", b"data: "])
async def test_a_failed_write_means_that_the_client_left(first: bytes):
    """A failed write is the only sign: for a keep-alive, which does not wait for a body, and for an event."""
    engine, complaints = Engine(delay_s=0.01, max_num_seqs=1), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context.get("exception")))
    link = link_to(engine)
    await link.start()
    app = build_http_app(Service(link, byte_tokenizer(), MODEL), HttpSettings(keep_alive_s=0.05))
    content = json.dumps(body(num_prompt=1, stream=True)).encode()
    messages = [{"type": "http.request", "body": content}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        if message.get("body", b"").startswith(first):
            raise ConnectionResetError

    if first.startswith(b":"):  # it waits for an engine that is busy
        _ = busy = asyncio.create_task(read(link, request(0, max_tokens=400)))
        await eventually(lambda: state(engine) == "decode")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await asyncio.wait_for(app({**scope, "server": ("localhost", 80)}, receive, send), 5)
    await eventually(lambda: live(engine) == first.startswith(b":"))
    if first.startswith(b":"):
        busy.cancel()
    link.close()
    engine.loop.close()
    gc.collect()
    assert not [error for error in complaints if isinstance(error, OSError)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_gets_504(stream: bool):
    async with (
        serving(HttpSettings(request_timeout_s=1.0), delay_s=0.05) as (engine, url),
        httpx.AsyncClient() as c,
    ):
        answer = await c.post(f"{url}/v1/completions", json=body(max_tokens=400, stream=stream))
        if stream:
            *chunks, error, done, _ = answer.text.split("\n\n")
            assert chunks
            assert done == "data: [DONE]"
            error = json.loads(error.removeprefix("data: "))
        else:
            assert answer.status_code == 504
            error = answer.json()
        assert error["error"]["code"] == "request_timeout"
        await eventually(lambda: live(engine) == 0, seconds=10)  # all its tokens would take 20 s


async def test_a_stalled_reader_blocks_nothing_and_uses_no_memory():
    """The engine finishes. Tokens that the reader has not taken wait as ids, max_tokens of them at most."""
    async with serving(delay_s=0.0, max_num_seqs=4) as (engine, url):
        port = int(url.rpartition(":")[2])
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", port))
        request = json.dumps(body(max_tokens=480, stream=True, n=4)).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        await loop.sock_sendall(stalled, head % len(request) + request)
        await eventually(lambda: engine.loop.stats()["steps"] >= 480)
        await eventually(lambda: live(engine) == 0)  # not waiting for the reader
        async with httpx.AsyncClient() as c:
            assert (await c.post(f"{url}/v1/completions", json=body(max_tokens=20), timeout=60)).status_code == 200
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got += await asyncio.wait_for(loop.sock_recv(stalled, 65536), 60)
        assert b"data: [DONE]" in got
        assert got.count(b'"finish_reason":"length"') == 4
        assert got.count(b"data: {") < 4 * 480 / 2  # waiting tokens were merged
        stalled.close()


async def test_abort_by_the_clients_own_id():
    async with serving(delay_s=0.01) as (engine, url), httpx.AsyncClient() as c:

        def start(**kw):
            headers = kw.pop("headers", {})
            return asyncio.create_task(c.post(f"{url}/v1/completions", json=body(**kw), headers=headers, timeout=60))

        mine = start(headers={"X-Request-Id": "mine-1"}, n=2)
        named = start(request_id="named")
        other = start(headers={"X-Request-Id": "mine-2"}, max_tokens=40)
        await eventually(lambda: live(engine) == 4 and engine.loop.core.scheduler.stats.steps > 5)
        assert (await c.post(f"{url}/v1/abort", json={"request_id": "mine-1"})).json()["object"] == "request.abort"
        answer = (await mine).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        assert 0 < answer["usage"]["completion_tokens"] == sum(len(choice["text"]) for choice in answer["choices"])
        await c.post(f"{url}/v1/abort", json={"request_id": "cmpl-named"})
        assert (await named).json()["choices"][0]["finish_reason"] == "abort"
        assert (await c.post(f"{url}/v1/abort", json={"request_id": "nobody"})).status_code == 200
        answer = await other
        assert answer.status_code == 200
        assert answer.json()["id"] == "cmpl-mine-2"
        assert answer.headers["x-request-id"] == "mine-2"


async def test_draining_finishes_running_requests_only():
    async with serving(delay_s=0.01) as (engine, url), httpx.AsyncClient() as c:
        running = asyncio.create_task(c.post(f"{url}/v1/completions", json=body(max_tokens=60), timeout=60))
        await eventually(lambda: state(engine) == "decode")
        assert (await c.get(f"{url}/ready")).json() == {"status": "ready"}
        engine.loop.drain("The server is shutting down.")
        for _ in range(5):
            answer = await c.post(f"{url}/v1/completions", json=body())
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "shutting down" in answer.json()["error"]["message"]
        assert (await c.get(f"{url}/health")).status_code == 503
        assert (await running).json()["usage"]["completion_tokens"] == 60
