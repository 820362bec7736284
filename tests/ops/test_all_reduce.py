"""Operations of ranks over shared memory, with threads as ranks: sums, their order and their bits; gathers; keys."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError
from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.worker.ranks.shared_memory import SharedMemory
from tests.support.ranks.rank_threads import on_ranks


@dataclass(frozen=True)
class Case:
    size: int
    rows: int
    width: int
    dtype: torch.dtype
    residual_dtype: torch.dtype
    tree: bool
    max_bytes: int  # of a piece
    seed: int


cases = st.builds(
    Case,
    size=st.integers(2, 5),
    rows=st.integers(0, 5),
    width=st.integers(1, 70),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    residual_dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    tree=st.booleans(),
    max_bytes=st.sampled_from((1, 64, 200, 1 << 12)),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=40)
@given(cases)
def test_any_operands_give_all_ranks_the_same_bits(case: Case):
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.size, case.rows, case.width
    partials = (torch.randn(shape, generator=generator) * 100).to(case.dtype)
    residual = torch.randn(shape[1:], generator=generator).to(case.residual_dtype)
    keys = torch.randint(-(1 << 62), 1 << 62, shape[:2], generator=generator)

    def run(ranks: Communicator) -> tuple[torch.Tensor, ...]:
        own, sums, own_keys = partials[ranks.rank], residual.clone(), keys[ranks.rank].clone()
        ranks.add_reduced(sums, own)
        assert ranks.all_max(own_keys) is own_keys
        return sums, ranks.reduced(own), ranks.all_gather(own), own_keys

    first, *others = on_ranks(case.size, run, case.max_bytes, case.tree)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    sums, reduced, gathered, most = first
    wide = sum_partials_torch(list(partials), case.tree)
    assert torch.equal(sums, (residual.float() + wide).to(case.residual_dtype))
    assert torch.equal(reduced, wide.to(case.dtype))
    assert torch.equal(gathered, torch.cat(list(partials), -1))
    assert torch.equal(most, keys.amax(0))
    torch.testing.assert_close(wide.double(), partials.double().sum(0), rtol=1e-5, atol=1e-3)


def test_a_tree_has_the_same_sums_for_every_number_of_ranks():
    """Eight partials on one rank, or on two, four and eight ranks that each add their share."""
    leaves = torch.randn(8, 1000) * torch.randint(-8, 8, (8, 1000)).exp2()
    whole = sum_partials_torch(list(leaves), tree=True)
    for size in (2, 4, 8):
        shares = [sum_partials_torch(list(share), tree=True) for share in leaves.chunk(size)]
        assert torch.equal(sum_partials_torch(shares, tree=True), whole)
    assert not torch.equal(sum_partials_torch(list(leaves)), whole)


def test_values_that_are_not_finite_arrive():
    def run(ranks: Communicator) -> torch.Tensor:
        return ranks.reduced(torch.tensor([[math.nan, math.inf, -0.0, 1.0]]) * (ranks.rank or 1))

    for got in on_ranks(2, run):
        assert got[0, 0].isnan()
        assert got[0, 1:].tolist() == [math.inf, 0.0, 2.0]


def test_one_rank_computes_nothing():
    ranks, x, keys = OneRank(), torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    ranks.connect([ranks.handle])
    assert ranks.reduced(x) is x
    assert ranks.all_gather(x) is x
    assert ranks.all_max(keys) is keys


def test_ranks_that_disagree_are_reported():
    def other_operation(ranks: Communicator) -> torch.Tensor:
        x = torch.ones(2, 2)
        return ranks.all_gather(x) if ranks.rank else ranks.reduced(x)

    with pytest.raises(CallboardError, match=r"^Rank 1 is at another operation than rank 0; all ranks must restart\.$"):
        on_ranks(2, other_operation)

    def one_row_less(ranks: Communicator) -> torch.Tensor:
        return ranks.reduced(torch.ones(2 - ranks.rank, 2))

    with pytest.raises(CallboardError, match="Rank 1 is at another operation"):
        on_ranks(2, one_row_less)

    def one_less(ranks: Communicator) -> None:
        for _ in range(3 - ranks.rank):
            ranks.reduced(torch.ones(1, 1))

    with pytest.raises(CallboardError, match=r"^Rank 1 did not come within 0\.2 s; all ranks must restart\.$"):
        on_ranks(2, one_less, timeout_s=0.2)


def test_handles_of_other_groups_are_refused():
    two, three = SharedMemory(0, 2, 64), SharedMemory(1, 3, 64)
    with pytest.raises(CallboardError, match=r"^Rank 1 of 2 gave a handle that does not fit this group;"):
        two.connect([two.handle, three.handle])
    for rank in (two, three):
        rank.close()
    with pytest.raises(CallboardError, match="left its group"):
        two.check()
