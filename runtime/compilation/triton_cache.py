"""Compilations of Triton kernels as their launches request them, and Triton's cache. Private names of Triton are here.

A compilation has what a launch gives to Triton's compiler: source, types, constants and options. So its key in the
cache folder is that of the launch. Triton's key hashes its own version, the target, and the compiler `ptxas`. It also
hashes the kernel's source with all called functions, and variables of the environment that change code.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Compilation:
    """A kernel with types, constants and options, for a target."""

    source: Any  # triton.compiler.ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @cached_property
    def key(self) -> str:
        """The hash under which Triton's cache has the result."""
        backend = make_backend(self.target)
        options = backend.parse_options(self.options | self.source.parse_options())
        key = get_cache_key(self.source, backend, options, get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    @property
    def name(self) -> str:
        return str(self.source.name)

    @property
    def size(self) -> int:
        """The length of the kernel's source. Longer ones take longer to compile."""
        return len(self.source.fn.src)

    def compile(self) -> Any:
        """Compile the kernel into the cache, and the C code that launches it, unless they are there.

        Returns Triton's compiled kernel."""
        kernel = triton.compile(self.source, target=self.target, options=self.options)
        if builds_launchers() and has_libcuda():
            nvidia.CudaLauncher(self.source, kernel.metadata)
        return kernel

    def is_cached(self) -> bool:
        """True if the cache has the result."""
        return is_cached(self.key, self.name)


def cache_folder() -> Path:
    """The folder of Triton's cache, TRITON_CACHE_DIR."""
    return Path(knobs.cache.dir)


def is_cached(key: str, name: str) -> bool:
    """True if Triton's cache has the kernel with this name and key."""
    file = f"{name[:150]}.json"  # triton.compile's name for it
    return file in (get_cache_manager(key).get_group(file) or {})


def builds_launchers() -> bool:
    """True if this Triton compiles C code for each kernel's launches (up to 3.6)."""
    return hasattr(nvidia, "make_launcher")


def has_libcuda() -> bool:
    """True if the driver's library is here, to which that code is linked."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False


class _Driver:
    """The calls of a driver that Triton makes before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def recorded_launches(
    capability: tuple[int, int], note: Callable[[Compilation], None] = lambda new: None
) -> Iterator[dict[str, Compilation]]:
    """Record each launch in place of it. Yields the compilations by key, which grow as kernels are launched.

    `note` is called with each new one. The process launches no kernels afterwards."""
    found: dict[str, Compilation] = {}

    def record(source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        compilation = Compilation(source, target, options)
        if compilation.key not in found:
            found[compilation.key] = compilation
            note(compilation)
        return SimpleNamespace(hash=compilation.key)

    launch, compile_ = JITFunction.run, triton.compiler.compile

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(_Driver(GPUTarget("cuda", 10 * capability[0] + capability[1], 32)))
    JITFunction.run, triton.compiler.compile = run, record
    try:
        yield found
    finally:
        JITFunction.run, triton.compiler.compile = launch, compile_
