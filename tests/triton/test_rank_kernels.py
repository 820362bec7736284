"""Kernels that sum, gather and compare over ranks, under Triton's interpreter. Each rank is a process, and all write
into shared memory. Bits equal the definition."""

import random
import time

import pytest
import torch

from runtime.kernels.collectives import all_reduce
from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.worker.ranks.peer_memory import PeerMemory
from tests.support.ranks.communicator_processes import answer_of, communicator_processes
from tests.support.ranks.host_memory import HostMemory

INBOX_BYTES = 1 << 18
SHAPES = ((2, 700), (9, 4096), (1, 1040))  # the second in two pieces


def make(rank: int, size: int, timeout_s: float, tree: bool = False) -> PeerMemory:
    return PeerMemory(
        rank, size, INBOX_BYTES, torch.device("cpu"), tree, timeout_s, memory=HostMemory(), num_programs=2
    )


def operands(size: int, shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Operands of all ranks, with values that kernels must not take for missing ones."""
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = (torch.randn(size, *shape, generator=generator) * 10).to(dtype)
    drawn[:, 0, 3] = -0.0
    drawn[0, 0, 5], drawn[size - 1, 0, 6] = torch.nan, torch.inf
    return list(drawn)


def check_sums(ranks: PeerMemory, partials: list[torch.Tensor], residual_dtype: torch.dtype) -> None:
    wide, own = sum_partials_torch(partials, ranks.op == "tree"), partials[ranks.rank]
    residual = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(residual_dtype)
    want = (residual.float() + wide).to(residual_dtype)
    ranks.add_reduced(residual, own)
    torch.testing.assert_close(residual, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ranks.reduced(own), wide.to(own.dtype), rtol=0, atol=0, equal_nan=True)


def every_operation(ranks: PeerMemory) -> str:
    delays = random.Random(ranks.rank)
    for i, shape in enumerate(SHAPES[: 5 - ranks.size]):
        time.sleep(delays.choice((0.0, 0.05)))
        all_reduce.SMALL_BYTES = 0 if i % 2 else 1 << 18  # two shots, of more than two ranks, and longer blocks
        dtype = torch.float32 if ranks.op == "tree" or i % 3 else torch.float16
        partials = operands(ranks.size, shape, dtype)
        check_sums(ranks, partials, torch.float32 if i % 3 else torch.float16)
        wanted = torch.arange(shape[0], dtype=torch.int32) % 2
        for rows, kept in ((None, torch.ones_like(wanted)), (wanted, wanted)):
            gathered = ranks.all_gather(partials[ranks.rank], rows)[kept.bool()]
            want = torch.cat(partials, -1)[kept.bool()]
            torch.testing.assert_close(gathered, want, rtol=0, atol=0, equal_nan=True)
        turns = ranks._inboxes.state.clone()
        ranks.all_gather(partials[ranks.rank], torch.zeros_like(wanted))
        assert torch.equal(ranks._inboxes.state, turns), "where nothing is moved nobody is waited for"
        keys = torch.tensor([ranks.rank << 40, -ranks.rank, -1 << 63])
        assert ranks.all_max(keys).tolist() == [(ranks.size - 1) << 40, 0, -1 << 63]
    ranks.check()
    return "equal"


def last_rank_leaves(ranks: PeerMemory) -> float:
    """The seconds of the operations after the first failed one."""
    x = torch.ones(1, 1500)
    assert ranks.reduced(x)[0, 0] == ranks.size
    if ranks.rank == ranks.size - 1:
        return 0.0
    ranks.reduced(x)
    start = time.monotonic()
    for _ in range(3):
        ranks.reduced(x)
    seconds = time.monotonic() - start
    ranks.check()
    return seconds


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "tree"), [(3, False), (4, True)])
def test_all_operations(size: int, tree: bool):
    with communicator_processes(size, make, every_operation, timeout_s=60.0, tree=tree) as ranks:
        assert [answer_of(rank) for rank in ranks] == ["equal"] * size


def test_a_missing_rank_is_named():
    with communicator_processes(2, make, last_rank_leaves, timeout_s=0.1) as ranks:
        assert answer_of(ranks[0]) == "Rank 1 did not come within 0.1 s; all ranks must restart."
