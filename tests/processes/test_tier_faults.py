"""Processes are killed, and the tier has what they computed: the same tokens, and prompts are not computed again.

What was computed again is counted, never timed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from benchmarks.faults.application import engines
from runtime.base.types import SamplingParams
from runtime.llm import LLM
from runtime.tier.place import base_folder, forget
from tests.support.models.tiny_hybrid import write_tiny_hybrid
from tests.support.processes.fault_cells import deployed
from tests.support.processes.serve_command import STOP_S, Server
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
    regions_of,
    summed_figures,
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

    def pids(self, role: str) -> set[int]:
        return {pid for name, _, pid in self.application.processes() if name == role}

    def kill(self, role: str, count: int = 2) -> set[int]:
        """Kill processes and return them."""
        killed = set(sorted(self.pids(role))[:count])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        return killed

    async def until_replaced(self, killed: set[int]) -> None:
        """Wait until others have taken the place of killed engines. An idle engine replaces its runners later."""
        await eventually(lambda: len(self.pids("engine") - killed) == 2 and not self.application.strength())

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
        before = await summed_figures(client)
        killed = tiered.kill(role)
        if role == "engine":
            await tiered.until_replaced(killed)
            before = await summed_figures(client)
        await tiered.check(client, WHOLE - BLOCK)
        after = await summed_figures(client)
        assert after["hit_tokens"] - before["hit_tokens"] >= NUM_PROMPTS * (WHOLE - BLOCK)
        assert after["damaged"] == before["damaged"]


async def test_streams_of_a_killed_engine_go_on_from_the_tier(tiered: Tiered):
    """The other engine loads the prompts that the killed one has stored, and computes only their last tokens."""
    numbers, longer = range(100, 100 + NUM_PROMPTS), 1500  # prompts of this test alone
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        before = num_entries(tiered.name)
        await all_answered(client, numbers, 1)
        await eventually(lambda: num_entries(tiered.name) >= before + STORED)
        tasks = [asyncio.create_task(answered(client, number, longer)) for number in numbers]
        live = dict[str, int]()
        while sum(live.values()) < NUM_PROMPTS:
            await asyncio.sleep(0.01)
            live = {engine: len(tiered.application.requests_of(engine)) for engine in engines()}
        victim, survivor = sorted(live, key=live.__getitem__, reverse=True)
        computed = num_computed(survivor)
        (killed,) = [
            pid for role, engine, pid in tiered.application.processes() if (role, engine) == ("engine", victim)
        ]
        os.kill(killed, signal.SIGKILL)
        found = [tokens for tokens, _ in await asyncio.gather(*tasks)]
        assert live[victim] >= NUM_PROMPTS // 2
        assert num_computed(survivor) - computed <= live[victim] * 2 * BLOCK
        await tiered.until_replaced({killed})
        assert [tokens for tokens, _ in await all_answered(client, numbers, longer)] == found


def num_computed(engine: str) -> int:
    """Prompt tokens of admitted requests that an engine found neither in its cache nor in the tier."""
    stats = ray.get(engines()[engine].stats.remote())
    return stats["prompt_tokens"] - stats["prompt_tokens_cached"]


@pytest.mark.rotated
async def test_flipped_bits_are_found(tiered: Tiered):
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        before = await summed_figures(client)
        tiered.kill("runner")
        flip_bits(tiered.name)
        await tiered.check(client, 0)
        assert (await summed_figures(client))["damaged"] > before["damaged"]


async def test_a_deleted_region_is_made_anew(tiered: Tiered):
    async with httpx.AsyncClient(base_url=tiered.url, timeout=300) as client:
        await tiered.fill(client)
        assert forget(base_folder(), tiered.name) > 0
        await tiered.check(client, 0)
        tiered.kill("runner")  # an engine with fresh runners uses their region
        await tiered.fill(client)
        tiered.kill("runner")
        await tiered.check(client, WHOLE - BLOCK)


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=300)


async def test_a_new_start_finds_what_a_killed_server_stored(start, tiny_path: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path / "tier"))  # the folder that `start` gives it
    words = [str(tiny_path), "--served-model-name", "tiny", "--deterministic", "--kv-tier-memory", "0.05"]
    first = start(words=words)
    first.wait_for("curl -N")
    async with client_of(first) as client:
        expected, cached = await answered(client, 0, NUM_TOKENS)
        assert cached == 0
    await eventually(lambda: num_entries("callboard") >= PROMPT_LEN // BLOCK)
    for pid in list(first.pids()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert any("KV tier: 0.05 GiB" in line for line in first.output())

    second = start(words=words)
    second.wait_for("curl -N")
    async with client_of(second) as client:
        assert await answered(client, 0, NUM_TOKENS) == (expected, WHOLE)
    command = [sys.executable, "-m", "serve_app.cli", "stop", "--port", str(second.port), "--forget"]
    stopped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "has ended" in stopped.stdout
    assert second.process.wait(STOP_S) == 0
    assert any("callboard stop --forget" in line for line in second.output())
    assert regions_of("callboard") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small memory")
async def test_a_small_memory_is_one_sentence_and_no_tier(start, tiny_path: Path, tmp_path: Path):
    """As in a container with 64 MB in /dev/shm."""
    place = tmp_path / "tier"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    try:
        server = start(words=[str(tiny_path), "--served-model-name", "tiny", "--kv-tier-name", "small"])
        server.wait_for("curl -N")
        (line,) = [line for line in server.output() if "KV tier" in line]
        assert "KV tier: off" in line
        assert "--shm-size" in line
        async with client_of(server) as client:
            assert len((await answered(client, 0, NUM_TOKENS))[0]) == NUM_TOKENS
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
