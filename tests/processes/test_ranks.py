"""Ranks as processes over shared memory: many operations in a row, and ranks that die, stop or fall behind."""

import os
import random
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime.base.types import SamplingParams
from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.worker.ranks.shared_memory import SharedMemory
from tests.ops.test_split_vocabulary import equal, sampled
from tests.support.ranks.communicator_processes import answer_of, communicator_processes

MAX_BYTES = 1 << 10


def partial_of(rank: int, operation: int) -> torch.Tensor:
    """A rank's summand, of one to several pieces."""
    generator = torch.Generator().manual_seed(rank << 32 | operation)
    return torch.randn(1 + operation % 3, 8 + operation * 7 % 300, generator=generator)


def many_operations(ranks: SharedMemory) -> str:
    """Half of them with delays, so that each rank is sometimes first and sometimes asleep."""
    delays = random.Random(ranks.rank)
    for operation in range(300):
        if operation % 2:
            time.sleep(delays.choice((0.0, 0.0, 0.001, 0.004)))
        partials = [partial_of(rank, operation) for rank in range(ranks.size)]
        assert torch.equal(ranks.reduced(partials[ranks.rank]), sum_partials_torch(partials))
        assert ranks.all_max(torch.tensor([ranks.rank * operation])).item() == (ranks.size - 1) * operation
    return "equal"


def last_rank_ends(ranks: SharedMemory) -> None:
    for operation in range(1000):
        if (ranks.rank, operation) == (ranks.size - 1, 50):
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.reduced(partial_of(ranks.rank, operation))


def last_rank_stops(ranks: SharedMemory) -> None:
    for operation in range(1000):
        if (ranks.rank, operation) == (ranks.size - 1, 50):
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.reduced(partial_of(ranks.rank, operation))


def last_rank_skips_one(ranks: SharedMemory) -> None:
    for operation in range(100):
        if (ranks.rank, operation) != (ranks.size - 1, 50):
            ranks.reduced(partial_of(ranks.rank, operation))


def sample_as_one_rank(ranks: SharedMemory) -> str:
    """Rows that want the best token alone, and rows that want more, from parts of the logits."""
    rng, plain = np.random.default_rng(0), [SamplingParams(temperature=t) for t in (0.0, 0.7)]
    for step in range(60):
        kinds = plain if step % 2 else [*plain, SamplingParams(top_p=0.5, logprobs=2), SamplingParams(min_tokens=9)]
        requests = [(rng.integers(0, 300, 4 + step % 9).tolist(), kind) for kind in kinds]
        logits = torch.from_numpy(rng.normal(size=(len(kinds), 300)).astype(np.float32))
        assert equal(sampled(ranks, logits, requests), sampled(None, logits, requests))
    return "equal"


@pytest.mark.parametrize(
    ("scenario", "size"), [(many_operations, 2), (many_operations, 3), (many_operations, 4), (sample_as_one_rank, 3)]
)
def test_ranks_stay_together(scenario: Callable[[SharedMemory], str], size: int):
    with communicator_processes(size, SharedMemory, scenario, max_bytes=MAX_BYTES, timeout_s=60.0) as ranks:
        assert [answer_of(rank) for rank in ranks] == ["equal"] * size


@pytest.mark.parametrize(
    ("scenario", "timeout_s", "sentence"),
    [
        (last_rank_ends, 60.0, "The process of rank 2 has ended; all ranks must restart."),
        (last_rank_stops, 1.0, "Rank 2 did not come within 1 s; all ranks must restart."),
    ],
)
def test_a_lost_rank_is_named(scenario: Callable[[SharedMemory], None], timeout_s: float, sentence: str):
    with communicator_processes(3, SharedMemory, scenario, max_bytes=MAX_BYTES, timeout_s=timeout_s) as ranks:
        assert [answer_of(rank) for rank in ranks[:2]] == [sentence] * 2


def test_a_rank_one_step_ahead_is_found_at_once():
    with communicator_processes(2, SharedMemory, last_rank_skips_one, max_bytes=MAX_BYTES, timeout_s=60.0) as ranks:
        sentences = [answer_of(rank) for rank in ranks]
    assert sentences == [f"Rank {1 - i} is at another operation than rank {i}; all ranks must restart." for i in (0, 1)]
