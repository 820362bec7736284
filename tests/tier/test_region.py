"""Regions of the tier: entries, what makes room, deaths, memory."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.tier import region as module
from runtime.tier.region import Region, RegionBusy
from runtime.tier.region_files import WAYS
from tests.tier.regions import keys_of, one_by_one, payload_of, store, torn, write

SLOT = 4096


class Clock:
    """Stands for the module `time`, and stops."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.monotonic, self.sleep = lambda: 0.0, lambda s: None

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "time", clock := Clock())
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "base" / "app-1234"


@pytest.fixture
def region(folder: Path) -> Region:
    return Region.open(folder, "layout", 1024, SLOT, 2)


@pytest.fixture
def one_set(folder: Path, clock: Clock) -> Region:
    """A region in which all keys share its ways."""
    return Region.open(folder, "layout", WAYS, SLOT, 1)


def found(region: Region, keys: bytes) -> list[bool]:
    return region.find(keys).tolist()


# ---- entries --------------------------------------------------------------------------------------------------------


def test_an_entry_is_found_once_all_ranks_have_written(region):
    keys = keys_of(*range(50))
    assert region.reserve(keys, salt=0).all()
    assert not region.reserve(keys, salt=0).any()
    write(region, keys, [0])
    assert not region.find(keys).any()
    slots = write(region, keys, [1])
    assert region.find(keys).all()
    assert (region.slots_of(keys, ready=True) == slots).all()
    assert (region.slots_of(keys, ready=False) == -1).all()
    assert region.figures().used_bytes == 50 * 2 * SLOT


def test_a_second_region_object_finds_what_is_stored(region, folder):
    store(region, keys_of(1, 2, 3))
    other = Region.open(folder, "layout", 1024, SLOT, 2)
    region.close()
    assert found(other, keys_of(1, 2, 3, 4)) == [True, True, True, False]
    slot = other.slots_of(keys_of(2), ready=True)
    assert bytes(other.payload(1)[slot[0]]) == bytes(payload_of(keys_of(2), 1, SLOT))


def test_entries_are_listed_from_the_oldest_use(region, clock):
    for name in range(3):
        clock.now += 1
        store(region, keys_of(name))
    clock.now += 1
    region.touch(keys_of(0))
    region.reserve(keys_of("reserved"), salt=0)
    entries = region.entries()
    keys = entries.keys.tobytes()
    assert keys == keys_of(1, 2, 0)
    assert (entries.slots == region.slots_of(keys, ready=True)).all()


def test_a_key_is_reserved_once_in_a_batch(region):
    assert region.reserve(keys_of(1, 1, 2), salt=0).tolist() == [True, False, True]


def test_a_dropped_entry_is_a_miss(region):
    store(region, keys_of(1, 2))
    region.drop(keys_of(1, 3))
    assert found(region, keys_of(1, 2)) == [False, True]
    assert store(region, keys_of(1)) == [keys_of(1)]


def test_a_late_write_to_a_slot_given_away_is_left_out(region):
    keys = keys_of(1)
    region.reserve(keys, salt=0)
    slots = region.slots_of(keys, ready=False)
    region.drop(keys)
    for rank in range(2):
        region.commit(rank, slots, keys, np.zeros(1, np.uint64))
    assert not region.has_keys(slots, keys).any()
    assert region.figures().entries == 0


def test_no_slot_has_no_key(region):
    assert not region.has_keys(np.array([-1]), keys_of(1)).any()


