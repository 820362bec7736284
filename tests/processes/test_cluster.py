"""A cluster of two machines in network namespaces, as clients see it while Ray's GCS, or a machine, is lost.

One cluster serves all cases, in a program of its own: `python -m benchmarks.cluster`, which docs/cluster.md cites."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.network import refusal

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_streams_survive_the_loss_of_head_and_node():
    if why := refusal():
        pytest.skip(why)
    cases = "--cases", "gcs-stopped", "engine-cut", "--seconds", "2", "--after", "0.5"
    command = [sys.executable, "-m", "benchmarks.cluster", *cases]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    print(done.stdout)
    _, *seen = map(json.loads, done.stdout.splitlines())  # the first line reports the start
    assert [case["case"] for case in seen] == ["gcs-stopped", "engine-cut"]
    for case in seen:
        assert case["failed"] == 0, case["why"]
        assert case["short_requests"] > 0
        assert case["chunks"] > 0
