"""How many threads of a CPU dequantize a weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALL = 1 << 20  # numbers of a weight that one thread dequantizes


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """Let one thread work on a small weight, and all of them on a large one.

    Threads wait for one another after every operation on a tensor. Where other programs have the cores, thousands of
    such waits on small weights took ten times the work itself."""
    usual = torch.get_num_threads()
    if num_values > _SMALL or usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
