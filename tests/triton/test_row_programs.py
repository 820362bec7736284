"""The programs that choose a row's token together, as processes that share memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_several_programs_a_row_sample_as_one():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "kernels" / "row_programs.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
