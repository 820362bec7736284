"""A tier while its application sleeps, scales to zero, gets new weights, and loses a keeper.

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
from tests.support.models.divisible_model import write_divisible_model
from tests.support.processes.tiers import (
    BLOCK,
    DEADLINE_S,
    PROMPT_LEN,
    WHOLE,
    all_answered,
    eventually,
    num_entries,
    prompt_of,
    summed_figures,
)

NUMBERS, NUM_TOKENS = range(2), 20
STORED = len(NUMBERS) * (PROMPT_LEN // BLOCK)  # blocks of the prompts alone
SETTINGS = {"deterministic": True, "num_threads": 1, "kv_cache_memory": 0.1, "kv_tier_memory": 0.25, "num_fronts": 1}
KEEPER = b"runtime.tier.disk.keeper"


def deploy(model: Path, **settings: Any) -> None:
    """As `serve deploy` does with a file: one engine and one front."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    args = {"model": str(model), "served_model_name": "tiny", **SETTINGS, **settings}
    application = {"name": "callboard", "import_path": "serve_app.app:build_app", "args": args}
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))


def undisturbed(model: Path) -> list[list[int]]:
    """The answers without a tier."""
    llm = LLM(str(model), deterministic=True, num_threads=1, kv_cache_memory=0.1)
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, temperature=0.8 * i) for i in NUMBERS]
    return [answer.token_ids for answer in llm.generate([prompt_of(i) for i in NUMBERS], params)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    both = [write_divisible_model(tmp_path_factory.mktemp("weights"), seed) for seed in (0, 1)]
    return both[0], both[1]


class Here:
    """The application and its tier."""

    def __init__(self, name: str, url: str, disk: Path) -> None:
        self.name, self.disk = name, disk
        self.client = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)

    async def post(self, path: str, **body: Any) -> None:
        answer = await self.client.post(path, json=body or None)
        assert answer.status_code == 200, answer.text

    async def answers(self) -> tuple[list[list[int]], int]:
        """All answers, and the fewest tokens that a prompt did not compute."""
        found = await all_answered(self.client, NUMBERS, NUM_TOKENS)
        return [tokens for tokens, _ in found], min(cached for _, cached in found)

    async def until_ready(self, phase: str = "") -> None:
        """Wait until the application is ready, in this phase."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with_error = False
                try:
                    ready = await self.client.get("/ready")
                except httpx.HTTPError:
                    with_error = True
                if not with_error and ready.status_code == 200 and phase in ready.text:
                    return
                await asyncio.sleep(0.05)

    async def until_stored(self, base: Path | None = None) -> None:
        await eventually(lambda: num_entries(self.name, base) >= STORED)


def deployed(name: str, model: Path, url: str, disk: Path, **settings: Any) -> Iterator[Here]:
    from ray import serve

    deploy(model, kv_tier_name=name, kv_tier_folder=str(disk), **settings)
    yield Here(name, url, disk)
    serve.delete("callboard")


@pytest.fixture(scope="module")
def here(serve_url: str, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    settings = {"sleep_mode": True, "weight_updates": True, "weight_folder": str(folders[0].parent)}
    yield from deployed("phases", folders[0], serve_url, tmp_path_factory.mktemp("disk"), **settings)


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_wakes_up_has_what_it_computed(here: Here, folders: tuple[Path, Path], level: int):
    await here.until_ready()
    expected, _ = await here.answers()
    assert expected == undisturbed(folders[0])
    await here.until_stored()
    before = await summed_figures(here.client)
    await here.post(f"/sleep?level={level}")
    assert num_entries(here.name) >= STORED
    await here.post("/wake_up")
    found, cached = await here.answers()
    assert found == expected
    assert cached >= WHOLE - BLOCK
    assert (await summed_figures(here.client))["hit_tokens"] - before["hit_tokens"] >= len(NUMBERS) * (WHOLE - BLOCK)


def children(name: bytes) -> set[int]:
    """Processes with a name in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def keepers(disk: Path) -> set[int]:
    """The keepers of a tier on disk."""
    return children(KEEPER) & children(bytes(disk))


async def test_another_keeper_goes_on_for_a_killed_one(here: Here, folders: tuple[Path, Path]):
    """It writes to the disk, and reads from there into a new region."""
    await here.until_ready()
    expected, _ = await here.answers()
    await here.until_stored(here.disk)
    (first,) = keepers(here.disk)
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: bool(keepers(here.disk) - {first}))
    on_disk = num_entries(here.name, here.disk)
    await all_answered(here.client, [50], NUM_TOKENS)
    await eventually(lambda: num_entries(here.name, here.disk) >= on_disk + PROMPT_LEN // BLOCK)

    assert forget(base_folder(), here.name) > 0
    await here.post("/sleep?level=2")
    await here.post("/wake_up")  # fresh runners make a new region
    assert await here.answers() == (expected, WHOLE)
    figures = await summed_figures(here.client)
    assert figures["disk_tokens"] >= len(NUMBERS) * (WHOLE - BLOCK)


async def test_weights_find_no_entries_of_other_weights(here: Here, folders: tuple[Path, Path]):
    """Also after an update with the same weights as before. A version's own entries outlive its runners."""
    await here.until_ready()
    await here.answers()
    await here.until_stored()
    for folder in folders[::-1]:
        await here.post("/start_weight_update")
        await here.post("/update_weights", update_info={"paths": [str(folder)]})
        await here.post("/finish_weight_update")
        expected = undisturbed(folder)
        stored = num_entries(here.name)
        assert await here.answers() == (expected, 0)
        await eventually(lambda: num_entries(here.name) >= stored + STORED)  # noqa: B023
        await here.post("/sleep?level=2")
        await here.post("/wake_up")
        found, cached = await here.answers()
        assert found == expected
        assert cached >= WHOLE - BLOCK


async def test_an_engine_started_from_zero_has_what_the_last_one_computed(
    serve_url: str, folders: tuple[Path, Path], tmp_path: Path
):
    for here in deployed("zero", folders[0], serve_url, tmp_path, idle_sleep="1s"):
        await here.until_ready()
        expected, _ = await here.answers()
        await here.until_stored()
        await here.until_ready("scaled to zero")
        assert not keepers(tmp_path)
        assert num_entries("zero") >= STORED
        found, cached = await here.answers()
        assert found == expected
        assert cached >= WHOLE - BLOCK