def test_a_flipped_bit_does_not_fit_the_sum(region):
    store(region, keys_of(*range(20)))
    assert torn(region) == 0
    slots = region.slots_of(keys_of(*range(20)), ready=True)
    for number, slot in enumerate(slots):
        region.payload(1)[slot, 200 * number] ^= 1 << number % 8
    assert torn(region) == 20


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_history_equals_a_dict(tmp_path_factory, data):
    """A region never finds what was not stored. It forgets only to make room, and has the bytes of the key."""
    num_slots = data.draw(st.sampled_from([32, 64, 1024]))
    region = Region.open(tmp_path_factory.mktemp("any") / "r", "layout", num_slots, 64, data.draw(st.integers(1, 3)))
    stored: set[bytes] = set()
    reserved: set[bytes] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        names = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=30))
        keys = keys_of(*names)
        action = data.draw(st.sampled_from(["reserve", "write", "drop", "touch", "reopen"]))
        if action == "reserve":
            taken = region.reserve(keys, data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, 1, 2**32 - 1])))
            new = {key for key, is_taken in zip(one_by_one(keys), taken, strict=True) if is_taken}
            assert len(new) == taken.sum()
            assert not new & (reserved | {key for key in stored if region.find(key)[0]})
            reserved |= new
        elif action == "write" and reserved:
            write(region, b"".join(sorted(reserved)))
            stored, reserved = stored | reserved, set()
        elif action == "drop":
            region.drop(keys)
            stored, reserved = stored - set(one_by_one(keys)), reserved - set(one_by_one(keys))
        elif action == "touch":
            region.touch(keys)
        elif action == "reopen":
            region = Region.open(region.folder, "layout", num_slots, 64, region.num_ranks)
        everything = keys_of(*range(61))
        ready = {key for key, is_ready in zip(one_by_one(everything), region.find(everything), strict=True) if is_ready}
        assert ready <= stored
        assert ready == stored or num_slots < 1024
        assert (region.slots_of(b"".join(reserved), ready=False) >= 0).all()
        assert region.figures().entries == len(ready)
        for key in ready:
            slot = region.slots_of(key, ready=True)[0]
            assert all(bytes(region.payload(r)[slot]) == bytes(payload_of(key, r, 64)) for r in range(region.num_ranks))


def test_a_prompt_of_6250_blocks_is_looked_up_at_once(folder, monkeypatch):
    """Python calls are counted: they do not depend on the number of keys."""
    region = Region.open(folder, "layout", 16384, 64, 1)
    keys = np.random.default_rng(0).bytes(16 * 6250)
    region.reserve(keys, salt=0)
    slots = region.slots_of(keys, ready=False)
    region.commit(0, slots, keys, np.zeros(6250, np.uint64))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    ready = region.find(keys)
    sys.setprofile(None)
    assert ready.mean() > 0.99
    assert calls < 60


# ---- what makes room ------------------------------------------------------------------------------------------------


def test_the_least_recently_used_entry_makes_room(one_set, clock):
    for name in range(WAYS):
        clock.now += 1
        store(one_set, keys_of(name))
    clock.now += 1
    one_set.touch(keys_of(0))
    store(one_set, keys_of("new"))
    assert found(one_set, keys_of(0, 1, 2, "new")) == [True, False, True, True]


def test_whole_prefixes_are_kept_in_the_order_of_use(folder, clock):
    """A key has two sets, and takes the older way of both: so all sets keep entries for nearly the same time."""
    region = Region.open(folder, "layout", 4096, 64, 1)
    prompts = [keys_of(*(f"{number} {i}" for i in range(900))) for number in range(12)]
    for keys in prompts:
        clock.now += 1
        for at in range(0, len(keys), 16 * 100):
            store(region, keys[at : at + 16 * 100])
    assert [region.find(keys).all() for keys in prompts[-3:]] == [True] * 3
    assert region.figures().entries > 0.99 * 4096


def test_a_flood_leaves_half_of_the_region_to_others(folder, clock):
    region = Region.open(folder, "layout", 4096, 64, 1)
    store(region, keys := keys_of(*range(1500)), salt=1)
    for number in range(80):
        clock.now += 1
        store(region, keys_of(*(f"{number} {i}" for i in range(100))), salt=2)
    assert region.find(keys).mean() > 0.98


def test_an_entry_that_is_stored_again_counts_as_used(one_set, clock):
    store(one_set, keys_of(*range(WAYS)))
    clock.now += 1
    assert not one_set.reserve(keys_of(0), salt=0).any()
    store(one_set, keys_of(*(f"new {i}" for i in range(WAYS - 1))))
    assert found(one_set, keys_of(0, 1)) == [True, False]


