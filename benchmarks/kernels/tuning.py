"""The rows of the tuner's table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch

Choices = dict[str, Any]  # a configuration for each part; the rule's for others


class Cell(NamedTuple):
    shape: str
    form: str  # of the weights
    rows: int


class Layers(Protocol):
    """Layers with data of their own, for one cell."""

    num_layers: int
    num_bytes: float  # that a layer must read
    parts: Mapping[str, list[Any]]  # candidates of each part

    def run(self, choices: Choices) -> None:
        """Launch all layers in a row."""

    def results(self, choices: Choices) -> list[torch.Tensor]:
        """Return the first layer's results."""

    def exact(self) -> list[torch.Tensor]:
        """Return the same by a reference."""

    def others(self) -> dict[str, Callable[[], object]]:
        """Return other ways to compute all layers, such as a library's."""


class Operation(NamedTuple):
    make: Callable[[Cell, str], Layers]  # of a cell, on a device
    shapes: Collection[str]
    defaults: list[str]  # shapes
    forms: Collection[str]
    rows: list[int]
    least_rows: int = 1
    most_rows: int = 1 << 20
