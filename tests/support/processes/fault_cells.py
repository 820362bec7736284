"""Cells of the fault matrix (benchmarks/faults) in the Ray of the test session."""

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.application import Application, deploy
from benchmarks.faults.cell import Answers, Cell
from benchmarks.faults.matrix import BY_NAME
from serve_app.tools.token_client import first_model
from tests.conftest import RAY_FOLDER

NUM_STREAMS = 8
SETTINGS = {
    "deterministic": True,
    "num_threads": 1,
    "kv_cache_memory": 0.1,
    "kv_tier_memory": 0,
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


def deployed(model: Path, serve_url: str, **settings: Any):
    """The application of a model, until the test module ends."""
    import ray
    from ray import serve

    deploy(str(model), **SETTINGS | settings)
    found = Here(serve_url, ray._private.worker._global_node.get_session_dir_path())
    end = time.monotonic() + 120
    while missing := found.application.strength():
        assert time.monotonic() < end, missing
        time.sleep(0.1)
    yield found
    serve.delete("callboard")


async def check_cell(application: Here, answers: Answers, fault: str, when: str) -> dict[str, Any]:
    server, _ = await first_model("127.0.0.1", int(application.url.rpartition(":")[2]), {})
    figures = await Cell(application, server, answers, BY_NAME[fault], when, hold_s=None).run()
    assert figures["requests"] >= NUM_STREAMS
    assert figures["lost"] == figures["wrong_tokens"] == figures["refused"] == 0, figures
    return figures


def has_ended(pid: int) -> bool:
    """True if the process is gone, or is a zombie of Ray's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
