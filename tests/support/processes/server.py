"""Actors of an engine in a private Ray."""

import asyncio
import time

import ray

from actors.engine.supervisor import Supervisor
from actors.front.engine_group import EngineGroup
from actors.ray.directory import RayDirectory, find_engines
from actors.ray.placement import bundles
from runtime.base.config import EngineConfig
from runtime.base.types import GrammarSpec, Request, SamplingParams
from runtime.structured.grammar import compiled

PROMPTS = [list(range(100 + 7 * i, 120 + 9 * i)) for i in range(8)]
NUM_TOKENS = 400  # of each answer: long enough for a kill while all are under way
LETTERS = compiled(GrammarSpec("regex", "[A-Z][a-z ]{900}"))


def sampling(i: int, seed: int | None = None, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    """Of prompt `i`."""
    grammar = LETTERS if i % 4 == 3 else None
    return SamplingParams(max_tokens=num_tokens, temperature=0.8 * (i % 2), ignore_eos=True, grammar=grammar, seed=seed)


class Server:
    """One supervised engine and a link to it, on the test's own event loop."""

    def __init__(self, name, model, **kw):
        """Each runner has one core, because a draft's may run beside the engine's."""
        fixed = {"deterministic": True, "max_num_seqs": 8, "kv_cache_memory": 0.1, "num_threads": 1}
        self.name, self.config = name, EngineConfig(str(model), max_model_len=1024, **fixed, **kw)

    async def __aenter__(self):
        self.group = ray.util.placement_group(bundles(self.config, gpu=False), "STRICT_PACK")
        ray.get(self.group.ready(), timeout=60)
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
