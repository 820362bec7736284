"""Segments keep their addresses while their memory comes and goes, with a driver that counts it."""

import pytest

from runtime.worker.gpu import mapped_memory
from runtime.worker.gpu.mapped_memory import Segments

MIB = 1 << 20


class Driver:
    """The driver's record of addresses and memory. Memory is limited."""

    def __init__(self, room):
        self.room, self.reserved, self.mapped, self.next = room, {}, {}, 64 * MIB
        self.gives_access = True

    def call(self, name, *arguments):
        values = [getattr(getattr(a, "_obj", a), "value", None) for a in arguments]
        getattr(self, name)(arguments, *values)

    def cuMemAddressReserve(self, arguments, _, size, *zeros):
        assert zeros == (0, 0, 0)
        arguments[0]._obj.value, self.next = self.next, self.next + size
        self.reserved[arguments[0]._obj.value] = size

    def cuMemAddressFree(self, _, address, size):
        assert self.reserved.pop(address) == size
        assert address not in self.mapped

    def cuMemCreate(self, arguments, _, size, *rest):
        if sum(self.mapped.values()) + size > self.room:
            raise OSError(2, "cuMemCreate says CUDA_ERROR_OUT_OF_MEMORY")
        arguments[0]._obj.value = 7

    def cuMemMap(self, _, address, size, *rest):
        assert address not in self.mapped
        assert self.reserved[address] == size
        self.mapped[address] = size

    def cuMemUnmap(self, _, address, size):
        assert self.mapped.pop(address) == size

    def cuMemRelease(self, _, handle):
        assert handle == 7

    def cuMemSetAccess(self, _, address, size, *rest):
        if not self.gives_access:
            raise OSError(2, "cuMemSetAccess says CUDA_ERROR_OUT_OF_MEMORY")
        assert self.mapped[address] == size

    def cuCtxSynchronize(self, _):
        pass


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(room=20 * MIB)
    monkeypatch.setattr(mapped_memory, "call", driver.call)
    return driver


def test_memory_returns_to_its_addresses(driver):
    segments = Segments(0)
    first, second = segments.allocate(3 * MIB, 0, None), segments.allocate(8 * MIB, 0, None)
    assert driver.mapped == {first: 4 * MIB, second: 8 * MIB}  # whole granules
    for address, segment in segments.all.items():
        segments.unmap(address, segment)
    assert not driver.mapped
    assert driver.reserved == {first: 4 * MIB, second: 8 * MIB}
    segments.map(second, segments.all[second])
    assert driver.mapped == {second: 8 * MIB}
    for address in (first, second):  # one that is away, and one that is there
        segments.free(address, 0, 0, None)
    assert not driver.mapped
    assert not driver.reserved
    assert not segments.all


def test_too_little_memory_leaves_nothing_mapped(driver):
    segments = Segments(0)
    held = segments.allocate(16 * MIB, 0, None)
    assert segments.allocate(8 * MIB, 0, None) == 0
    assert list(driver.reserved) == list(segments.all) == [held]
    segments.unmap(held, segments.all[held])
    driver.room = 8 * MIB
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        segments.map(held, segments.all[held])
    assert not segments.all[held].is_mapped


def test_a_segment_without_access_can_be_mapped_later(driver):
    segments = Segments(0)
    held = segments.allocate(8 * MIB, 0, None)
    segments.unmap(held, segments.all[held])
    driver.gives_access = False
    with pytest.raises(OSError, match="cuMemSetAccess"):
        segments.map(held, segments.all[held])
    assert segments.allocate(4 * MIB, 0, None) == 0
    assert list(driver.reserved) == [held]
    driver.gives_access = True
    segments.map(held, segments.all[held])
    assert driver.mapped == {held: 8 * MIB}
