"""Where compiled kernels can run, and what happens elsewhere."""

import subprocess
import sys

import pytest
import torch

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.kernels.cpu_support import obstacle
from runtime.worker.runner import choose_numerics


def test_only_a_cpu_that_computes_imports_llvmlite():
    code = "import sys, runtime.assembly.runner, serve_app.cli; assert 'llvmlite' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cpu_without_avx2_uses_torch(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert obstacle() == "this CPU has no AVX2"
    assert choose_numerics(EngineConfig(device="cpu")).backend == "torch"
    with pytest.raises(CallboardError, match=r"^kernel_backend is llvm, but this CPU has no AVX2; leave it at auto\.$"):
        choose_numerics(EngineConfig(device="cpu", kernel_backend="llvm"))


def test_without_llvmlite_a_cpu_uses_torch(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_numerics(EngineConfig(device="cpu")).backend == "torch"


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_any_arm_processor_can_run_them(monkeypatch, machine):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert obstacle() == ""
