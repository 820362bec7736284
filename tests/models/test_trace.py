"""The output of docs/trace.py equals the trace in docs/reading.md."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

TRACE = Path(__file__).parents[2] / "docs" / "trace.py"


def test_a_trace_shows_plans_results_and_text(write_tiny_gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(TRACE))["main"](str(write_tiny_gguf()), "a", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plan   1  open slot 0 with tokens [")
    assert [line.split()[1] for line in lines if line.startswith("result")] == ["1", "2"]
    assert lines[-1].startswith("counters  {'running': 0, 'waiting': 0")
