"""Calls compiled CPU kernels for any instruction set that this CPU has."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import tests.support.kernels.kept_traces  # noqa: F401
from runtime.kernels.llvm.compiler import Function, Target, host, load, target_of, trace


@cache
def targets() -> tuple[Target, ...]:
    """The targets of this CPU: its own, and simpler ones."""
    own = host()
    if not own.triple.startswith("x86_64"):
        return (own,)
    has = set(own.features.split(","))
    kinds = [features for features in ("", "+avxvnni", "-avxvnni") if not features.startswith("+") or features in has]
    return (own, *(target_of(own.triple, "x86-64-v3", features) for features in kinds))


@cache
def _function(function: Callable[..., None], target: Target, constants: tuple[tuple[str, Any], ...]) -> Any:
    source = trace(function, dict(constants), target)
    return _compiled(_Code(source, target.cpu, target))


@dataclass(frozen=True)
class _Code:
    """A kernel's LLVM IR for a CPU. Targets that differ in dot products alone have the same IR of other kernels."""

    source: str
    cpu: str
    target: Target = field(compare=False)


@cache
def _compiled(code: _Code) -> Any:
    return Function(load(code.source, code.target))


def call(
    function: Callable[..., None],
    arguments: tuple[torch.Tensor | int | float | None, ...],
    target: Target | None = None,
    parts: int = 1,
    **constants: Any,
) -> None:
    """Run all parts of a kernel, one after the other."""
    compiled = _function(function, target or host(), tuple(sorted(constants.items(), key=lambda item: item[0])))
    words = (ctypes.c_int64 * max(1, len(arguments)))(*map(_word, arguments))
    for part in range(parts):
        compiled(ctypes.addressof(words), part, parts)


def _word(argument: torch.Tensor | int | float | None) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return struct.unpack("<I", struct.pack("<f", argument))[0] if isinstance(argument, float) else argument or 0
