"""The session under Triton's interpreter, for whoever runs all tests in one that does not interpret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_everything_else_of_this_folder():
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(os.cpu_count()), str(folder)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=folder.parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
