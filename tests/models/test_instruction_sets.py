"""Deterministic mode's exactness with the instructions of other CPUs: which kernels torch's libraries take, and so the
order of their sums, depends on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXACT = [
    "tests/models/test_determinism.py",
    "tests/ops/test_batch_invariance.py",
    "tests/models/test_llm.py::test_no_toggle_changes_a_token",
    "tests/grammar/test_structured_steps.py::test_preemption_and_lost_runners_change_no_token",
]


@pytest.mark.parametrize(
    ("aten", "onednn", "mkl"),
    [("default", "SSE41", "SSE4_2"), ("avx2", "AVX2", "AVX2"), ("avx512", "AVX512_CORE", "AVX512")],
)
def test_rows_have_the_same_bits_wherever_they_are(aten: str, onednn: str, mkl: str):
    instructions = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.support.intel_mkl"]
    done = subprocess.run(
        [*command, "-m", "fast", *EXACT],
        env=os.environ | instructions, cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
