"""A group of ranks in one process. Its threads run one at a time and take turns where they exchange data. This works
under Triton's interpreter, which lacks threads, and on one device, where ranks share the stream."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

from runtime.kernels.collectives.all_reduce import sum_partials_torch

_T = TypeVar("_T")


class LockstepRank:
    """A `Communicator` of one thread that counts its calls."""

    handle = b""

    def __init__(self, rank: int, group: list["LockstepRank"], turn: threading.Condition, tree: bool) -> None:
        self.rank, self.group, self.turn, self.tree = rank, group, turn, tree
        self.operands: list[torch.Tensor] = []  # of all exchanges in the run, or of the last exchange
        self.counts = Counter[str]()
        self.error: BaseException | None = None

    @property
    def size(self) -> int:
        return len(self.group)

    def _exchange(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.counts[name] += 1
        self.operands.append(x.clone())
        at = len(self.operands)
        self.turn.notify_all()

        def have_come() -> bool:
            return all(other.error or len(other.operands) >= at for other in self.group)

        assert self.turn.wait_for(have_come, timeout=60), "a rank is missing"
        assert not any(other.error for other in self.group), "another rank failed"
        operands = [other.operands[at - 1] for other in self.group]
        assert len({(x.shape, x.dtype) for x in operands}) == 1, "ranks are at different operations"
        return operands

    def add_reduced(self, residual: torch.Tensor, partial: torch.Tensor) -> None:
        total = sum_partials_torch(self._exchange("add_reduced", partial), self.tree)
        residual.copy_(residual.float() + total)

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        return sum_partials_torch(self._exchange("reduced", partial), self.tree).to(partial.dtype)

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.cat(self._exchange("all_gather", x), 1)
        return out if wanted is None else out.masked_fill_(wanted[:, None] == 0, torch.nan)

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.copy_(torch.stack(self._exchange("all_max", keys)).amax(0))


class LockstepGroup:
    """Ranks that run a function together."""

    def __init__(self, size: int, tree: bool = False) -> None:
        turn = threading.Condition()
        self.ranks = list[LockstepRank]()
        self.ranks += (LockstepRank(rank, self.ranks, turn, tree) for rank in range(size))

    def run(self, work: Callable[[LockstepRank], _T]) -> list[_T]:
        """The results of `work` by rank, or the first error."""
        results = dict[int, _T]()
        for rank in self.ranks:
            rank.operands.clear()

        def run_one(rank: LockstepRank) -> None:
            with rank.turn:
                try:
                    results[rank.rank] = work(rank)
                except BaseException as e:
                    rank.error = e
                    rank.turn.notify_all()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [rank.error for rank in self.ranks if rank.error]
        for error in sorted(errors, key=lambda error: "another rank" in str(error)):
            raise error
        assert len({len(rank.operands) for rank in self.ranks}) == 1, "a rank asked more often than others"
        return [results[rank] for rank in range(len(self.ranks))]
