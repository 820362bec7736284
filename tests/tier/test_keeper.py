"""The tier on disk: copies in both directions, their faults, and the death of keepers and engines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.base.model_info import TierInfo
from runtime.tier import region as region_module
from runtime.tier.disk import keeper as module
from runtime.tier.disk.keeper import Disk, load, save
from runtime.tier.region import Region, start_time
from tests.tier.regions import keys_of, payload_of, store, torn

SLOT, SLOTS, RANKS = 4096, 256, 2
LAYOUT = "layout"


def open_ram(folder: Path) -> Region:
    return Region.open(folder / "ram" / "app-1", LAYOUT, SLOTS, SLOT, RANKS)


def open_disk(folder: Path) -> Region:
    return Region.open(folder / "disk" / "app-1", LAYOUT, 4 * SLOTS, SLOT, RANKS)


def tier_info(ram: Region) -> TierInfo:
    return TierInfo(str(ram.folder), LAYOUT, SLOT, SLOTS, RANKS)


@pytest.fixture
def ram(tmp_path: Path) -> Region:
    return open_ram(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Region:
    """The region on disk. A keeper keeps its size."""
    return open_disk(tmp_path)


def has_right_bytes(region: Region, keys: bytes) -> bool:
    slots = region.slots_of(keys, ready=True)
    return all(
        bytes(region.payload(rank)[slot]) == bytes(payload_of(keys[16 * i : 16 * i + 16], rank, SLOT))
        for rank in range(RANKS)
        for i, slot in enumerate(slots)
    )


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_entries_return_from_disk(ram, disk):
    keys = keys_of(*range(50))
    store(ram, keys)
    save(ram, disk, keys + keys_of("unknown"), salt=7, expires=2_000_000_000)
    assert disk.find(keys).all()
    found = disk.entries()
    assert set(found.salts.tolist()) == {7}
    assert set(found.expires.tolist()) == {2_000_000_000}
    ram.drop(keys)
    load(disk, ram, keys, salt=7, expires=0)
    assert ram.find(keys).all()
    assert has_right_bytes(ram, keys)
    assert torn(ram) == torn(disk) == 0


def test_entries_that_are_there_are_not_copied(ram, disk, monkeypatch):
    store(ram, keys_of(1))
    save(ram, disk, keys_of(1), salt=0, expires=0)
    monkeypatch.setattr(os, "pwrite", None)
    monkeypatch.setattr(os, "preadv", None)
    save(ram, disk, keys_of(1), salt=0, expires=0)
    load(disk, ram, keys_of(1), salt=0, expires=0)


def test_a_flipped_bit_on_disk_is_a_miss(ram, disk):
    keys = keys_of(*range(10))
    store(ram, keys)
    save(ram, disk, keys, salt=0, expires=0)
    ram.drop(keys)
    disk.payload(1)[disk.slots_of(keys_of(3), ready=True), 9] ^= 16
    load(disk, ram, keys, salt=0, expires=0)
    assert ram.find(keys).tolist() == disk.find(keys).tolist() == [i != 3 for i in range(10)]
    assert ram.slots_of(keys_of(3), ready=False) == -1


def test_a_flipped_bit_in_ram_is_not_copied(ram, disk):
    keys = keys_of(*range(10))
    store(ram, keys)
    ram.payload(0)[ram.slots_of(keys_of(3), ready=True), 9] ^= 16
    save(ram, disk, keys, salt=0, expires=0)
    assert ram.find(keys).tolist() == disk.find(keys).tolist() == [i != 3 for i in range(10)]


def test_a_slot_given_away_meanwhile_is_not_copied(ram, disk, monkeypatch):
    store(ram, keys_of(1, 2))
    pwrite = os.pwrite

    def write_late(*args) -> int:
        ram.drop(keys_of(1))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write_late)
    save(ram, disk, keys_of(1, 2), salt=0, expires=0)
    assert disk.find(keys_of(1, 2)).tolist() == [False, True]
    assert disk.slots_of(keys_of(1), ready=False) == -1


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fdatasync"])
def test_a_full_disk_costs_only_hits(ram, disk, monkeypatch, call):
    store(ram, keys_of(1, 2))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        save(ram, disk, keys_of(1, 2), salt=0, expires=0)
    assert not disk.find(keys_of(1, 2)).any()
    assert ram.find(keys_of(1, 2)).all()
    monkeypatch.setattr(disk, "_full_until", 0)
    save(ram, disk, keys_of(1, 2), salt=0, expires=0)
    assert disk.find(keys_of(1, 2)).all()


def test_a_file_size_limit_costs_only_hits(tmp_path, ram, disk):
    """The kernel refuses the write, as on a file system that does not keep what fallocate has given."""
    store(ram, keys_of(*range(40)))
    code = f"""
