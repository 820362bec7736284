"""A tier while its application sleeps, scales to zero, gets new weights, and loses a keeper.

What was computed again is counted, never timed."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
    regions_of,
    summed_figures,
)

NUMBERS, NUM_TOKENS = range(2), 20
STORED = len(NUMBERS) * (PROMPT_LEN // BLOCK)  # blocks of the prompts alone
SETTINGS = {"deterministic": True, "num_threads": 1, "kv_cache_memory": 0.1, "kv_tier_memory": 0.25, "num_fronts": 1}


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

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url = name, url

    async def answers(self, numbers: Iterable[int] = NUMBERS) -> tuple[list[list[int]], int]:
        """All answers, and the fewest tokens that a prompt did not compute."""
        async with httpx.AsyncClient(base_url=self._url, timeout=DEADLINE_S) as client:
            found = await all_answered(client, numbers, NUM_TOKENS)
        return [tokens for tokens, _ in found], min(cached for _, cached in found)

    async def figures(self) -> Counter[str]:
        async with httpx.AsyncClient(base_url=self._url, timeout=DEADLINE_S) as client:
            return await summed_figures(client)

    def post(self, path: str, **body: Any) -> None:
        answer = httpx.post(self._url + path, json=body or None, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text

    async def until_ready(self, phase: str = "") -> None:
        """Wait until the application is ready, in this phase, and has its tier."""

        def is_ready() -> bool:
            with suppress(httpx.HTTPError):
                ready = httpx.get(f"{self._url}/ready", timeout=DEADLINE_S)
                return ready.status_code == 200 and phase in ready.text and bool(regions_of(self.name))
            return False

        await eventually(is_ready)

    async def until_stored(self, count: int = STORED, base: Path | None = None) -> None:
        await eventually(lambda: num_entries(self.name, base) >= count)

    def restart_runners(self) -> None:
        """Deep sleep ends them, and they start when they wake up."""
        self.post("/sleep?level=2")
        self.post("/wake_up")


def deployed(name: str, model: Path, url: str, disk: Path, **settings: Any) -> Iterator[Here]:
    from ray import serve

    deploy(model, kv_tier_name=name, kv_tier_folder=str(disk), **settings)
    yield Here(name, url)
    serve.delete("callboard")


def keepers(disk: Path) -> set[int]:
    """The keepers of a tier on disk."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = path.read_bytes()
            if b"runtime.tier.disk.keeper" in words and bytes(disk) in words:
                found.add(int(path.parent.name))
    return found


async def test_scaling_to_zero_keeps_what_was_computed(serve_url: str, folders: tuple[Path, Path], tmp_path: Path):
    for here in deployed("zero", folders[0], serve_url, tmp_path, idle_sleep="1s"):
        await here.until_ready()
        expected, _ = await here.answers()
        assert expected == undisturbed(folders[0])
        await here.until_stored()
        await here.until_ready("scaled to zero")
        await eventually(lambda: not keepers(tmp_path))  # its engine has ended
        found, cached = await here.answers()
        assert found == expected
        assert cached >= WHOLE - BLOCK


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def here(serve_url: str, folders: tuple[Path, Path], disk: Path) -> Iterator[Here]:
    settings = {"sleep_mode": True, "weight_updates": True, "weight_folder": str(folders[0].parent)}
    yield from deployed("phases", folders[0], serve_url, disk, **settings)


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_wakes_up_has_what_it_computed(here: Here, folders: tuple[Path, Path], level: int):
    await here.until_ready()
    expected, _ = await here.answers()
    assert expected == undisturbed(folders[0])
    await here.until_stored()
    here.post(f"/sleep?level={level}")
    assert num_entries(here.name) >= STORED
    here.post("/wake_up")
    before = await here.figures()
    found, cached = await here.answers()
    assert found == expected
    assert cached >= WHOLE - BLOCK
    assert (await here.figures())["hit_tokens"] - before["hit_tokens"] >= len(NUMBERS) * (WHOLE - BLOCK)


async def test_another_keeper_goes_on_for_a_killed_one(here: Here, disk: Path):
    """It writes to the disk, and reads from there into a new region."""
    await here.until_ready()
    expected, _ = await here.answers()
    await here.until_stored(base=disk)  # perhaps by the keeper of an earlier test
    await eventually(lambda: len(keepers(disk)) == 1)
    (first,) = keepers(disk)
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: bool(keepers(disk) - {first}))
    second, on_disk = keepers(disk), num_entries(here.name, disk)
    await here.answers([50])
    await here.until_stored(on_disk + PROMPT_LEN // BLOCK, disk)

    assert forget(base_folder(), here.name) > 0
    here.restart_runners()  # they make a new region, which needs a new keeper
    await eventually(lambda: bool(keepers(disk) - second))
    found, cached = await here.answers()
    assert found == expected
    assert cached >= WHOLE - BLOCK
    assert (await here.figures())["disk_tokens"] >= len(NUMBERS) * (WHOLE - BLOCK)


async def test_weights_find_no_entries_of_other_weights(here: Here, folders: tuple[Path, Path]):
    """Also after an update with the same weights as before. A version's own entries outlive its runners."""
    await here.until_ready()
    await here.answers()
    for folder in folders[::-1]:
        here.post("/start_weight_update")
        here.post("/update_weights", update_info={"paths": [str(folder)]})
        here.post("/finish_weight_update")
        expected, stored = undisturbed(folder), num_entries(here.name)
        assert await here.answers() == (expected, 0)
        await here.until_stored(stored + STORED)
        here.restart_runners()
        found, cached = await here.answers()
        assert found == expected
        assert cached >= WHOLE - BLOCK
