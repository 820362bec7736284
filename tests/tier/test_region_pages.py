"""Huge pages for files in memory."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.tier import region_files
from runtime.tier.region_files import HUGE_BYTES, give_pages, map_file

SIZE = 4 * HUGE_BYTES + 8192  # the last huge page would go beyond the file's end


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as made:
        made.truncate(SIZE)
        yield made.fileno()


def huge_bytes(address: int) -> int:
    """Bytes of the mapping at this address that have huge pages."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*?^ShmemPmdMapped: +(\d+) kB", text, re.M | re.S)
    assert found is not None
    return int(found[1]) << 10


def given(file: int) -> np.ndarray:
    """The file's memory after `give_pages`; skips where the kernel cannot gather pages."""
    memory = map_file(file)
    memory[::4096] = 7
    give_pages(memory)
    if not huge_bytes(memory.ctypes.data):
        pytest.skip("this kernel gathers no huge pages: it is older than 6.1, or has none free")
    return memory


def test_a_mapping_is_the_file(file: int):
    memory = map_file(file)
    assert memory.ctypes.data % HUGE_BYTES == 0
    memory[:] = np.arange(SIZE) % 251
    assert os.pread(file, SIZE, 0) == memory.tobytes()
    other = map_file(file)
    other[5] = 9
    assert memory[5] == 9


def test_a_mapping_ends_with_its_last_view(file: int):
    memory = map_file(file)
    line = f"{memory.ctypes.data:x}-"
    view = memory[3:]
    del memory
    assert line in Path("/proc/self/maps").read_text()
    del view
    assert line not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_is_an_error(file: int):
    with tempfile.TemporaryDirectory() as folder:
        place = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(OSError, match="Permission denied"):
                map_file(place)
        finally:
            os.close(place)


def test_pages_are_huge_and_keep_their_bytes(file: int):
    memory = given(file)
    assert huge_bytes(memory.ctypes.data) == 4 * HUGE_BYTES
    assert (memory[::4096] == 7).all()
    assert not memory[1::4096].any()


def test_a_later_mapping_has_huge_pages(file: int):
    """As in a process that starts after the death of the one before."""
    given(file)
    later = map_file(file)
    assert (later[::HUGE_BYTES] == 7).all()
    assert huge_bytes(later.ctypes.data) == 4 * HUGE_BYTES


@pytest.mark.parametrize("huge", [True, False])
def test_memory_has_pages_without_huge_ones(file: int, huge: bool, monkeypatch):
    monkeypatch.setattr(region_files, "_COLLAPSE", 9999)
    memory = map_file(file)
    give_pages(memory[4096:][: 3 * HUGE_BYTES], huge)
    assert os.fstat(file).st_blocks * 512 - 3 * HUGE_BYTES in ((0, 4096) if huge else (0,))
    assert not huge_bytes(memory.ctypes.data)


@pytest.mark.parametrize(("huge", "num_calls"), [(True, 1), (False, 2)])
def test_pages_are_given_by_few_calls(file: int, huge: bool, num_calls: int, monkeypatch):
    """Each call waits for Python's lock."""
    calls, plain = [], region_files._advise
    monkeypatch.setattr(region_files, "_advise", lambda *of: calls.append(of) or plain(*of) or huge)
    give_pages(map_file(file), huge)
    assert len(calls) == num_calls