import os, resource
from pathlib import Path
from runtime.tier.disk.keeper import save
from tests.tier.regions import keys_of
from tests.tier.test_keeper import open_disk, open_ram
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * {SLOT}, 4 * {SLOT}))
os.posix_fallocate = lambda *_: None
save(open_ram(Path({str(tmp_path)!r})), open_disk(Path({str(tmp_path)!r})), keys_of(*range(40)), 0, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not disk.find(keys_of(*range(40))).any()


def test_an_unreadable_disk_costs_only_hits(ram, disk, monkeypatch):
    store(ram, keys_of(1))
    save(ram, disk, keys_of(1), salt=0, expires=0)
    ram.drop(keys_of(1))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    load(disk, ram, keys_of(1), salt=0, expires=0)
    assert ram.slots_of(keys_of(1), ready=False) == -1
    assert not ram.find(keys_of(1)).any()


class Pause(Exception):
    """Ends `_save_new`, which runs for ever."""


def run_passes(
    ram: Region, disk: Region, monkeypatch: pytest.MonkeyPatch, between: list[Callable[[], object]]
) -> float:
    """Run passes of a keeper, with an act after each. Returns the seconds of its pauses between batches."""
    paused = 0.0
    acts = iter(between)

    def sleep(seconds: float) -> None:
        nonlocal paused
        if seconds != module._PASS_S:
            paused += seconds
        elif (act := next(acts, None)) is None:
            raise Pause
        else:
            act()

    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", sleep)
        with pytest.raises(Pause):
            module._save_new(ram, disk, write_rate=1000.0)
    return paused


def test_bytes_a_second_to_disk_are_bounded(ram, disk, monkeypatch):
    store(ram, keys_of(*range(30)))
    store(ram, keys_of(*range(30, 40)), salt=5, expires=2_000_000_000)
    monkeypatch.setattr(module, "_BATCH_BYTES", 8 * SLOT * RANKS)
    assert run_passes(ram, disk, monkeypatch, []) == pytest.approx(40 * SLOT * RANKS / 1000.0)
    found = disk.entries()
    assert sorted(zip(found.salts.tolist(), found.expires.tolist(), strict=True)) == [(0, 0)] * 30 + [(5, 2e9)] * 10


def test_an_entry_is_copied_once(ram, disk, monkeypatch):
    """A small disk would otherwise exchange the same entries for ever."""
    store(ram, keys_of(1, 2))
    acts = [lambda: disk.drop(keys_of(1)), lambda: store(ram, keys_of(3))]
    assert run_passes(ram, disk, monkeypatch, acts) == pytest.approx(3 * SLOT * RANKS / 1000.0)
    assert disk.find(keys_of(1, 2, 3)).tolist() == [False, True, True]


def test_uses_in_ram_count_on_disk(ram, disk, monkeypatch):
    store(ram, keys_of(1))
    store(ram, keys_of(2))
    run_passes(ram, disk, monkeypatch, [lambda: ram.touch(keys_of(1))])
    assert disk.entries().keys.tobytes() == keys_of(2, 1)


# ---- processes ------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def engine_disk(tmp_path: Path, ram: Region, disk: Region, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(module, "_RESTART_S", 0.01)
    yield (found := Disk(tier_info(ram), tmp_path / "disk", write_rate=1e12))
    found.close()


def test_a_keeper_fills_the_disk_and_a_new_region(tmp_path, ram, engine_disk):
    keys = keys_of(*range(100))
    store(ram, keys)
    until(lambda: engine_disk.find(keys).all())
    engine_disk.close()
    ram.close()
    Region.wipe(ram.folder)

    ram = open_ram(tmp_path)
    assert not ram.find(keys).any()
    again = Disk(tier_info(ram), tmp_path / "disk")
    assert again.find(keys).all()
    until(lambda: (number := again.request(keys + keys_of("unknown"), 0)) and number)
    until(lambda: again.has_ended(again._last))
    assert ram.find(keys).all()
    assert has_right_bytes(ram, keys)
    again.close()


def test_the_rate_is_measured_once_the_disk_has_entries(monkeypatch, ram, engine_disk):
    monkeypatch.setattr("runtime.tier.disk.rate.LEAST_BYTES", 50 * ram.slot_bytes)
    assert engine_disk.read_rate == 0
    store(ram, keys_of(*range(100)))
    until(lambda: engine_disk.read_rate > 0)


def test_long_requests_are_divided(ram, engine_disk):
    keys = np.random.default_rng(0).bytes(16 * 10_000)
    number = 0

    def requested() -> bool:
        nonlocal number
        number = engine_disk.request(keys, 0)
        return number > 0

    until(requested)
    assert number >= 3
    until(lambda: engine_disk.has_ended(number))


def test_a_killed_keeper_is_replaced(ram, engine_disk):
    os.kill(engine_disk._process.pid, signal.SIGSTOP)
    number = engine_disk.request(keys_of(1), 0)
    assert not engine_disk.has_ended(number)
    first = engine_disk._process
    first.kill()
    until(lambda: engine_disk.has_ended(number))
    until(lambda: engine_disk._process is not first)
    store(ram, keys_of(1))
    until(lambda: engine_disk.find(keys_of(1)).all())


def test_a_stopped_keeper_delays_no_request(engine_disk):
    os.kill(engine_disk._process.pid, signal.SIGSTOP)
    keys = np.random.default_rng(0).bytes(16 * 4096)
    until(lambda: not engine_disk.request(keys, 0))


def test_a_keeper_ends_with_its_engine_and_another_goes_on(tmp_path, ram, disk):
    code = f"""
import time
from pathlib import Path
from runtime.tier.disk.keeper import Disk
from tests.tier.test_keeper import open_ram, tier_info
disk = Disk(tier_info(open_ram(Path({str(tmp_path)!r}))), Path({str(tmp_path / "disk")!r}), 1e12)
print(disk._process.pid, flush=True)
time.sleep(1e6)
"""
    engines, keepers = [], []
    for number in range(2):
        engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        engines.append(engine)
        keepers.append(int(engine.stdout.readline()))
        store(ram, keys_of(number))
        until(lambda: disk.find(keys_of(number)).all())  # noqa: B023
    engines[0].kill()
    engines[0].wait()
    until(lambda: not start_time(keepers[0]))
    store(ram, keys_of("later"))
    until(lambda: disk.find(keys_of("later")).all())
    engines[1].kill()
    engines[1].wait()
    until(lambda: not start_time(keepers[1]))
    for engine in engines:
        engine.stdout.close()


@pytest.mark.long
def test_killed_keepers_leave_no_wrong_entry(tmp_path, ram, disk, monkeypatch):
    """Keepers are killed while they copy in both directions."""
    monkeypatch.setattr(region_module, "_GRACE_S", 0.0)
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    engine = Disk(tier_info(ram), tmp_path / "disk", write_rate=1e12)
    for round in range(20):
        keys = keys_of(*(f"{round} {i}" for i in range(60)))
        store(ram, keys)
        until(lambda: engine.find(keys).any())  # noqa: B023
        engine._process.kill()
        ram.drop(keys[: 16 * 30])
        until(lambda: engine.request(keys, 0))  # noqa: B023
        if round % 2:
            engine._process.kill()
        else:
            until(lambda: engine.has_ended(engine._last))
        assert torn(ram) == torn(disk) == 0
    engine.close()
