"""Compiled kernels run only where the processor has their instructions."""

import pytest

from runtime.kernels.cpu_support import obstacle


@pytest.fixture(autouse=True)
def compiled_kernels():
    if reason := obstacle():
        pytest.skip(f"no compiled kernels: {reason}")
