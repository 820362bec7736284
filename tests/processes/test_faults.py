"""The fault matrix, once: two engines and two fronts lose processes while their streams are read; and the command that
shows it. `python -m benchmarks.faults` does the rest of the matrix, with the step times of a large model."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.application import Application, deploy
from benchmarks.faults.cell import NUM_TOKENS, Answers, Cell
from benchmarks.faults.matrix import BY_NAME
from serve_app.tools.token_client import first_model
from tests.conftest import RAY_FOLDER
from tests.support.models.tiny_hybrid import write_tiny_hybrid

NUM_STREAMS = 8
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "deterministic": True,
    "num_threads": 1,
    "kv_cache_memory": 0.1,
    "max_num_batched_tokens": 512,
    "allow_chaos": True,
}


class Here:
    """The application in this session's Ray."""

    def __init__(self, url: str, session: str) -> None:
        self.application, self.url = Application(RAY_FOLDER, url, session), url

    async def ask(self, method, *arguments, timeout_s=15.0):
        try:
            return await asyncio.to_thread(getattr(self.application, method), *arguments)
        except Exception as e:  # of Ray's many
            raise RuntimeError(f"{method} was not answered: {e}") from e


def deployed(model: Path, serve_url: str):
    """The application of a model, until the test module ends."""
    import ray
    from ray import serve

    deploy(str(model), **SETTINGS)
    found = Here(serve_url, ray._private.worker._global_node.get_session_dir_path())
    end = time.monotonic() + 120
    while missing := found.application.strength():
        assert time.monotonic() < end, missing
        time.sleep(0.1)
    yield found
    serve.delete("callboard")


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


async def check_cell(application: Here, answers: Answers, fault: str, when: str) -> dict[str, Any]:
    server, _ = await first_model("127.0.0.1", int(application.url.rpartition(":")[2]), {})
    figures = await Cell(application, server, answers, BY_NAME[fault], when, hold_s=None).run()
    assert figures["requests"] >= NUM_STREAMS
    assert figures["lost"] == figures["wrong_tokens"] == figures["refused"] == 0, figures
    return figures


def test_chaos_interrupts_no_stream(application):
    command = [sys.executable, "-m", "serve_app.cli", "chaos", application.url, "--kill", "engine,runner"]
    options = ["--every", "1", "--streams", "6", "--max-tokens", str(NUM_TOKENS)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "killed the engine " in done.stdout
    assert "killed the runner of engine " in done.stdout
    assert " tokens: 0 lost, 0 doubled; 0 answers failed; " in done.stdout
    assert "differed" not in done.stdout


def has_ended(pid: int) -> bool:
    """True if the process is gone, or is a zombie of Ray's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


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
            assert has_ended(killed["pid"])


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
