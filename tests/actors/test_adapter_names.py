"""Names of adapters do not pile up: not in fronts, not in engines, not in messages, and not in metrics."""

import time

import pytest

from actors.engine.loop import EngineLoop
from actors.engine.metrics import EngineMetrics
from actors.front import front_adapters as front_adapters
from actors.front.front_adapters import FrontAdapters
from actors.wire.adapter_entry import FORGET_AFTER_S, AdapterEntry, AdapterState
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import Status
from actors.wire.metrics import MetricValues
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from tests.support.engine.fake_runner import FakeRunner
from tests.support.engine.groups import Group
from tests.support.engine.links import INFO, Engine, eventually, link_to, only_link

LATER_S = FORGET_AFTER_S + 1


class Clock:
    """The wall clock of all processes."""

    def __init__(self, monkeypatch):
        self.now_ns = time.time_ns()
        monkeypatch.setattr(time, "time_ns", self.time_ns)

    def time_ns(self):
        self.now_ns += 1
        return self.now_ns

    def advance(self, seconds):
        self.now_ns += seconds * 10**9


async def test_unloaded_names_are_forgotten(folders, monkeypatch):
    clock = Clock(monkeypatch)
    engine = Engine(lora=(f"s={folders[2]}",), max_loras=2)
    async with Group(engine) as group:
        other = link_to(engine)
        await other.start()
        states, fronts = engine.loop._adapters, (group.adapters, other.adapters)
        await group.adapters.unload("s")
        await group.adapters.load("a", folders[0])
        await group.adapters.unload("a")
        for _ in range(3):
            with pytest.raises(CallboardError, match="/nowhere"):
                await group.adapters.load("bad", "/nowhere")
        await eventually(lambda: all(front._entries.keys() == {"s", "a", "bad"} for front in fronts))
        clock.advance(LATER_S)
        await group.adapters.load("b", folders[1])
        await eventually(lambda: all(front._entries.keys() == {"s", "b"} for front in fronts))
        assert states.states.keys() == {"s", "b"}
        assert only_link(group).adapters.keys() == only_link(other).adapters.keys() == {"s", "b"}
        clock.advance(LATER_S)
        await group.adapters.load("b", folders[0])
        assert group.adapters.served().keys() == {"b"}, "a name of the settings stays unloaded, and one in use loaded"
        other.close()


async def test_names_that_never_load_are_forgotten(folders, monkeypatch):
    """Their front may have ended before it could take the entry back."""
    clock = Clock(monkeypatch)
    async with Group(engine := Engine(max_loras=2)) as group:
        group.adapters._set(entry := AdapterEntry("bad", "/nowhere", clock.now_ns))
        group.adapters._send_newer(only_link(group))
        await eventually(lambda: getattr(only_link(group).adapters.get("bad"), "error", ""))
        clock.advance(LATER_S)
        await group.adapters.load("a", folders[0])
        await group.adapters.load("a", folders[1])
        assert group.adapters._entries.keys() == {"a"}
        assert engine.loop._adapters.states.keys() == {"a"}
        assert entry.path


async def test_the_number_of_names_is_limited(folders, monkeypatch):
    monkeypatch.setattr(front_adapters, "MAX_NAMES", 2)
    async with Group(Engine(max_loras=1)) as group:
        await group.adapters.load("a", folders[0])
        with pytest.raises(CallboardError, match="/nowhere"):
            await group.adapters.load("b", "/nowhere")
        with pytest.raises(EngineRefusal, match="2 names of adapters, the limit") as refused:
            await group.adapters.load("c", folders[1])
        assert refused.value.reason is Refusal.BUSY
        await group.adapters.load("b", folders[0])
        await group.adapters.unload("a")


async def test_a_status_carries_only_changes(folders, monkeypatch):
    sent, send_status = [], EngineLoop._send_status

    def note_status(message):
        if isinstance(message, Status):  # heartbeats go out from another thread
            sent.append(message)

    def note(loop, connection):
        send, connection.send = connection.send, lambda message: (note_status(message), send(message))
        send_status(loop, connection)
        del connection.send

    async with Group(engine := Engine(lora=(f"s={folders[2]}",), max_loras=2)) as group:
        for i in range(20):
            await group.adapters.load(f"n{i}", folders[0])
        monkeypatch.setattr(EngineLoop, "_send_status", note)
        await group.adapters.load("one more", folders[0])
        assert {state.entry.name for status in sent for state in status.adapters} == {"one more"}
        engine.loop._call(engine.loop._send_status_to_all).result()
        assert sent[-1].adapters == []
        only_link(group)._connection.transport.abort()
        await eventually(lambda: len(sent[-1].adapters) == 22)
        await eventually(lambda: only_link(group).usable)
        assert group.adapters.served().keys() == {"s", "one more", *(f"n{i}" for i in range(20))}


def test_fronts_send_only_new_entries_and_needs():
    class Link:
        usable, adapters, digests, kept = True, {}, frozenset(), {"d": "/a"}

        def __init__(self):
            self.told = []

        def send_adapters(self, entries, needs):
            self.told.append(([entry.name for entry in entries], needs))

    first, second = links = [Link(), Link()]
    front, state = FrontAdapters(lambda: links), AdapterState(AdapterEntry("a", "/a", 1), "d")
    first.adapters = {"a": state}
    front.on_status(first, [state], True)
    assert (first.told, second.told) == ([], [(["a"], None)])
    second.adapters = {"a": state}
    with front.stream_of("d"), front.stream_of("d"):
        assert first.told == [([], {"d": "/a"})]
    with front.stream_of("d"), front.stream_of(""):
        pass
    assert first.told == [([], {"d": "/a"})], "a name keeps it anyway"
    with front.stream_of("d"):
        front._set(AdapterEntry("a", "", 2))
        front._update_needs()
        assert len(first.told) == 1, "its stream goes on"
    assert first.told[1:] == [([], {})]


def test_metrics_drop_unloaded_names():
    config = EngineConfig(block_size=4)
    core, metrics = build_engine(config, INFO, FakeRunner(config, INFO)), EngineMetrics(config, INFO, 0)
    figures = MetricValues()
    for name in ("a", "b"):
        figures.count("callboard:adapter_requests", name)

    def counted(names, figures=MetricValues()):  # noqa: B008
        snapshot = metrics.report(figures, core, 0, 0, names)
        return snapshot.figures.numbers["callboard:adapter_requests"]

    assert counted({"a": None, "b": None}, figures) == {"a": 1, "b": 1}
    assert counted({"b": None}) == {"b": 1}
    assert counted({"a": None, "b": None}, figures) == {"a": 1, "b": 2}
