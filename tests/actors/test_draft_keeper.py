"""The draft of an engine: how its loss is noticed, and which calls stay open."""

import os
import queue

import pytest

from actors.runners import runner_group
from actors.runners.runner_group import DraftKeeper
from actors.wire.transport import connect
from runtime.base.config import EngineConfig
from tests.actors.test_runner_group import Call


class Draft:
    """A draft actor that survives the loss of its connections."""

    def __init__(self) -> None:
        self.called, self.disturbances = [], {}
        self.connections = queue.Queue()

    def __getattr__(self, name: str) -> Call:
        if name.startswith("_"):
            raise AttributeError(name)
        return Call(self, name)

    def _location(self) -> tuple[str, int]:
        return "here", os.getpid()

    def _attach(self, address) -> None:
        self.connections.put(connect(address))

    def _wait_for_exit(self) -> None:
        queue.Queue().get()


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner_group, "_host_and_process", lambda node, pid: ("", None))
    keeper, attached = DraftKeeper(EngineConfig(draft="x"), None, False, "app"), queue.Queue()
    keeper.draft, keeper._step_us = Draft(), ()
    keeper.keep(lambda wire, step_us: attached.put(wire))
    keeper.draft.attached = attached
    assert attached.get(timeout=60)
    return keeper.draft


def test_a_draft_is_attached_again_after_its_connection(draft):
    draft.connections.get(timeout=60).sock.close()
    assert draft.attached.get(timeout=60)
    assert [name for name, _ in draft.called if name != "wait_for_exit"] == ["location", "attach"] * 2


def test_no_call_to_a_draft_stays_open(draft):
    """A shared draft has few threads, and engines are added and removed."""
    assert [name for name, _ in draft.called] == ["location", "attach"]