def test_a_prefix_loses_its_last_blocks_first(one_set, clock):
    keys = keys_of(*range(WAYS))
    store(one_set, keys)
    one_set.touch(keys)
    store(one_set, keys_of("a", "b"))
    assert found(one_set, keys) == [True] * (WAYS - 2) + [False] * 2


def test_a_touch_counts_for_own_reservations(one_set, clock):
    """A prefix is touched after its last blocks are reserved, and the first ones may still be written."""
    one_set.reserve(keys_of("head"), salt=0)
    clock.now += 1
    store(one_set, keys_of("tail"))
    one_set.touch(keys_of("head", "tail"))
    write(one_set, keys_of("head"))
    store(one_set, keys_of(*range(WAYS - 1)))
    assert found(one_set, keys_of("head", "tail")) == [True, False]


def test_an_expired_entry_counts_as_one_without_lifetime(one_set, clock):
    store(one_set, keys_of("first"))
    clock.now += 1
    store(one_set, keys_of("hinted"), expires=clock.now + 5)
    clock.now += 1
    store(one_set, keys_of(*range(WAYS - 2)))
    clock.now += 10
    store(one_set, keys_of("new"))
    assert found(one_set, keys_of("first", "hinted", *range(WAYS - 2))) == [False] + [True] * (WAYS - 1)
    one_set.touch(keys_of("hinted"))
    store(one_set, keys_of("newer"))
    assert found(one_set, keys_of("hinted", *range(WAYS - 2))).count(False) == 1
    assert found(one_set, keys_of("hinted")) == [True]


