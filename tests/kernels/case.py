"""Case: one call of an operation, drawn from a seed for any backend, and what must hold for its outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.kernels.operation import Operation

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NEAR = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Outputs = list[torch.Tensor]
Kernels = Mapping[Operation[..., Any], Callable[..., Any]]


class Draw:
    """Random operands. A seed gives the same numbers on each device; `wide` keeps them in float64 after rounding.

    Triton's kernels take int32 for ids and positions, other backends int64."""

    def __init__(
        self, dtype: torch.dtype, device: str = "cpu", seed: int = 0, wide: bool = False, int32: bool = False
    ) -> None:
        self.dtype, self.device, self.seed, self.wide = dtype, device, seed, wide
        self.integer = torch.int32 if int32 else torch.int64
        self.generator = torch.Generator().manual_seed(seed)
        self._gaps: Outputs = []

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers in the compute dtype, on the device."""
        return x.to(self.dtype).to(self.device, torch.float64 if self.wide else None)

    def randn(self, *shape: int, size: float | torch.Tensor = 1.0) -> torch.Tensor:
        return self.put(torch.randn(*shape, generator=self.generator) * size)

    def ids(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=self.integer, device=self.device)

    def below(self, limit: int, count: int) -> torch.Tensor:
        """Integers below a limit."""
        return torch.randint(0, limit, (count,), generator=self.generator).to(self.device, self.integer)

    def places(self, limit: int, count: int) -> torch.Tensor:
        """Different integers below a limit."""
        return torch.randperm(limit, generator=self.generator)[:count].to(self.device, self.integer)

    def rows(self, *shape: int, gap: int = 3, size: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Random rows, each a part of a longer row. No kernel may write behind it."""
        x = self.randn(*shape, size=size)
        whole = x.new_full((shape[0], math.prod(shape[1:]) + gap), 7.0)
        self._gaps.append(whole[:, whole.shape[1] - gap :])
        rows = whole[:, : whole.shape[1] - gap].unflatten(1, shape[1:])
        return rows.copy_(x)

    def check_gaps(self) -> None:
        assert all((gap == 7.0).all() for gap in self._gaps), "written behind a row"


def closely(got: Outputs, want: Outputs, dtype: torch.dtype, near: float) -> None:
    """Each element, relative to its tensor's largest, which counts as at least 0.001."""
    for a, b in zip(got, want, strict=True):
        finite = b[b.isfinite()].abs()
        largest = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
        torch.testing.assert_close(a.double(), b.double(), rtol=near, atol=near * largest, equal_nan=True)


@dataclass(frozen=True)
class Case:
    """`arguments` draws the operands, `call` hands them to a backend's functions."""

    name: str
    operation: Operation[..., Any]
    arguments: Callable[[Draw], Sequence[Any]]
    tokens: tuple[int, ...] = (0,)  # arguments with one row for each token
    written: tuple[int, ...] = ()  # arguments that the operation changes
    call: Callable[..., Any] | None = None  # of the backend's functions and the arguments
    read: Callable[..., Outputs] | None = None  # outputs that the arguments hold, in place of `written`
    near: Mapping[torch.dtype, float] = field(default_factory=lambda: NEAR)
    compare: Callable[[Outputs, Outputs, torch.dtype, float], None] = closely
    llvm_is_exact: bool = False  # a compiled CPU kernel has the reference's bits in float32
    activation: str = "silu"
    gated: bool = True
    on: str = "torch triton llvm cuda"  # cuda alone: too large for the interpreter
    # Arguments, or functions that spoil them: each may hold a NaN or an infinity.
    faults: Sequence[int | Callable[[Sequence[Any], float], None]] = (0,)
    bits_on: str = "torch triton llvm cuda"  # where a token has the same bits in any call
    parts: Callable[[Sequence[Any]], Iterable[tuple[slice | list[int], Sequence[Any]]]] | None = (
        None  # in place of single tokens
    )

    @property
    def title(self) -> str:
        """The operation and its kind, without sizes."""
        return re.split(r" [\d(\[]", self.name)[0]

    def kept(self, arguments: Sequence[Any]) -> Outputs:
        """The arguments that the operation changes."""
        return self.read(*arguments) if self.read else [arguments[i] for i in self.written]

    def run(self, kernels: Kernels, arguments: Sequence[Any]) -> Outputs:
        """The result, then the arguments that changed."""
        call = self.call or (lambda kernels, *arguments: kernels[self.operation](*arguments))
        result = call(kernels, *arguments)
        return [x.clone() for x in ([] if result is None else [result]) + self.kept(arguments)]

    def spoil(
        self, arguments: Sequence[Any], fault: int | Callable[[Sequence[Any], float], None], value: float
    ) -> None:
        """Put a number that is not finite in the second token, if there is one."""
        if callable(fault):
            fault(arguments, value)
        elif len(x := arguments[fault]):
            x[(min(1, len(x) - 1), *(min(5, size - 1) for size in x.shape[1:]))] = value

    def calls(self, arguments: Sequence[Any]) -> Iterable[tuple[slice | list[int], Sequence[Any]]]:
        """Calls with a part of the tokens each."""
        if self.parts is not None:
            yield from self.parts(arguments)
            return
        for i in range(len(arguments[self.tokens[0]])):
            own = slice(i, i + 1)
            yield own, [x[own] if at in self.tokens else x for at, x in enumerate(arguments)]
