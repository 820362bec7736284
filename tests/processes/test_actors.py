"""Real actors, real kills: the death of a runner or of the engine is a pause, not an error (C8)."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
import ray

from runtime.base.types import CallboardError
from runtime.text.tokenizer import Tokenizer
from serve_app.processes.application_processes import processes_of
from tests.support.processes.server import NUM_TOKENS, Server, wait_for

pytestmark = pytest.mark.usefixtures("ray_session")


async def test_killed_runner_and_engine_change_no_token(tiny_path, undisturbed):
    assert [len(t) for t in undisturbed] == [NUM_TOKENS] * 8
    tokenizer = Tokenizer.load(tiny_path)
    assert all(re.fullmatch("[A-Z][a-z ]*", tokenizer.decode(undisturbed[i])) for i in (3, 7))
    async with Server("kill", tiny_path) as server:
        titled = [process for process in processes_of("") if process.application == "kill"]
        assert [(p.role, p.engine, p.rank) for p in titled] == [("engine", "kill", None), ("runner", "kill", 0)]
        assert [p.pid for p in titled] == [(await server.engine().stats.remote())["pid"], await server.runner_pid()]
        assert all(f"-{p.pid}.err" in p.log and Path(p.log).exists() for p in titled)
        for victim in ("runner", "engine"):
            if victim == "runner":
                pid = await server.runner_pid()
            else:
                pid = (await server.engine().stats.remote())["pid"]
            progress: list[int] = []
            reading = asyncio.create_task(server.generate(progress))
            await wait_for(lambda progress=progress: sum(progress) > 80, 60)
            os.kill(pid, signal.SIGKILL)
            await wait_for(lambda: server.link.health() is not None, 60)
            assert "restart" in server.link.health()
            assert sum(progress) < 8 * NUM_TOKENS
            assert await reading == undisturbed
            assert server.link.health() is None
        assert server.supervisor.num_restarts == 1


async def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path):
    bad = tmp_path / "broken.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    server = Server("broken", bad)
    with pytest.raises(CallboardError, match=r"broken\.gguf") as error:
        async with server:
            pass
    assert "\n" not in str(error.value)
    ray.util.remove_placement_group(server.group)