def test_lifetimes_keep_at_most_half_of_the_ways(one_set, clock):
    for name in range(WAYS // 2 + 1):
        clock.now += 1
        store(one_set, keys_of(name), expires=clock.now + 3600)
    for name in range(WAYS):
        clock.now += 1
        store(one_set, keys_of("other", name))
    assert found(one_set, keys_of(*range(WAYS // 2 + 1))) == [False] + [True] * (WAYS // 2)


def test_a_flood_of_lifetimes_does_not_hold_the_region(folder, clock):
    region = Region.open(folder, "layout", 4096, 64, 1)
    for number in range(60):
        clock.now += 1
        store(region, keys_of(*(f"{number} {i}" for i in range(100))), expires=clock.now + 86_400)
    store(region, keys := keys_of(*range(1500)))
    clock.now += 1
    for number in range(60, 80):
        store(region, keys_of(*(f"{number} {i}" for i in range(100))), expires=clock.now + 86_400)
    assert region.find(keys).mean() > 0.98


def test_an_entry_with_a_hint_is_kept_the_longest(one_set, clock):
    store(one_set, keys_of("early"), expires=clock.now + 3600)
    store(one_set, keys_of("late"))
    one_set.touch(keys_of("late"), expires=clock.now + 3600)
    for name in range(2 * WAYS):
        clock.now += 1
        store(one_set, keys_of(name))
    assert found(one_set, keys_of("early", "late", 2 * WAYS - 1, 0)) == [True, True, True, False]


def test_a_shorter_lifetime_does_not_replace_a_longer_one(one_set, clock):
    store(one_set, keys_of("hinted"), expires=clock.now + 3600)
    one_set.touch(keys_of("hinted"), expires=clock.now + 300)
    assert one_set.entries().expires.tolist() == [int(clock.now + 3600)]


def test_entries_being_written_are_never_given_away(one_set, clock):
    assert one_set.reserve(keys_of(*range(WAYS)), salt=0).all()
    clock.now += 1e6
    assert not one_set.reserve(keys_of("new"), salt=0).any()
    write(one_set, keys_of(3))
    assert one_set.reserve(keys_of("new"), salt=0).all()


def test_one_salt_takes_half_while_others_are_used(one_set, clock):
    store(one_set, keys_of(*range(WAYS // 2)), salt=1)
    for name in range(100):
        clock.now += 1
        store(one_set, keys_of("flood", name), salt=2)
    assert all(found(one_set, keys_of(*range(WAYS // 2))))


def test_one_salt_takes_all_if_others_are_idle(one_set, clock):
    store(one_set, keys_of(*range(WAYS // 2)), salt=1)
    clock.now += 601
    store(one_set, keys_of(*range(100, 100 + WAYS)), salt=2)
    assert all(found(one_set, keys_of(*range(100, 100 + WAYS))))


def in_child(act) -> int:
    """Run a function in a forked process, and return its id after its end."""
    if (child := os.fork()) == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_dead_writers_slots_are_free_again(one_set, clock):
    in_child(lambda: one_set.reserve(keys_of(*range(WAYS)), salt=0))
    assert not one_set.reserve(keys_of("new"), salt=0).any()  # the runners may be writing
    clock.now += 6
    assert one_set.reserve(keys_of("new", 3), salt=0).all()


def test_a_process_of_the_same_id_is_not_the_owner(one_set, clock, monkeypatch):
    in_child(lambda: one_set.reserve(keys_of(*range(WAYS)), salt=0))
    clock.now += 6
    monkeypatch.setattr(module, "start_time", lambda pid: 1)  # lives, but has started at another time
    assert one_set.reserve(keys_of("new"), salt=0).all()


def test_a_drop_leaves_other_processes_reservations(region):
    in_child(lambda: region.reserve(keys_of(1), salt=0))
    region.drop(keys_of(1))
    assert region.slots_of(keys_of(1), ready=False) >= 0


def test_a_forked_child_shares_the_region(region):
    store(region, keys_of(1))
    in_child(lambda: store(region, keys_of(2)))
    assert found(region, keys_of(1, 2)) == [True, True]
    assert torn(region) == 0


def test_a_stopped_lock_holder_delays_no_process(region):
    """Reservations are refused meanwhile, and all else works."""
    store(region, keys_of(1))
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with region._try_lock():
            os.write(writer, b"1")
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
    os.read(reader, 1)
    os.waitpid(child, os.WUNTRACED)
    try:
        with pytest.raises(RegionBusy):
            region.reserve(keys_of(2), salt=0)
        assert region.find(keys_of(1)).all()
        region.touch(keys_of(1))
        region.drop(keys_of(1))
        assert not region.find(keys_of(1)).any()
        Region.open(region.folder, "layout", 1024, SLOT, 2).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert region.reserve(keys_of(2), salt=0).all()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_first_ways_are_filled_first(folder):
    """So a process that pins the slots with memory pins little else."""
    region = Region.open(folder, "layout", 8 * WAYS, 4096, 1)
    assert region.num_backed == 0
    for number in range(32):
        store(region, keys_of(number))
    assert 32 <= region.num_backed <= 8 * 7
    assert Region.open(folder, "layout", 8 * WAYS, 4096, 1).num_backed == region.num_backed
    assert region.slots_of(keys_of(*range(32)), ready=True).max() < region.num_backed


def test_a_slot_without_memory_is_not_reserved(region, monkeypatch):
    """A write to it would end the process with SIGBUS."""
    region.reserve(keys_of(1), salt=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not region.reserve(keys_of(2, 3), salt=0).any()
    write(region, keys_of(1))
    assert region.find(keys_of(1)).all()


def test_free_slots_with_memory_are_taken_first(one_set):
    store(one_set, keys_of(1))
    one_set.drop(keys_of(1))
    slot = one_set.reserve(keys_of(2), salt=0) and one_set.slots_of(keys_of(2), ready=False)
    assert slot == [0]


def test_a_wiped_region_frees_its_memory_though_mapped(region, folder):
    keys = keys_of(*range(10))
    slots = write(region, keys) if region.reserve(keys, salt=0).all() else None
    files = [os.open(folder / f"payload-{rank}", os.O_RDONLY) for rank in range(2)]
    Region.wipe(folder)
    assert not folder.exists()
    assert [os.fstat(file).st_blocks for file in files] == [0, 0]
    assert not region.find(keys).any()
    assert not region.payload(0)[slots].any()
    store(region, keys)  # the processes that have it mapped go on alone
    Region.wipe(folder)
