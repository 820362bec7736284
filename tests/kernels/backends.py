"""The backends of this machine: torch, Triton under its interpreter or on a GPU, and compiled CPU kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import tests.support.kernels.interpreter  # noqa: F401
from runtime.kernels import operations
from runtime.kernels.cpu_support import obstacle
from runtime.kernels.linear.linear_torch import cpu_product
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.numerics import Numerics
from runtime.kernels.operation import Operation
from tests.kernels.case import FLOATS, Case, Draw, Kernels
from tests.support.kernels.compiled import call
from tests.triton import INTERPRETING


class Backend(NamedTuple):
    """Where and how operations run."""

    name: str  # torch, triton or llvm
    dtype: torch.dtype
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.name}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    def implements(self, operation: Operation[..., Any]) -> bool:
        """True if it has a function of its own."""
        if self.name == "llvm":
            return operation in _compiled_operations()
        own = operation.triton if self.name == "triton" else operation.exact
        return own is not operation.reference

    def draw(self, seed: int = 0, wide: bool = False) -> Draw:
        return Draw(self.dtype, self.device, seed, wide, int32=self.name == "triton")

    @property
    def place(self) -> str:
        return "cuda" if self.device == "cuda" else self.name

    def takes(self, case: Case) -> bool:
        return self.place in case.on.split() and self.dtype in case.near and self.implements(case.operation)

    @contextmanager
    def kernels(
        self, case: Case, deterministic: bool = True, target: Target | None = None, parts: int = 1
    ) -> Iterator[Kernels]:
        """Its functions. `target` and `parts` are of compiled kernels."""
        references = functions(self.name, case, deterministic)
        if self.name != "llvm":
            if self.device == "cuda":
                torch.cuda.synchronize()  # a kernel may start before the previous one has ended
            yield references
            return
        with _compiled(case.activation, case.gated, _PartsLauncher(target, parts)) as compiled:
            yield Functions("llvm", deterministic, references | compiled)


BACKENDS = [
    *(pytest.param(Backend("torch", dtype)) for dtype in (torch.float32, torch.bfloat16)),
    *(
        pytest.param(
            Backend("triton", dtype),
            marks=[pytest.mark.triton, pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")],
        )
        for dtype in (torch.float32, torch.float16)  # the interpreter truncates to bfloat16
    ),
    pytest.param(Backend("llvm", torch.float32)),
    *(
        pytest.param(
            Backend("triton", dtype, "cuda"),
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        )
        for dtype in FLOATS
    ),
]


class Functions(dict[Operation[..., Any], Any]):
    """A backend's function of each operation."""

    def __init__(self, name: str, deterministic: bool, functions: Kernels) -> None:
        super().__init__(functions)
        self.name, self.deterministic = name, deterministic


def functions(name: str, case: Case, deterministic: bool) -> Functions:
    """All operations: as `reference`, in torch or in Triton."""
    backend = "triton" if name == "triton" else "torch"
    settings = {
        "deterministic": deterministic, "by_head": False, "activation": case.activation, "gated": case.gated,
        "product": partial(cpu_product, bias=None, packed=False, deterministic=True) if backend == "torch" else None,
    }  # fmt: skip
    return Functions(name, deterministic, {e: e.implementation(backend, settings) for e in operations.OPERATIONS})


class _PartsLauncher(Launcher):
    """Runs kernels in a number of parts, for a target."""

    def __init__(self, target: Target | None = None, parts: int = 1) -> None:
        super().__init__()
        self._target, self._parts = target, parts

    @property
    def pool(self) -> Any:
        return SimpleNamespace(num_threads=self._parts)

    def launch(self, function: Any, arguments: Any, parts: int) -> None:
        call(function[0], tuple(arguments), self._target, self._parts, **function[1])


@contextmanager
def _compiled(activation: str, gated: bool, launcher: Launcher) -> Iterator[dict[Operation[..., Any], Any]]:
    """All compiled operations; kernels are compiled when they are launched."""
    from runtime.kernels.cpu import operations as compiled  # imports llvmlite

    latent = SimpleNamespace(has_whole_blocks=lambda rows: True)
    spec: Any = SimpleNamespace(ffn=SimpleNamespace(activation=activation, gated=gated), latent=latent)
    activate: Any = partial(gated_activation_torch, activation=activation, gated=gated)
    numerics = Numerics(torch.float32, torch.device("cpu"), "llvm", packed=False, deterministic=False)
    modules = [m for n, m in sys.modules.items() if n.startswith("runtime.kernels.cpu.")]
    # Weights are packed when a layer is made, by another launcher.
    changed = [m for m in modules if getattr(m, "kernel", None) is kernel and not m.__name__.endswith(".pack")]
    with patch.object(compiled, "Launcher", lambda: launcher), pytest.MonkeyPatch.context() as patched:
        for module in changed:
            patched.setattr(module, "kernel", lambda function, **constants: (function, constants))
        made = compiled.CompiledOperations(numerics, spec, rms_norm_torch, activate, lambda *_: pytest.fail("unused"))
        yield made.implementations()


@cache
def _compiled_operations() -> frozenset[Operation[..., Any]]:
    if obstacle():
        return frozenset()
    with _compiled("silu", True, _PartsLauncher()) as found:
        return frozenset(found)
