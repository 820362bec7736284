"""The fault matrix, once: two engines and two fronts lose processes while their streams are read; and the command that
shows it. `python -m benchmarks.faults` does the rest of the matrix, with the step times of a large model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.faults.cell import NUM_TOKENS, Answers
from tests.support.models.tiny_hybrid import write_tiny_hybrid
from tests.support.processes.fault_cells import NUM_STREAMS, check_cell, deployed, has_ended
from tests.support.processes.resumed_stream import MAX_TOKENS, ResumedStream

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def application(serve_url, tiny_path):
    yield from deployed(tiny_path, serve_url)


@pytest.fixture(scope="module")
def answers(tiny_path) -> Answers:
    return Answers(str(tiny_path), NUM_STREAMS, 20)


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ("engine killed", "decode"),
        ("runner killed", "drain"),
        ("supervisor killed", "decode"),
        ("front killed", "decode"),
    ],
)
async def test_faults_lose_no_token(application, answers, fault, when):
    figures = await check_cell(application, answers, fault, when)
    assert (figures["cut"] > 0) == (fault == "front killed")


def test_chaos_interrupts_no_stream(application):
    command = [sys.executable, "-m", "serve_app.cli", "chaos", application.url, "--kill", "engine,runner"]
    options = ["--every", "1", "--streams", "6", "--max-tokens", str(NUM_TOKENS)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "killed the engine " in done.stdout
    assert "killed the runner of engine " in done.stdout
    assert " tokens: 0 lost, 0 doubled; 0 answers failed; " in done.stdout
    assert "differed" not in done.stdout


def test_a_client_kills_processes_and_its_stream_goes_on(application):
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
    with httpx.Client(base_url=application.url, timeout=100) as client:
        (whole,) = client.post("/v1/completions", json=body).json()["choices"]
        for role in ("engine", "runner"):
            text, killed = "", None
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as events:
                for line in events.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        killed = killed or client.post(f"/chaos?role={role}").json()
            assert killed["role"] == role, killed
            assert text == whole["text"]
            deadline = time.monotonic() + 60  # the answer may come from the other engine, before the kernel is done
            while not has_ended(killed["pid"]):
                assert time.monotonic() < deadline
                time.sleep(0.01)


async def test_rows_of_ray_data_outlive_an_engine(application):
    """ray.data.llm's stage itself; docs/ray_data.py is the whole job, which needs another package."""
    from ray.llm._internal.batch.stages.serve_deployment_stage import ServeDeploymentStageUDF

    stage = ServeDeploymentStageUDF(
        "__data",
        ["method", "request_kwargs"],
        deployment_name="Front",
        app_name="callboard",
        dtype_mapping={},
        should_continue_on_error=True,
    )
    bodies = [{"prompt": f"{i}", "max_tokens": 200 if i else -9, "ignore_eos": True, "seed": i} for i in range(30)]
    rows = [{"method": "completions", "request_kwargs": body, "__idx_in_batch": body["seed"]} for body in bodies]
    killing = asyncio.create_task(_kill_an_engine_that_computes(application.url))
    found = {row["__idx_in_batch"]: row async for row in stage.udf(rows)}
    await killing
    assert "max_tokens is -9" in found.pop(0)["__inference_error__"]
    async with httpx.AsyncClient(base_url=application.url, timeout=100) as client:
        for at, row in found.items():
            assert row["usage"]["completion_tokens"] == 200, row["__inference_error__"]
            answer = (await client.post("/v1/completions", json=bodies[at])).json()
            assert [choice["text"] for choice in row["choices"]] == [choice["text"] for choice in answer["choices"]]


async def _kill_an_engine_that_computes(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=100) as client:
        while (await client.get("/load")).json()["server_load"] < 5:
            await asyncio.sleep(0.01)
        (await client.post("/chaos?role=engine")).raise_for_status()


async def test_streams_of_a_killed_front_are_taken_up(application):
    """Clients send their requests again with the id of the last event, and miss no token of the first answer."""
    streams = [ResumedStream(application.url, i) for i in range(NUM_STREAMS)]
    pid = next(pid for role, _, pid in application.application.processes() if role == "front")
    tasks = [asyncio.create_task(stream.read()) for stream in streams]
    async with asyncio.timeout(300):
        while min(len(stream.token_ids) for stream in streams) < 20:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert sum(stream.num_cuts for stream in streams) > 0
        async with httpx.AsyncClient(base_url=application.url, timeout=100) as client:
            for stream in streams:
                whole = (await client.post("/v1/completions", json=stream.body | {"seed": stream.seed})).json()
                (choice,) = whole["choices"]
                assert (choice["text"], choice["token_ids"]) == (stream.text, stream.token_ids)
                assert len(stream.token_ids) == MAX_TOKENS
        while application.application.strength():
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def hybrid(serve_url, tmp_path_factory):
    """The application of a model with recurrent states, and the answers to prompts of several chunks."""
    path = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "hybrid.gguf")
    for found in deployed(path, serve_url):
        yield found, Answers(str(path), NUM_STREAMS, 200)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["engine killed", "runner killed"])
async def test_faults_lose_no_state(hybrid, fault):
    """A stream that moves, or loses its runner, computes its states again, with the same tokens."""
    await check_cell(*hybrid, fault, "states")
