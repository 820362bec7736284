"""A model that wakes up gets the memory of idle ones, the least recently used first."""

import asyncio
import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from actors.ray import room
from actors.ray.room import Room, next_to_end
from actors.wire.engine_client import Idleness


def idle(seconds: float, keep_s: float = -1.0) -> list[Idleness]:
    return [Idleness(seconds, keep_s)]


def test_the_least_recently_used_model_ends_first():
    assert next_to_end({"a": idle(5.0), "b": idle(50.0), "c": idle(20.0)}) == "b"


def test_models_with_requests_do_not_end():
    assert next_to_end({"a": idle(0.0), "b": [*idle(9.0), *idle(0.0)]}) is None


def test_a_model_without_engines_cannot_end():
    assert next_to_end({"a": [], "b": idle(2.0)}) == "b"
    assert next_to_end({}) is None


def test_a_model_that_is_kept_ends_last():
    assert next_to_end({"a": idle(90.0, math.inf), "b": idle(2.0)}) == "b"
    assert next_to_end({"a": idle(90.0, math.inf)}) == "a"


class Machine:
    """Models of some sizes in a memory; an engine that may end does so two looks later."""

    def __init__(self, size: int, **models: int) -> None:
        self.free, self.needs, self.awake, self.pending = size, models, dict[str, float](), set[str]()
        self.ended: list[str] = []
        self.room = Room({name: Engines(self, name) for name in models}, self.is_short)

    async def is_short(self, model: str) -> bool:
        self.place()
        return model in self.pending

    def place(self) -> None:
        for model in sorted(self.pending):
            if self.needs[model] <= self.free:
                self.free -= self.needs[model]
                self.awake[model] = 0.0
                self.pending.remove(model)

    async def wake(self, model: str) -> None:
        self.pending.add(model)
        self.place()
        making = asyncio.create_task(self.room.make(model))
        while model not in self.awake:
            await asyncio.sleep(0.001)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


class Engines:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.looks = machine, name, self.countdown()

    def countdown(self) -> Iterator[int]:
        yield from (2, 1)
        del self.machine.awake[self.name]
        self.machine.free += self.machine.needs[self.name]
        self.machine.ended.append(self.name)
        self.machine.place()

    def engines(self) -> list[str]:
        if self.name in self.machine.awake and not next(self.looks, 0):
            self.looks = self.countdown()
        return [self.name] if self.name in self.machine.awake else []

    async def keep(self, seconds: float | None) -> list[Idleness]:
        return idle(self.machine.awake[self.name]) if self.name in self.machine.awake else []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POLL_S", 0.001)


async def test_one_swap_ends_one_model():
    machine = Machine(10, a=5, b=5, c=5)
    await machine.wake("a")
    await machine.wake("b")
    machine.awake |= {"a": 7.0, "b": 3.0}
    await asyncio.wait_for(machine.wake("c"), 60)
    assert machine.ended == ["a"]
    assert set(machine.awake) == {"b", "c"}
    assert not machine.room.waits


async def test_a_large_model_ends_several():
    machine = Machine(10, a=5, b=5, c=9)
    machine.awake |= {"a": 3.0, "b": 7.0}
    machine.free = 0
    await asyncio.wait_for(machine.wake("c"), 60)
    assert machine.ended == ["b", "a"]


async def test_a_model_that_fits_ends_none():
    machine = Machine(10, a=5, b=5)
    await machine.wake("a")
    machine.awake["a"] = 7.0
    await asyncio.wait_for(machine.wake("b"), 60)
    assert machine.ended == []


async def test_a_busy_model_is_waited_for():
    machine = Machine(10, a=6, b=6)
    await machine.wake("a")
    waking = asyncio.create_task(machine.wake("b"))
    while "b" not in machine.room.waits:
        await asyncio.sleep(0.001)
    assert machine.room.waits == {"b": "waits for memory; a must be idle first"}
    assert not machine.ended
    machine.awake["a"] = 2.0
    await asyncio.wait_for(waking, 60)
    assert machine.ended == ["a"]


async def test_models_in_turn_swap_each_time():
    machine = Machine(10, a=6, b=6)
    for name in "ababab":
        machine.awake = dict.fromkeys(machine.awake, 5.0)
        await asyncio.wait_for(machine.wake(name), 60)
    assert all(one != other for one, other in pairwise(machine.ended))
    assert set(machine.awake) == {"b"}


async def test_a_model_names_the_resources_that_ray_lacks(monkeypatch):
    monkeypatch.setattr(room, "_WATCH_S", 0.001)
    machine = Machine(0, a=1)
    machine.pending.add("a")
    watching = asyncio.create_task(machine.room.watch("a", Engines(machine, "a"), "1.5 CPU free, 1 GPU free"))
    while machine.room.wait_of("a") != "waits for a machine with 1.5 CPU free, 1 GPU free":
        await asyncio.sleep(0)
    machine.free = 1
    while machine.room.wait_of("a"):
        await asyncio.sleep(0)
    watching.cancel()
