"""Operation: one computation of a decoder, with the functions that implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """All implementations take the arguments of the torch reference and compute the same (C7).

    Parameters with the name of a setting, such as `deterministic`, get their values when a decoder is built. The `llvm`
    backend registers its implementations in runtime/kernels/cpu/operations.py, because it imports llvmlite."""

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        exact: Callable[..., R] | None = None,  # bits of a row do not depend on others; None if `reference` serves it
        triton: Callable[..., R] | None = None,  # None if the reference serves it
    ) -> None:
        self.reference, self.exact, self.triton = reference, exact or reference, triton or reference

    def __repr__(self) -> str:
        return f"Operation({self.reference.__name__})"

    def implementation(self, backend: str, settings: Mapping[str, Any]) -> Callable[P, R]:
        """The function of a backend, with the settings that it takes."""
        function: Callable[..., R] = self.exact if settings["deterministic"] else self.reference
        if backend == "triton":
            function = self.triton
        names = settings.keys() & getattr(function, "__annotations__", {}).keys()  # builtins have none
        return partial(function, **{name: settings[name] for name in names}) if names else function
