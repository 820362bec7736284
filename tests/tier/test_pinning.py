"""Pinning in the background, with a driver that only records calls."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.tier import pinning
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.pages import map_file
from runtime.tier.pinning import Pinned
from tests.support.engine.tier_copies import SPECS, CopiedCache
from tests.triton import INTERPRETING

SLOT_BYTES = 4096
FOREVER = 3600.0


class FakeDriver:
    """Records the pinned ranges, and maps them at their own addresses or at others."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.shift = 0  # device addresses less host addresses
        self.unpinned: list[int] = []

    def call(self, name: str, *arguments) -> None:
        if name == "cuMemHostRegister_v2":
            self.sizes.append(arguments[1].value)
        elif name == "cuMemHostGetDevicePointer_v2":
            arguments[0]._obj.value = arguments[1].value + self.shift
        elif name == "cuMemHostUnregister":
            self.unpinned.append(arguments[0].value)


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(pinning, "call", fake.call)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(pinning, "_PART_BYTES", 4 * SLOT_BYTES)
    monkeypatch.setattr(pinning, "_HELD_S", 0)
    monkeypatch.setattr(pinning, "_MOST_PAUSE_S", FOREVER)
    return fake


@pytest.fixture
def payload() -> Iterator[torch.Tensor]:
    """Ten slots of a page each."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(10 * SLOT_BYTES)
        yield torch.from_numpy(map_file(file.fileno()).view(np.int64).reshape(10, -1))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_pieces_cover_all_slots_and_are_unpinned(driver: FakeDriver, payload: torch.Tensor):
    pinned = Pinned(payload, torch.device("cuda"))
    assert pinned.num_slots == 0
    pinned.begin()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.is_whole
    assert pinned.is_mapped
    assert driver.sizes == [4 * SLOT_BYTES, 4 * SLOT_BYTES, 2 * SLOT_BYTES]
    pinned.close()
    assert len(driver.unpinned) == 3


def test_other_device_addresses_are_not_used(driver: FakeDriver, payload: torch.Tensor):
    driver.shift = 1 << 40
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.begin()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.is_whole
    assert not pinned.is_mapped
    pinned.close()


def test_pinning_pauses_and_goes_on(driver: FakeDriver, payload: torch.Tensor):
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.pause()
    pinned.pause()
    pinned.begin()
    pinned.resume()
    time.sleep(0.05)
    assert not driver.sizes, "one pause is left"
    pinned.resume()
    wait_until(lambda: pinned.is_whole)
    pinned.close()


def test_a_pause_ends_at_its_limit(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    """Copies through bounces that never end do not keep slots from being pinned."""
    monkeypatch.setattr(pinning, "_MOST_PAUSE_S", 0.001)
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.pause()
    pinned.begin()
    wait_until(lambda: pinned.is_whole)
    pinned.close()


def test_close_ends_pinning_early(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    monkeypatch.setattr(pinning, "_MOST_PAUSE_S", 0.05)
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.pause()
    pinned.begin()
    pinned.close()
    assert not pinned.is_pinning
    assert len(driver.unpinned) == len(driver.sizes) < 3


def test_an_error_leaves_the_rest_unpinned(driver: FakeDriver, payload: torch.Tensor, monkeypatch, caplog):
    def call(name: str, *arguments) -> None:
        if name == "cuMemHostRegister_v2" and driver.sizes:
            raise OSError(2, "no memory")
        driver.call(name, *arguments)

    monkeypatch.setattr(pinning, "call", call)
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.begin()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.num_slots == 4
    assert "4 of 10 slots of the tier are pinned" in caplog.text
    pinned.close()


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("is_store", [True, False])
def test_pinning_pauses_while_a_bounce_is_in_use(is_store: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Pinned, "is_whole", False)
    made = CopiedCache(tmp_path, SPECS["bfloat16"], "triton")
    copier, may_copy = made.copier, threading.Event()
    assert isinstance(copier, GpuCopier)
    copier.pinned.num_slots = 0
    made.store([(0, 1)], "a")
    plain = copier._bounce

    def bounce(*arguments, **named) -> None:
        assert may_copy.wait(60)
        plain(*arguments, **named)

    monkeypatch.setattr(copier, "_bounce", bounce)
    assert copier.pinned._may_run.is_set(), "no copy is in flight"
    transfers = made.transfers([(0, 2)], "b" if is_store else "a")
    made.start(**{"stores" if is_store else "loads": transfers})
    assert not copier.pinned._may_run.is_set()
    may_copy.set()
    made.ended(1)
    assert copier.pinned._may_run.is_set()
    copier.close()


def test_pieces_grow_while_the_driver_is_quick(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    monkeypatch.setattr(pinning, "_PART_BYTES", SLOT_BYTES)
    monkeypatch.setattr(pinning, "_HELD_S", FOREVER)
    monkeypatch.setattr(pinning, "_MOST_PARTS", 4)
    pinned = Pinned(payload, torch.device("cuda"))
    pinned.begin()
    wait_until(lambda: pinned.is_whole)
    assert [size // SLOT_BYTES for size in driver.sizes] == [1, 2, 4, 3]
    pinned.close()


def test_memory_is_populated_before_it_is_pinned():
    """Slots have pages before the driver is asked for them."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(1 << 20)
        payload = torch.from_numpy(map_file(file.fileno()).view(np.int64).reshape(16, -1))
        pinned = Pinned(payload, torch.device("cpu"))
        assert os.fstat(file.fileno()).st_blocks == 0
        pinned._populate(payload[4:8])
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 18
        pinned.close()


def test_slow_huge_pages_are_given_up(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    tried = []
    monkeypatch.setattr(pinning, "give_pages", lambda address, size, huge: tried.append(huge))
    monkeypatch.setattr(pinning, "_SLOW_S", 0)
    pinned = Pinned(payload, torch.device("cuda"))
    pinned._populate(payload[:4])
    pinned._populate(payload[4:])
    assert tried == [True, False]
