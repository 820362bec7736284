"""The compiled kernels of ranks with parts of the vocabulary. Ranks are threads that share one device."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from runtime.base.types import FinishReason, Grammar, SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.sample import NUM_PARAMS
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.ranks.split_logits import SplitLogits
from tests.gpu.test_gpu_structured import gpu_runner
from tests.models.test_split_vocabulary import PARAMS
from tests.support.kernels.split_sampler_cases import check_split_sampler
from tests.support.ranks.lockstep_ranks import LockstepGroup, LockstepRank
from tests.support.ranks.split_runners import SplitRunner
from tests.support.structured.engine import answers, hot, recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

GPU = torch.device("cuda")


def test_ranks_answer_as_one():
    check_split_sampler(GPU, ((0, 2, 5000), (1, 3, 4), (2, 8, 50), (3, 8, 128256), (4, 5, 151936), (5, 3, 2049)))


@mock.patch("runtime.features.grammar_state._MAKING_S", 60.0)  # no sample waits for a matcher on one runner alone
def test_runners_sample_as_one_does():
    """With log-probabilities of prompts and answers, guesses, and grammars, with automata on rank 0 only."""
    runner = SplitRunner(2, partial(gpu_runner, deterministic=True, cuda_graphs=False, draft=None))
    found = answers(runner, PARAMS)
    assert found["5"][1] is FinishReason.GRAMMAR
    assert answers(runner, PARAMS, recorded(found, 0.7)) == found
    answers(runner, [hot(Grammar("broken", "start: /(/", "")), *PARAMS[:5]])


class FirstOfTwo:
    """Rank 0, alone in a graph: the other rank's operands are in buffers."""

    rank, size = 0, 2

    def __init__(self, part: torch.Tensor, keys: torch.Tensor) -> None:
        self.part, self.keys = part, keys

    def all_gather(self, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat((x, self.part), 1)

    def all_max(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.maximum(keys, self.keys, out=keys)


def test_a_captured_pass_follows_its_inputs():
    """Filtered, penalised and plain rows in one graph. Rows and logits change from replay to replay."""
    half, max_len, n = 4500, 64, 12
    kinds = [
        SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=7),
        SamplingParams(temperature=0.0, presence_penalty=1.5), SamplingParams(top_p=0.9, repetition_penalty=1.3),
    ]  # fmt: skip

    def opened(ranks: LockstepRank | FirstOfTwo) -> tuple[DeviceSampler, torch.Tensor, torch.Tensor]:
        sampler = DeviceSampler(n, 2 * half, (), Transfers(GPU), SplitLogits(2 * half, ranks))
        state = torch.zeros((n + 1, max_len + NUM_PARAMS), dtype=torch.int32, device=GPU)
        for slot in range(n):
            new = NewSlot(slot, np.full(4, slot, np.int32), 3, slot, kinds[slot % len(kinds)])
            state[slot, max_len:] = torch.from_numpy(sampler.add(new)).to(GPU)
            state[slot, :4] = slot
        return sampler, *state.split((max_len, NUM_PARAMS), 1)

    part, keys = torch.zeros(n, half, device=GPU), torch.zeros(n, dtype=torch.int64, device=GPU)
    sampler, *state = opened(FirstOfTwo(part, keys))
    group = LockstepGroup(2)
    eager = [opened(ranks) for ranks in group.ranks]
    slots, positions = (
        torch.arange(n, dtype=torch.int32, device=GPU),
        torch.full((n,), 4, dtype=torch.int32, device=GPU),
    )
    logits = torch.zeros(n, half, device=GPU)
    sampler.sample(logits, slots, positions, *state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sampler.sample(logits, slots, positions, *state)
    for position in range(4, 30):
        halves = torch.randn(2, n, half, device=GPU) * 3
        slots.copy_(torch.randperm(n))
        positions.fill_(position)

        def step(ranks: LockstepRank, halves: torch.Tensor = halves) -> list[int]:
            sampler, *state = eager[ranks.rank]
            return sampler.sample(halves[ranks.rank], slots, positions, *state).tolist()

        want = group.run(step)
        assert want[0] == want[1]
        for buffer, operand in zip((part, keys), group.ranks[1].operands, strict=True):
            buffer.copy_(operand)
        logits.copy_(halves[0])
        graph.replay()
        assert token_ids.tolist() == want[0]
