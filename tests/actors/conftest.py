"""Fixtures that several files of this folder share."""

import pytest

from benchmarks.library.make_adapter import save_adapter
from tests.support.engine.adapters import MODULES


@pytest.fixture
def folders(tmp_path):
    """Those of three adapters."""
    for seed, name in enumerate("abc"):
        save_adapter(tmp_path / name, MODULES, seed)
    return [str(tmp_path / name) for name in "abc"]
