"""Pinning in the background, with a driver that only records calls."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from runtime.tier import pinning
from runtime.tier.pinning import Pinned
from runtime.tier.region_files import map_file

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
    monkeypatch.setattr(pinning, "_LEAST_BYTES", 4 * SLOT_BYTES)
    monkeypatch.setattr(pinning, "_HELD_S", 0)
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
    pinned = Pinned(payload, torch.device("cuda"), 0)
    assert pinned.num_slots == 0
    pinned.finish()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.is_whole
    assert pinned.is_mapped
    assert driver.sizes == [4 * SLOT_BYTES, 4 * SLOT_BYTES, 2 * SLOT_BYTES]
    pinned.close()
    assert len(driver.unpinned) == 3


def test_other_device_addresses_are_not_used(driver: FakeDriver, payload: torch.Tensor):
    driver.shift = 1 << 40
    pinned = Pinned(payload, torch.device("cuda"), 0)
    pinned.finish()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.is_whole
    assert not pinned.is_mapped
    pinned.close()


@pytest.mark.parametrize(("num_backed", "num_first"), [(1, 4), (4, 4), (5, 8), (10, 10)])
def test_backed_slots_are_pinned_before_the_runner_is_ready(num_backed, num_first, driver, payload, monkeypatch):
    for name in ("_HELD_S", "_START_HELD_S"):
        monkeypatch.setattr(pinning, name, FOREVER)  # pieces grow
    pinned = Pinned(payload, torch.device("cuda"), num_backed)
    wait_until(lambda: pinned.num_slots == num_first)
    time.sleep(0.05)
    assert pinned.num_slots == num_first
    num_pieces = len(driver.sizes)
    pinned.finish()
    wait_until(lambda: pinned.is_whole)
    assert sum(driver.sizes) == 10 * SLOT_BYTES
    assert max(driver.sizes[num_pieces:][:1], default=0) <= 4 * SLOT_BYTES, "steps begin: pieces are small again"
    pinned.close()


def test_pinning_pauses_while_pinned_slots_are_loaded(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    monkeypatch.setattr(pinning, "_QUIET_S", FOREVER)
    pinned = Pinned(payload, torch.device("cuda"), 4)
    wait_until(lambda: pinned.num_slots == 4)
    pinned.note_copy(is_load=True, is_bounced=False)
    pinned.finish()
    time.sleep(0.05)
    assert pinned.num_slots == 4
    pinned.note_copy(is_load=False, is_bounced=True)
    wait_until(lambda: pinned.is_whole)
    pinned.close()


@pytest.mark.parametrize("num_backed", [0, 4, 10])
def test_close_ends_pinning_at_any_time(num_backed: int, driver: FakeDriver, payload: torch.Tensor):
    pinned = Pinned(payload, torch.device("cuda"), num_backed)
    pinned.note_copy(is_load=True, is_bounced=False)
    pinned.close()
    assert not pinned.is_pinning
    assert len(driver.unpinned) == len(driver.sizes)


def test_an_error_leaves_the_rest_unpinned(driver: FakeDriver, payload: torch.Tensor, monkeypatch, caplog):
    def call(name: str, *arguments) -> None:
        if name == "cuMemHostRegister_v2" and driver.sizes:
            raise OSError(2, "no memory")
        driver.call(name, *arguments)

    monkeypatch.setattr(pinning, "call", call)
    pinned = Pinned(payload, torch.device("cuda"), 0)
    pinned.finish()
    wait_until(lambda: not pinned.is_pinning)
    assert pinned.num_slots == 4
    assert "4 of 10 slots of the tier are pinned" in caplog.text
    pinned.close()


def test_pieces_grow_while_the_driver_is_quick(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    monkeypatch.setattr(pinning, "_LEAST_BYTES", SLOT_BYTES)
    monkeypatch.setattr(pinning, "_HELD_S", FOREVER)
    monkeypatch.setattr(pinning, "_MOST_COUNT", 4)
    pinned = Pinned(payload, torch.device("cuda"), 0)
    pinned.finish()
    wait_until(lambda: pinned.is_whole)
    assert [size // SLOT_BYTES for size in driver.sizes] == [1, 2, 4, 3]
    pinned.close()


def test_memory_is_populated_before_it_is_pinned():
    """Slots have pages before the driver is asked for them."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(1 << 20)
        payload = torch.from_numpy(map_file(file.fileno()).view(np.int64).reshape(16, -1))
        pinned = Pinned(payload, torch.device("cpu"), 0)
        assert os.fstat(file.fileno()).st_blocks == 0
        pinned._populate(payload[4:8])
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 18
        pinned.close()


def test_slow_huge_pages_are_given_up(driver: FakeDriver, payload: torch.Tensor, monkeypatch):
    tried = []
    monkeypatch.setattr(pinning, "give_pages", lambda memory, huge: tried.append(huge))
    monkeypatch.setattr(pinning, "_SLOW_S", 0)
    pinned = Pinned(payload, torch.device("cuda"), 0)
    pinned._populate(payload[:4])
    pinned._populate(payload[4:])
    assert tried == [True, False]
