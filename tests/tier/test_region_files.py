"""Files of regions: permissions, unusable folders, damaged files, processes that create at once."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.base.errors import CallboardError
from runtime.tier.region import Region
from tests.tier.regions import keys_of, store, torn

SLOT = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "base" / "app-1234"


@pytest.fixture
def region(folder: Path) -> Region:
    return Region.open(folder, "layout", 1024, SLOT, 2)


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
    with pytest.raises(CallboardError, match="has room for less than 32 blocks"):
        Region.open(folder, "layout", 31, SLOT, 1)


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
    assert used.num_slots == 1024
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
