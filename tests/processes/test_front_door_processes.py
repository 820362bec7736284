"""`callboard serve` as real processes with a tiny model: its start, a storm of clients that leave, and its drain."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from actors.ray.environment import SINGLE_MACHINE, quiet_port

ROOT = Path(__file__).parents[2]
START_S = 600  # on a machine that does much else besides

# Prints the engine's gauges when they are zero. It reads them over Ray, beside the HTTP port.
WAIT_FOR_ZERO = """
import time
import ray
from actors.ray.directory import find_engines
from actors.ray.names import engines_of
ray.init(log_to_driver=False, logging_level="ERROR")
(engine,), end = find_engines(engines_of("callboard")), time.monotonic() + 60
while True:
    stats = ray.get(engine.stats.remote())
    if stats["running"] == stats["waiting"] == stats["waiting_tokens"] == sum(stats["streams"]) == 0:
        break
    assert time.monotonic() < end, stats
assert stats["blocks_available"] == stats["blocks_total"], stats
print(stats["steps"])
"""


@pytest.mark.rotated
def test_start_storm_and_drain(write_tiny_gguf, private_ray, tmp_path: Path):
    port = quiet_port()
    model = write_tiny_gguf(llama__context_length=1 << 18, llama__rope__freq_base=10000.0)
    command = [sys.executable, "-m", "serve_app.cli", "serve", str(model), "--served-model-name", "tiny"]
    flags = ["--port", str(port), "--num-threads", "1", "--kv-cache-memory", "0.1", "--num-fronts", "2"]
    flags += ["--kv-tier-memory", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=private_ray, cwd=ROOT)
    try:
        asyncio.run(_start_storm_and_drain(process, f"http://127.0.0.1:{port}", private_ray))
    finally:
        process.terminate()
        process.wait(timeout=60)
    output = (tmp_path / "log").read_text()
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if " request id=" in line]
    assert sum(" output_tokens=2000 " in line for line in lines) == 4
    assert sum(' error="The server stopped before this answer was complete; ' in line for line in lines) == 1
    (file,) = re.findall(r"^Each request is a line here and in (\S+); ", output, re.MULTILINE)
    assert Path(file).read_text().splitlines() == lines


async def _start_storm_and_drain(process: subprocess.Popen, url: str, environment: dict[str, str]) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        # The port answers from the command on, with the phase of the start.
        phases, end = [], time.monotonic() + START_S
        while time.monotonic() < end and process.poll() is None:
            with suppress(httpx.TransportError):
                answer = await client.get("/ready")
                if answer.status_code == 200:
                    break
                if answer.status_code == 503:
                    phases.append(answer.json())
                    refused = await client.post("/v1/completions", json={"prompt": "a"})
                    assert refused.status_code == 200 or refused.json()["error"]["code"] == "engine_unavailable"
            await asyncio.sleep(0.1)
        assert answer.status_code == 200
        assert "loading" in {phase["status"] for phase in phases} <= {"loading", "unavailable"}
        assert {"Ray started", "front door open"} <= {phase["phase"] for phase in phases}

        # 200 clients that give up after half a second.
        async def leave(stream: bool) -> None:
            body = {"prompt": "Once", "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
            try:
                async with asyncio.timeout(0.5):
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code in (429, 503), answer.text  # a busy machine may refuse some
            except TimeoutError:
                return
            except httpx.TransportError as error:
                error.add_note(f"Its causes: {_causes(error)}")  # httpcore hides them
                raise

        await asyncio.gather(*(leave(stream=i % 2 == 0) for i in range(200)))
        answer = await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 5, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 5
        (gcs_port,) = Path(environment["RAY_TMPDIR"]).glob("ray/session_latest/gcs_server_port_*")
        gauges = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", WAIT_FOR_ZERO],
            env=environment | SINGLE_MACHINE | {"RAY_ADDRESS": f"127.0.0.1:{gcs_port.read_text()}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert gauges.returncode == 0, gauges.stderr

        await _drain(process, client)


def _causes(error: BaseException | None) -> list[str]:
    causes = []
    while error is not None:
        causes.append(repr(error))
        error = error.__cause__ or error.__context__
    return causes


async def _drain(process: subprocess.Popen, client: httpx.AsyncClient) -> None:
    # SIGTERM: running requests finish, and new ones get a time to retry.
    body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    bodies = [body | {"max_tokens": 1 << 17}, *[body] * 4]
    requests = [client.build_request("POST", "/v1/completions", json=each) for each in bodies]
    # Each has begun when its headers are here.
    begun = await asyncio.gather(*(client.send(request, stream=True) for request in requests))
    endless, *streams = [asyncio.create_task(answer.aread()) for answer in begun]
    process.send_signal(signal.SIGTERM)
    answer = await client.get("/health")
    while answer.status_code == 200:
        assert not endless.done(), "a running request must outlive the signal"
        answer = await client.get("/health")
    refused = await client.post("/v1/completions", json={"prompt": "a"})
    while refused.status_code == 200:  # the other front does not know yet
        assert not endless.done()
        refused = await client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "shutting down" in refused.json()["error"]["message"]
    for text in await asyncio.gather(*streams):
        *_, usage, done, _ = text.decode().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 2000

    # A second SIGTERM: running requests end with an error.
    await asyncio.sleep(0.6)  # within half a second it would be the same order
    process.send_signal(signal.SIGTERM)
    *_, last, done, _ = (await endless).decode().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert await asyncio.to_thread(process.wait, 120) == 0
