"""Kernels multiply and add in one rounding, whatever Triton's default is."""

import os
import subprocess
import sys

import pytest

OPTIONS = """
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
import runtime.kernels.triton_language
backend = CUDABackend(GPUTarget("cuda", 90, 32))
assert backend.parse_options({"arch": "sm90"}).enable_fp_fusion is True
assert backend.parse_options({"arch": "sm90", "enable_fp_fusion": False}).enable_fp_fusion is False
"""


def test_fusion_is_on_unless_a_kernel_forbids_it():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "0"}
    subprocess.run([sys.executable, "-c", OPTIONS], env=environment, check=True)
