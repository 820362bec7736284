"""Real actors, real kills: the death of a runner or of the engine is a pause, not an error (C8)."""

import asyncio
import os
import re
import signal
import time

import pytest
import ray

from actors.engine.supervisor import Supervisor
from actors.front.engine_group import EngineGroup
from actors.ray.directory import RayDirectory, find_engines
from actors.ray.placement import bundles
from runtime.llm import LLM
from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError, GrammarSpec, Request, SamplingParams
from runtime.structured.grammar import compiled
from runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("ray_session")

PROMPTS = [list(range(100 + 7 * i, 120 + 9 * i)) for i in range(8)]
NUM_TOKENS = 400  # of each answer: long enough for a kill while all are under way
LETTERS = compiled(GrammarSpec("regex", "[A-Z][a-z ]{900}"))


def sampling(i: int, seed: int | None = None, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Of prompt `i`."""
    grammar = LETTERS if i % 4 == 3 else None
    return SamplingParams(max_tokens=num_tokens, temperature=0.8 * (i % 2), ignore_eos=True, grammar=grammar, seed=seed)


@pytest.fixture(scope="session", name="undisturbed")
def answers(tiny_path) -> list[list[int]]:
    """The answers, computed in this process."""
    llm = LLM(str(tiny_path), deterministic=True, max_num_seqs=8, kv_cache_memory=0.1, num_threads=1)
    return [answer.token_ids for answer in llm.generate(PROMPTS, [sampling(i, seed=i) for i in range(len(PROMPTS))])]


class Server:
    """One supervised engine and a link to it, on the test's own event loop."""

    def __init__(self, name, model, **kw):
        """Each runner has one core, because a draft's may run beside the engine's."""
        fixed = {"deterministic": True, "max_num_seqs": 8, "kv_cache_memory": 0.1, "num_threads": 1}
        self.name, self.config = name, EngineConfig(str(model), max_model_len=1024, **fixed, **kw)

    async def __aenter__(self):
        self.group = ray.util.placement_group(bundles(self.config, gpu=False), "STRICT_PACK")
        ray.get(self.group.ready(), timeout=30)
        self.supervisor = Supervisor(self.config, self.name, self.group, gpu=False)
        await self.supervisor.start()
        self.link = EngineGroup(RayDirectory(f"{self.name}#"))
        await self.link.start()
        return self

    async def __aexit__(self, *_):
        self.link.close()
        self.supervisor._watch.cancel()
        ray.kill(self.engine())
        ray.util.remove_placement_group(self.group)

    def engine(self):
        return find_engines(f"{self.name}#")[-1]

    async def runner_pid(self):
        (runner,) = await self.engine().__ray_call__.remote(lambda engine: engine.runners.runners)
        return (await runner.location.remote())[1]

    async def draft_pid(self):
        draft = await self.engine().__ray_call__.remote(lambda engine: engine.draft.draft)
        return (await draft.location.remote())[1]

    async def generate(self, progress=None, num_tokens=NUM_TOKENS):
        """All prompts at once; `progress` counts tokens as they arrive."""

        async def one(i):
            tokens = []
            params = sampling(i, num_tokens=num_tokens)
            async for output in self.link.generate(Request(f"r{i}", PROMPTS[i], len(PROMPTS[i]), params, seed=i)):
                assert not output.error, output.error
                tokens += output.token_ids
                if progress is not None:
                    progress.append(len(output.token_ids))
            return tokens

        return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))


async def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_killed_runner_and_engine_change_no_token(tiny_path, undisturbed):
    assert [len(t) for t in undisturbed] == [NUM_TOKENS] * 8
    tokenizer = Tokenizer.load(tiny_path)
    assert all(re.fullmatch("[A-Z][a-z ]*", tokenizer.decode(undisturbed[i])) for i in (3, 7))
    async with Server("kill", tiny_path) as server:
        for victim in ("runner", "engine"):
            if victim == "runner":
                pid = await server.runner_pid()
            else:
                pid = (await server.engine().stats.remote())["pid"]
            progress: list[int] = []
            reading = asyncio.create_task(server.generate(progress))
            await wait_for(lambda progress=progress: sum(progress) > 80, 60)
            os.kill(pid, signal.SIGKILL)
            await wait_for(lambda: server.link.health() is not None, 5)
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
