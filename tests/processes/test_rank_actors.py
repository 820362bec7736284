"""Two real ranks behind one engine answer as one does, and a rank that dies or is stopped is a pause."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from runtime.llm import LLM
from tests.support.models.divisible_model import write_divisible_model
from tests.support.processes.server import PROMPTS, Server, sampling, wait_for

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.thorough]

NUM_TOKENS = 200  # of each answer


@pytest.fixture(scope="module", name="divisible_path")
def model(tmp_path_factory) -> Path:
    return write_divisible_model(tmp_path_factory.mktemp("divisible"))


@pytest.fixture(scope="module", name="undisturbed")
def answers(divisible_path) -> list[list[int]]:
    """The answers of one rank in this process."""
    llm = LLM(str(divisible_path), rank_invariant=True, max_num_seqs=8, kv_cache_memory=0.1, num_threads=1)
    params = [sampling(i, i, NUM_TOKENS) for i in range(len(PROMPTS))]
    return [answer.token_ids for answer in llm.generate(PROMPTS, params)]


async def ranks_of(server: Server) -> list:
    return await server.engine().__ray_call__.remote(lambda engine: engine.runners.runners)


async def replaced(server: Server, old: list) -> list:
    """The ranks that replace the old ones, once the engine knows their processes. Before that it would take a stopped
    rank for a slow one."""

    def known(engine) -> list:
        ranks = engine.runners._ranks
        return ranks.runners if ranks is not None and len(ranks._processes) == len(ranks.runners) else []

    while True:
        ranks = await server.engine().__ray_call__.remote(known)
        if ranks and ranks[0]._actor_id != old[0]._actor_id:
            return ranks
        await asyncio.sleep(0.02)


async def pid_of(rank) -> int:
    return (await rank.location.remote())[1]


async def test_stopped_and_killed_ranks_change_no_token(divisible_path, undisturbed):
    """In steps, while they are loaded again, and while the engine drains; with grammars, guesses and a prefix cache."""
    config = {"tensor_parallel_size": 2, "rank_invariant": True, "draft": "ngram", "num_draft_tokens": 3}
    async with Server("ranks", divisible_path, **config) as server:
        for rank, disturbance in ((1, signal.SIGSTOP), (0, signal.SIGKILL)):
            ranks = await ranks_of(server)
            pid = await pid_of(ranks[rank])
            progress: list[int] = []
            reading = asyncio.create_task(server.generate(progress, NUM_TOKENS))
            await wait_for(lambda progress=progress: sum(progress) > 80, 60)
            if rank == 0:
                await server.engine().drain.remote("It drains.")
            os.kill(pid, disturbance)
            others = await replaced(server, ranks)
            os.kill(await pid_of(others[1]), disturbance)  # while it loads
            assert await reading == undisturbed
            assert (await ranks_of(server))[0]._actor_id not in (ranks[0]._actor_id, others[0]._actor_id)
            assert (await server.engine().stats.remote())["accepted_draft_tokens"] > 0
        assert server.supervisor.num_restarts == 0
