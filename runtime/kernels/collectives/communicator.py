"""A tensor-parallel group's interface for a decoder and a sampler, and the group with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank's end of its group.

    Construction has two steps: each rank allocates a buffer and sends its `handle` to all others, then `connect` takes
    the handles by rank. From then on, all ranks call the same operations in the same order, with operands of the same
    shapes and dtypes. An operation begins when all ranks have reached it.

    Results have the same bits on all ranks and do not depend on the other rows. Sums are taken in float32, in rank
    order or with `tree` as a binary tree, and are rounded once, after the residual is added. A negative zero may become
    zero.

    Every wait has a limit (TIMEOUT_S by default). On a CPU, a wait that fails raises a CallboardError that names the
    missing rank. On a GPU, its results are garbage and the next `check` raises the error. The group is unusable after
    that."""

    rank: int
    size: int
    handle: bytes

    def connect(self, handles: Sequence[bytes]) -> None:
        """Map the buffers of all ranks; return when all others have mapped this one's."""
        ...

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        """residual += the sum of all ranks' partials; both [n, width], contiguous. Residuals are equal on all ranks."""
        ...

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' partials [n, width], contiguous, in their dtype."""
        ...

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[n, size * width] from each rank's contiguous x [n, width], by rank.

        Rows where `wanted` [n] int32 is 0 on all ranks need not move; their result is undefined."""
        ...

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' keys [n] int64, written in place and returned."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Set the limit of later waits."""
        ...

    def check(self) -> None:
        """Raise the CallboardError of a failed wait. Call it before results are read."""
        ...

    def close(self) -> None:
        """Unmap the buffers of the other ranks; the group is unusable after that."""
        ...


TIMEOUT_S = 5.0  # ranks do the same work, so a later rank is dead, stopped, or at another step


class OneRank:
    """A group of one: partial results are whole, and operations neither wait nor copy."""

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
