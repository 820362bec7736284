"""Ranks that write into each other's memory, on one GPU: as processes with handles, and as streams of one process."""

from functools import partial

import pytest
import torch

from tests.support.ranks.communicator_processes import answer_of, communicator_processes
from tests.support.ranks.gpu_ranks import every_operation, last_rank_dies, make, replay_in_processes, replay_on_streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("size", "tree"), [(2, False), (3, False), (4, True)])
def test_all_operations_equal_their_definition(size: int, tree: bool):
    with communicator_processes(size, make, every_operation, tree=tree) as ranks:
        assert [answer_of(rank) for rank in ranks] == ["equal"] * size


def test_graphs_of_two_processes():
    with communicator_processes(2, make, partial(replay_in_processes, num_replays=100)) as ranks:
        assert [answer_of(rank) for rank in ranks] == ["equal"] * 2


def test_graphs_on_two_streams():
    replay_on_streams(num_replays=1000, num_sums=100)


def test_a_dead_process_is_named_and_nothing_hangs():
    with communicator_processes(2, make, last_rank_dies) as ranks:
        sentence, seconds = answer_of(ranks[0])
    assert sentence == "Rank 1 did not come within 1 s; all ranks must restart."
    assert 0.2 < seconds < 5
