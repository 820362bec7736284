"""Kernels under Triton's interpreter, in a session of their own: Triton decides at import whether it interprets."""

import os
from pathlib import Path

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and (item.path.name == "test_interpreter.py") == INTERPRETING:
            reason = "starts the session that runs now" if INTERPRETING else "runs in test_interpreter.py's session"
            item.add_marker(pytest.mark.skip(reason=reason))
