"""Kernels under Triton's interpreter. Triton decides at import whether it interprets: see tests/conftest.py."""

from pathlib import Path

import pytest

from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from tests.triton import INTERPRETING


@pytest.fixture
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows for tests of whole steps. A few programs compute them, because the interpreter runs one
    after another; a GPU would run many. test_linear_kernels.py has their shapes."""
    wide = SkinnyGemmConfig(block_n=128, block_k=1024, num_warps=4)
    monkeypatch.setattr("runtime.kernels.linear.skinny_gemm.skinny_gemm_config", lambda *shape: wide)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and not INTERPRETING:
            item.add_marker(pytest.mark.skip(reason="needs a session with TRITON_INTERPRET=1"))
