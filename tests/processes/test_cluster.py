"""A cluster of two machines in network namespaces, as clients see it while Ray's GCS, or a machine, is lost.

A cluster serves several cases, in a program of its own: `python -m benchmarks.cluster`, which docs/cluster.md cites."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster.network import refusal

ROOT = Path(__file__).parents[2]


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    """Run cases, and return their lines."""
    if why := refusal():
        pytest.skip(why)
    command = [sys.executable, "-m", "benchmarks.cluster", "--cases", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.thorough
def test_streams_survive_the_loss_of_head_and_node():
    _, *seen = lines_of("gcs-stopped", "engine-cut", "--seconds", "2", "--after", "0.5")  # the first reports the start
    assert [case["case"] for case in seen] == ["gcs-stopped", "engine-cut"]
    for case in seen:
        assert case["failed"] == 0, case["why"]
        assert case["short_requests"] > 0
        assert case["chunks"] > 0


@pytest.mark.thorough
def test_an_application_waits_for_machines_that_join_later():
    alone, joined, declared = lines_of("late-nodes", "--seconds", "3")
    gpu = {"CPU": 1.0, "GPU": 1.0}
    assert any("waits for the first machine with CPUs" in line for line in alone["sentences"])
    assert [app["status"] for app in alone["applications"].values()] == ["DEPLOYING", "DEPLOYING"]
    assert alone["pending"] == [[{"CPU": 0.5}, gpu]], "what an autoscaler starts machines for"
    assert joined["applications"]["auto"]["status"] == "RUNNING"
    assert joined["pending"] == [[{"CPU": 0.5}, gpu]]
    assert "waits for a machine with 1.5 CPU free, 1 GPU free" in joined["ready"]
    assert declared["pending"] == []
