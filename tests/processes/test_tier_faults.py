"""Processes are killed, and the tier has what they computed: the same tokens, and prompts are not computed again.

What was computed again is counted, never timed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.base.types import SamplingParams
from runtime.llm import LLM
from runtime.tier.place import base_folder, forget
from tests.support.models.tiny_hybrid import write_tiny_hybrid
from tests.support.processes.fault_cells import deployed
from tests.support.processes.tiers import (
    BLOCK,
    PROMPT_LEN,
    WHOLE,
    all_answered,
    answered,
    eventually,
    flip_bits,
    num_entries,
    prompt_of,
    tier_figures,
)

NUM_PROMPTS, NUM_TOKENS = 6, 40
STORED = NUM_PROMPTS * (PROMPT_LEN // BLOCK)  # blocks of the prompts alone


def undisturbed(model: Path, num_tokens: int) -> list[list[int]]:
    """The answers without a tier and without a fault."""
    llm = LLM(str(model), deterministic=True, num_threads=1, kv_cache_memory=0.2)
    params = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i, temperature=0.8 * (i % 2))
        for i in range(NUM_PROMPTS)
    ]
    return [answer.token_ids for answer in llm.generate([prompt_of(i) for i in range(NUM_PROMPTS)], params)]


class Tiered:
    """An application of two engines and two fronts with a tier, and the answers to its prompts."""

    def __init__(self, here: Any, name: str, model: Path) -> None:
        self.application, self.url, self.name = here.application, here.url, name
        self.answers = undisturbed(model, NUM_TOKENS)

    def kill(self, role: str, count: int = 2) -> None:
        for pid in [pid for name, _, pid in self.application.processes() if name == role][:count]:
            os.kill(pid, signal.SIGKILL)

    async def until_whole(self) -> None:
        await eventually(lambda: not self.application.strength())

    async def fill(self, client: httpx.AsyncClient) -> None:
        """Answer all prompts once, and wait until their blocks are stored."""
        found = await all_answered(client, range(NUM_PROMPTS), NUM_TOKENS)
        assert [tokens for tokens, _ in found] == self.answers
        await eventually(lambda: num_entries(self.name) >= STORED)

    async def check(self, client: httpx.AsyncClient, least_cached: int) -> None:
        for tokens, cached in [await answered(client, number, NUM_TOKENS) for number in range(NUM_PROMPTS)]:
            assert tokens in self.answers
            assert cached >= least_cached


@pytest.fixture(scope="module", params=["attention", "states"])
def tiered(request: pytest.FixtureRequest, serve_url: str, tiny_path: Path, tmp_path_factory) -> Iterator[Tiered]:
    model = tiny_path
    if request.param == "states":
        model = write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "hybrid.gguf")
    for here in deployed(model, serve_url, kv_tier_memory=0.25, kv_tier_name=request.param):
        yield Tiered(here, request.param, model)


@pytest.mark.parametrize("role", ["runner", "engine"])
async def test_killed_processes_find_their_prompts_again(tiered: Tiered, role: str):
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        tiered.kill(role)
        await eventually(lambda: bool(tiered.application.strength()))
        await tiered.until_whole()
        await tiered.check(client, WHOLE - BLOCK)
        figures = await tier_figures(client)
        assert sum(each["hit_tokens"] for each in figures.values()) >= NUM_PROMPTS * (WHOLE - BLOCK)
        assert sum(each["damaged"] for each in figures.values()) == 0


async def test_streams_of_a_killed_engine_go_on_from_the_tier(tiered: Tiered):
    """The other engine loads the prompts that the killed one has stored."""
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        longer = undisturbed_longer = 300
        tasks = [asyncio.create_task(answered(client, number, longer)) for number in range(NUM_PROMPTS)]
        while (await client.get("/load")).json()["server_load"] < NUM_PROMPTS // 2:
            await asyncio.sleep(0.01)
        tiered.kill("engine", 1)
        found = [await task for task in tasks]
        assert [tokens[:NUM_TOKENS] for tokens, _ in found] == tiered.answers
        assert undisturbed_longer
        await tiered.until_whole()
        again = await all_answered(client, range(NUM_PROMPTS), longer)
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in found]


async def test_flipped_bits_are_found(tiered: Tiered):
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        tiered.kill("runner")
        flip_bits(tiered.name)
        await tiered.until_whole()
        await tiered.check(client, 0)
        assert sum(each["damaged"] for each in (await tier_figures(client)).values()) > 0


async def test_a_deleted_region_is_made_anew(tiered: Tiered):
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        assert forget(base_folder(), tiered.name) > 0
        await tiered.check(client, 0)
        for role in ("runner", "engine"):  # an engine with fresh runners uses their region
            tiered.kill(role)
            await eventually(lambda: bool(tiered.application.strength()))
            await tiered.until_whole()
            await tiered.fill(client)
        tiered.kill("runner")
        await tiered.until_whole()
        await tiered.check(client, WHOLE - BLOCK)
