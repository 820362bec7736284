"""Writers that are killed at any moment leave no READY slot with wrong bytes.

An engine's process reserves, and two ranks write. The control sets its done byte before it writes: if that is not found
to be wrong, these tests show nothing."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.tier import region as module
from runtime.tier.region import Region
from runtime.tier.sums import payload_sums
from tests.tier.regions import keys_of, torn

SLOT, RANKS, BATCH = 2**18, 2, 3
FORK = multiprocessing.get_context("fork")


def engine(region: Region, name: str) -> None:
    for batch in range(10**9):
        keys = keys_of(*(f"{name} {batch} {i}" for i in range(BATCH)))
        while not region.reserve(keys, salt=0).all() and not (region.slots_of(keys, ready=False) >= 0).all():
            time.sleep(0.0001)
        while not region.find(keys).all():
            time.sleep(0.0001)


def rank(region: Region, number: int, name: str, write: Callable[..., None]) -> None:
    """Write what the engine reserves, batch by batch."""
    random = np.random.default_rng()
    for batch in range(10**9):
        keys = keys_of(*(f"{name} {batch} {i}" for i in range(BATCH)))
        payload = np.frombuffer(random.bytes(BATCH * SLOT), np.uint8).reshape(BATCH, SLOT)
        while ((slots := region.slots_of(keys, ready=False)) < 0).any():
            time.sleep(0.0001)
        write(region, number, slots, keys, payload)


def in_order(region: Region, number: int, slots: np.ndarray, keys: bytes, payload: np.ndarray) -> None:
    region.payload(number)[slots] = payload
    region.commit(number, slots, keys, payload_sums(region.payload(number)[slots], keys))


def done_first(region: Region, number: int, slots: np.ndarray, keys: bytes, payload: np.ndarray) -> None:
    region.commit(number, slots, keys, payload_sums(payload, keys))
    region.payload(number)[slots] = payload


def kill_writers(folder: Path, write: Callable[..., None], rounds: int, seed: int) -> tuple[int, int, int]:
    """Kill the three writers in each round. Returns kills, READY entries seen, and torn entries seen."""
    chance = random.Random(seed)
    region = Region.open(folder, "layout", 64, SLOT, RANKS)
    seen = bad = 0
    for number in range(rounds):
        name = f"{seed} {number}"
        args = [(engine, region, name)] + [(rank, region, i, name, write) for i in range(RANKS)]
        writers = [FORK.Process(target=function, args=rest) for function, *rest in args]
        for writer in writers:
            writer.start()
        batches = chance.randrange(4)  # ended before the kills
        last = keys_of(*(f"{name} {batches - 1} {i}" for i in range(BATCH)))
        while batches and not region.find(last).all():
            time.sleep(0.0001)
        chance.shuffle(writers)
        for writer in writers:
            time.sleep(chance.random() * 0.002)
            os.kill(writer.pid, signal.SIGKILL)
        for writer in writers:
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
        seen += region.figures().entries
        bad += torn(region)
        region.drop(region.entries().keys.tobytes())
    return rounds * len(writers), seen, bad


@pytest.fixture
def quick_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of dead writers are free at once. The writers of a round have all ended before the next."""
    monkeypatch.setattr(module, "_GRACE_S", 0.0)


@pytest.mark.long
@pytest.mark.parametrize("num_kills", [60, pytest.param(300, marks=pytest.mark.thorough)])
def test_kills_leave_no_wrong_entry(num_kills, tmp_path, quick_reuse):
    kills, seen, bad = kill_writers(tmp_path / "region", in_order, rounds=num_kills // 3, seed=1)
    assert (kills, bad) == (num_kills, 0)
    assert seen > num_kills // 3


@pytest.mark.long
def test_the_control_leaves_wrong_entries(tmp_path, quick_reuse):
    """Its kills are continued until one is seen, which takes a few rounds."""
    rounds = 0
    while not kill_writers(tmp_path / "region", done_first, rounds=5, seed=rounds)[2]:
        rounds += 1
        assert rounds < 100
