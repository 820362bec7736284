"""Compiled operations of layers with a state, for any target and number of parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from runtime.kernels.cpu.states import compiled_states
from runtime.kernels.cpu.states.compiled_states import CompiledStates
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.launcher import Launcher
from tests.support.kernels.compiled import call


class _PartsLauncher(Launcher):
    """Runs kernels in a number of parts, for a target."""

    def __init__(self, target: Target | None, parts: int) -> None:
        super().__init__()
        self._target, self._parts = target, parts

    def launch(self, function: Any, arguments: Any, parts: int) -> None:
        call(function[0], tuple(arguments), self._target, self._parts, **function[1])


@contextmanager
def compiled(target: Target | None = None, parts: int = 1) -> Iterator[CompiledStates]:
    """Compiled operations for a target, in parts."""
    with patch.object(compiled_states, "kernel", lambda function, **constants: (function, constants)):
        yield CompiledStates(_PartsLauncher(target, parts))
