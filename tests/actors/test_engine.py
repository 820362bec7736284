"""The engine's actor without Ray: its watch over steps, runners and draft."""

import asyncio
import sys
import threading
from unittest.mock import Mock

import pytest

from actors.engine import actor as engine_module
from actors.engine.actor import EngineActor
from runtime.base.config import EngineConfig
from tests.support.engine.links import eventually


async def test_ending_a_hung_draft_does_not_stop_step_checks(monkeypatch: pytest.MonkeyPatch):
    """Ray's head node may be lost, and ending an actor waits for it."""
    interval, is_back = sys.getswitchinterval(), threading.Event()
    engine = EngineActor(EngineConfig(draft="./x"), None, False, 0, "app", 1)
    sys.setswitchinterval(interval)
    monkeypatch.setattr(engine_module, "_CHECK_S", 0.01)
    engine.runners, engine.draft, engine._loop = Mock(), Mock(), Mock()
    engine.draft.kill = lambda: is_back.wait(60)
    looks = engine._loop.check_progress
    watch = asyncio.create_task(engine._check_progress())
    await eventually(lambda: looks.call_count)
    num_looks = looks.call_count
    await eventually(lambda: looks.call_count > num_looks + 1)
    assert not is_back.is_set()
    is_back.set()
    watch.cancel()
