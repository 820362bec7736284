"""The ranks of a tensor-parallel group, as a decoder and a sampler see them; and the group of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank's end of its group.

    It is made in two steps: each rank allocates a buffer of its own, whose `handle` travels to all others, and
    `connect` takes the handles of all ranks by rank. From then on all ranks call the same operations in the same order,
    with operands of the same shapes and dtypes; each operation begins when all ranks have come to it.

    Results have the same bits on all ranks, whatever a row's neighbours are. Sums are taken in float32, in the order of
    the ranks, or with `tree` as a binary tree over the ranks, and are rounded once, after the residual is added. A
    negative zero may come out as zero.

    Every wait is bounded (TIMEOUT_S, if nothing else is set). A CPU's ends in a CallboardError that names the rank that
    did not come; a GPU's leaves results without meaning behind, and the next `check` raises the error. The group is of
    no use from then on."""

    rank: int
    size: int
    handle: bytes

    def connect(self, handles: Sequence[bytes]) -> None:
        """Reach the buffers of all ranks; returns when all others have reached this one's."""
        ...

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        """residual += the sum of all ranks' partials; both [n, width], contiguous. Residuals are equal on all ranks."""
        ...

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' partials [n, width], contiguous, in their dtype."""
        ...

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[n, size * width] from each rank's x [n, width], contiguous, by rank. Of rows where `wanted` [n] int32, equal
        on all ranks, is 0, nothing needs to be moved, and the result may be anything."""
        ...

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' keys [n] int64, in place of them; returned, too."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Bound the waits of what is called from now on."""
        ...

    def check(self) -> None:
        """Raise the CallboardError of a wait that ended without the other ranks; for whoever reads results."""
        ...

    def close(self) -> None:
        """Let go of the other ranks; the group is of no use from then on."""
        ...


TIMEOUT_S = 5.0  # ranks compute the same work: who comes later than this is gone, stopped, or at another step


class OneRank:
    """A group of one: its partial results are whole, nothing waits and nothing is copied."""

    rank, size, handle = 0, 1, b""

    def connect(self, handles: Sequence[bytes]) -> None:
        pass

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        residual.add_(partial)

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        return x

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        return keys

    def set_timeout(self, seconds: float) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass
