"""Slots: the places of a batch, one for each request that may have rows in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class SlotPool:
    """Which slots are free, and which were given back since the last plan told the runners."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.reset()

    def __len__(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        """All slots free, and the runners know it."""
        self._free = list(range(self._num_slots - 1, -1, -1))  # a stack: lowest number on top
        self._released: list[int] = []

    def acquire(self) -> int:
        """Take a free slot; there must be one."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back; plans are executed in order, so that it may be taken at once."""
        self._free.append(slot)
        self._released.append(slot)

    def take_released(self) -> list[int]:
        """The slots given back since the last call."""
        released, self._released = self._released, []
        return released

    def find_faults(self, held: Iterable[int | None]) -> list[str]:
        """One sentence for each slot that is not either free or held once."""
        places = Counter([*self._free, *held])
        slots = range(self._num_slots)
        faults = [f"Slot {slot} is free or held {places[slot]} times." for slot in slots if places[slot] != 1]
        return faults + [f"Slot {slot} is held, but does not exist." for slot in places if slot not in slots]
