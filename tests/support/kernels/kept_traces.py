"""Keeps the LLVM IR of compiled kernels on disk. Tracing takes most of the time of their tests.

A file's name is a hash of the kernel, its constants, the target, the version of llvmlite, and the sources of the
kernel's module. Callboard's modules that it imports count as its sources. Importing this module changes the compiler.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import zlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llvmlite
import torch

from runtime.kernels.llvm import compiler

_OWN = "runtime."  # kernels of tests are traced each time
_FOLDER = Path(os.environ.get("CALLBOARD_CACHE") or os.path.expanduser("~/.cache/callboard"), "traces")
_trace = compiler._traced


def _kept_trace(function: Callable[..., None], constants: dict[str, Any], target: compiler.Target) -> str:
    module, name, written = function.__module__, function.__qualname__, repr((sorted(constants.items()), target))
    if not module.startswith(_OWN) or "<" in name or re.search(" at 0x|<locals>", written):
        return _trace(function, constants, target)
    parts = llvmlite.__version__, torch.__version__, _sources(module), _sources(_trace.__module__), name, written
    path = _FOLDER / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    if path.exists():
        return zlib.decompress(path.read_bytes()).decode()
    text = _trace(function, constants, target)
    compiler._write(path, zlib.compress(text.encode(), 1))
    return text


@cache
def _sources(module: str) -> str:
    """A hash of a module and of Callboard's modules that it imports, directly or not."""
    found, waiting = dict[str, str](), [module]
    while waiting:
        name = waiting.pop()
        if name in found or not (path := _path(name)):
            continue
        found[name] = text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@cache
def _path(module: str) -> Path | None:
    """The file of a module, or None if the name is something within a module."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


compiler._traced = _kept_trace
