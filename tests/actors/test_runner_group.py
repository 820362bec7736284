"""The actors that compute for an engine, when they have to go."""

import os
import signal
import subprocess
from typing import Any

import pytest

from actors import runner_group
from actors.runner_group import RunnerGroup
from runtime.core.config import EngineConfig


def test_a_stopped_runner_is_killed_before_the_next_one_needs_its_place(monkeypatch: pytest.MonkeyPatch):
    """Ray's own way asks the process to end, which a stopped one does not hear."""
    asked: list[Any] = []
    monkeypatch.setattr(runner_group.ray, "kill", asked.append)

    def start_another(**_: Any) -> None:
        assert process.wait(timeout=5) == -signal.SIGKILL
        raise InterruptedError

    monkeypatch.setattr(runner_group.ray, "remote", start_another)
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        group = RunnerGroup(EngineConfig(), None, gpu=False)
        group.runners, group._processes = ["runner"], [os.pidfd_open(process.pid)]
        try:
            with pytest.raises(InterruptedError):
                group.start()
        finally:
            process.kill()
    assert asked == ["runner"]
