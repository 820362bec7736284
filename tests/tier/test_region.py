"""Regions of the tier: what is found, given away, kept and refused."""

import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.errors import CallboardError
from runtime.tier import region as module
from runtime.tier.region import Region
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
    """A region in which all keys share 16 ways."""
    return Region.open(folder, "layout", 16, SLOT, 1)


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
    num_slots = data.draw(st.sampled_from([16, 64, 1024]))
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
    """A look-up has no Python loop over keys."""
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
    for name in range(16):
        clock.now += 1
        store(one_set, keys_of(name))
    clock.now += 1
    one_set.touch(keys_of(0))
    store(one_set, keys_of("new"))
    assert found(one_set, keys_of(0, 1, 2, "new")) == [True, False, True, True]


def test_a_prefix_loses_its_last_blocks_first(one_set, clock):
    keys = keys_of(*range(16))
    store(one_set, keys)
    one_set.touch(keys)
    store(one_set, keys_of("a", "b"))
    assert found(one_set, keys) == [True] * 14 + [False] * 2


def test_an_expired_entry_makes_room_first(one_set, clock):
    store(one_set, keys_of("hinted"), expires=clock.now + 5)
    clock.now += 1
    store(one_set, keys_of(*range(15)))
    clock.now += 10
    store(one_set, keys_of("new"))
    assert found(one_set, keys_of("hinted", *range(15))) == [False] + [True] * 15


def test_an_entry_with_a_hint_is_kept_the_longest(one_set, clock):
    store(one_set, keys_of("early"), expires=clock.now + 3600)
    store(one_set, keys_of("late"))
    one_set.touch(keys_of("late"), expires=clock.now + 3600)
    for name in range(40):
        clock.now += 1
        store(one_set, keys_of(name))
    assert found(one_set, keys_of("early", "late", 39, 0)) == [True, True, True, False]


def test_entries_being_written_are_never_given_away(one_set, clock):
    assert one_set.reserve(keys_of(*range(16)), salt=0).all()
    clock.now += 1e6
    assert not one_set.reserve(keys_of("new"), salt=0).any()
    write(one_set, keys_of(3))
    assert one_set.reserve(keys_of("new"), salt=0).all()


def test_one_salt_takes_half_while_others_are_used(one_set, clock):
    store(one_set, keys_of(*range(8)), salt=1)
    for name in range(100):
        clock.now += 1
        store(one_set, keys_of("flood", name), salt=2)
    assert all(found(one_set, keys_of(*range(8))))


def test_one_salt_takes_all_if_others_are_idle(one_set, clock):
    store(one_set, keys_of(*range(8)), salt=1)
    clock.now += 601
    store(one_set, keys_of(*range(100, 116)), salt=2)
    assert all(found(one_set, keys_of(*range(100, 116))))


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
    in_child(lambda: one_set.reserve(keys_of(*range(16)), salt=0))
    assert not one_set.reserve(keys_of("new"), salt=0).any()  # the runners may be writing
    clock.now += 6
    assert one_set.reserve(keys_of("new", 3), salt=0).all()


def test_a_process_of_the_same_id_is_not_the_owner(one_set, clock, monkeypatch):
    in_child(lambda: one_set.reserve(keys_of(*range(16)), salt=0))
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
    """It is only that nothing can be reserved."""
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
        assert not region.reserve(keys_of(2), salt=0).any()
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


def test_prefault_allocates_all_and_does_it_once(region, folder, monkeypatch):
    region.prefault(threading.Event())
    size = 1024 * SLOT
    assert [(folder / f"payload-{rank}").stat().st_blocks * 512 >= size for rank in range(2)] == [True, True]
    monkeypatch.setattr(os, "posix_fallocate", None)
    region.prefault(threading.Event())


def test_prefault_can_be_stopped(region, folder):
    stop = threading.Event()
    stop.set()
    region.prefault(stop)
    assert (folder / "payload-0").stat().st_blocks == 0


