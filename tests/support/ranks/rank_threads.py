"""Groups of ranks over shared memory, as threads of this process, for tests of the ranks' results."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from runtime.kernels.collectives.communicator import Communicator
from runtime.worker.ranks.shared_memory import SharedMemory

_T = TypeVar("_T")


def on_ranks(
    size: int, run: Callable[[Communicator], _T], max_bytes: int = 1 << 16, tree: bool = False, timeout_s: float = 10.0
) -> list[_T]:
    """`run` of each rank's communicator, at the same time; its results by rank, or the first error."""
    ranks = [SharedMemory(rank, size, max_bytes, tree, timeout_s) for rank in range(size)]
    handles = [rank.handle for rank in ranks]

    def run_one(rank: SharedMemory) -> _T:
        rank.connect(handles)
        return run(rank)

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run_one, ranks))
    finally:
        for rank in ranks:
            rank.close()
