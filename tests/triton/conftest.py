"""Kernels under Triton's interpreter, in a session of their own: Triton decides at import whether it interprets."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.kernels.skinny_gemm_configs import SkinnyGemmConfig

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    from triton import language
    from triton.runtime import interpreter

    patch_language, plain_load = interpreter._patch_lang, language.load

    def patch_language_once(fn: Callable) -> interpreter._LangPatchScope:
        """Triton patches its language anew whenever a kernel calls a function, which takes longer than most of them."""
        modules = [value for value in fn.__globals__.values() if value is language or value is language.core]
        is_patched = all(module.load is not plain_load for module in modules)
        return interpreter._LangPatchScope() if is_patched else patch_language(fn)

    interpreter._patch_lang = patch_language_once
    # Sums of integers are computed a second time to find overflows, which only a debugging session would tell.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


@pytest.fixture
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows for tests of whole steps: by a few programs, which the interpreter runs one after another,
    instead of by as many as fill a GPU. test_linear_kernels.py has their shapes."""
    wide = SkinnyGemmConfig(block_n=128, block_k=1024, num_warps=4)
    monkeypatch.setattr("runtime.kernels.skinny_gemm.skinny_gemm_config", lambda *shape: wide)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and (item.path.name == "test_interpreter.py") == INTERPRETING:
            reason = "starts the session that runs now" if INTERPRETING else "runs in test_interpreter.py's session"
            item.add_marker(pytest.mark.skip(reason=reason))