def test_a_slot_without_memory_is_not_reserved(region, monkeypatch):
    """A write to it would end the process with SIGBUS."""
    region.reserve(keys_of(1), salt=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not region.reserve(keys_of(2, 3), salt=0).any()
    write(region, keys_of(1))
    assert region.find(keys_of(1)).all()
    region.prefault(threading.Event())


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


# ---- files ----------------------------------------------------------------------------------------------------------


def test_only_the_owner_may_read_the_files(region, folder):
    old = os.umask(0)
    try:
        Region.wipe(folder)
        folder.parent.rmdir()
        Region.open(folder, "layout", 1024, SLOT, 2)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_open_to_others_is_refused(region, folder):
    folder.chmod(0o750)
    with pytest.raises(CallboardError, match="other users have access to it; give it another folder"):
        Region.open(folder, "layout", 1024, SLOT, 2)


def test_too_little_memory_is_one_sentence(folder):
    with pytest.raises(CallboardError, match=r"GiB free and the KV tier needs \d+\.\d\d: make the tier smaller, or"):
        Region.open(folder, "layout", 2**40, SLOT, 1)
    assert not folder.exists()


def test_a_file_size_limit_is_one_sentence(folder):
    code = f"""
import resource
from pathlib import Path
from runtime.tier.region import Region
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
Region.open(Path({str(folder)!r}), "layout", 1024, {SLOT}, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "CallboardError: The KV tier cannot use" in done.stderr
    assert "File too large; give it another folder, or switch it off." in done.stderr
    assert list(folder.parent.iterdir()) == []


def test_a_read_only_folder_is_one_sentence(folder, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CallboardError, match="Read-only file system; give it another folder, or switch it off"):
        Region.open(folder, "layout", 1024, SLOT, 1)


def test_a_region_has_at_least_one_set(folder):
    with pytest.raises(CallboardError, match="needs room for 16 blocks"):
        Region.open(folder, "layout", 15, SLOT, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "head").write_bytes(b""),
        lambda folder: (folder / "head").write_bytes((folder / "head").read_bytes()[:-3]),
        lambda folder: (folder / "head").write_bytes(os.urandom(100)),
        lambda folder: (folder / "head").unlink(),
        lambda folder: (folder / "payload-1").unlink(),
        lambda folder: os.truncate(folder / "payload-0", 77),
        lambda folder: os.truncate(folder / "sums-0", 2**20),
    ],
)
def test_a_damaged_region_is_replaced(region, folder, damage):
    store(region, keys_of(1))
    region.close()
    damage(folder)
    new = Region.open(folder, "layout", 1024, SLOT, 2)
    assert not new.find(keys_of(1)).any()
    assert store(new, keys_of(1))


def test_random_bytes_in_the_index_cost_only_hits(region, folder):
    keys = keys_of(*range(300))
    store(region, keys)
    (folder / "slots").write_bytes(os.urandom((folder / "slots").stat().st_size))
    assert not region.find(keys).any()
    store(region, keys)
    assert torn(region) == 0


def test_another_size_replaces_a_region_without_users(region, folder):
    store(region, keys_of(1))
    used = Region.open(folder, "layout", 2048, SLOT, 2)
    assert used.num_slots == 1024  # in use
    assert used.find(keys_of(1)).all()
    region.close(), used.close()
    assert Region.open(folder, "layout", 2048, SLOT, 2).num_slots == 2048


def test_another_layout_in_use_is_refused(region, folder):
    with pytest.raises(CallboardError, match="a process uses it with another layout; give it another folder"):
        Region.open(folder, "other", 1024, SLOT, 2)
    region.close()
    assert Region.open(folder, "other", 1024, SLOT, 2)


def test_foreign_files_are_left_alone(folder):
    folder.mkdir(0o700, parents=True)
    (folder / "thesis.txt").write_text("all of it")
    with pytest.raises(CallboardError, match="it has other files"):
        Region.open(folder, "layout", 1024, SLOT, 1)
    Region.wipe(folder)
    assert (folder / "thesis.txt").read_text() == "all of it"


def test_processes_that_create_at_once_share_one_region(folder):
    children = []
    for number in range(8):
        if (child := os.fork()) == 0:
            code = 1
            try:
                store(Region.open(folder, "layout", 1024, SLOT, 1), keys_of(number))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    region = Region.open(folder, "layout", 1024, SLOT, 1)
    stored = region.find(keys_of(*range(8)))
    assert stored.any()  # a reservation may find the lock held
    assert torn(region) == 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_threads_that_replace_at_once_share_one_region(folder):
    for size in (64, 128, 256):
        with ThreadPoolExecutor(8) as pool:
            regions = list(pool.map(lambda _: Region.open(folder, "layout", size, SLOT, 1), range(8)))  # noqa: B023
        assert {region.num_slots for region in regions} == {size}
        store(regions[0], keys_of(1))
        assert all(region.find(keys_of(1)).all() for region in regions)
        for region in regions:
            region.close()
