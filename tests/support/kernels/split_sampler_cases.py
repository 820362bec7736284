"""Checks of the device sampler's ranks, which have parts of the vocabulary, against one rank, on any device."""

import numpy as np
import torch

from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.sample import NUM_PARAMS
from runtime.kernels.sampling.wanted_logits import wanted_logits_torch, wanted_logits_triton
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.ranks.split_logits import SplitLogits
from tests.support.kernels.device_sampler_cases import CPU, EOS, draw_params
from tests.support.ranks.lockstep_ranks import LockstepGroup, LockstepRank


def device_steps(
    ranks: LockstepRank | None, device: torch.device, seed: int, vocab: int, num_steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tokens and log-probabilities of several steps of random requests, and the state's tokens: by one rank, or by
    ranks with parts of the logits."""
    num_slots, max_len, rng = 6, 24, np.random.default_rng(seed)
    split = SplitLogits(vocab, ranks)
    sampler = DeviceSampler(num_slots, vocab, (EOS,), Transfers(device), split)
    state = torch.zeros((num_slots + 1, max_len + NUM_PARAMS), dtype=torch.int32, device=device)
    tokens, params = state[:, :max_len], state[:, max_len:]
    lengths = rng.integers(1, 9, num_slots).astype(np.int32)
    for slot in range(num_slots):
        known = rng.integers(0, vocab, lengths[slot]).astype(np.int32)
        drawn = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1), draw_params(rng))
        new = NewSlot(slot, known, 1, int(rng.integers(2**63)), drawn[-1 if seed else slot % 3])
        params[slot] = torch.from_numpy(sampler.add(new)).to(device)
        tokens[slot, : len(known)] = torch.from_numpy(known).to(device)
    found = []
    for step in range(num_steps):
        rows = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].astype(np.int32)
        logits = torch.from_numpy(rng.normal(size=(len(rows), vocab)).astype(np.float32) * 4)
        if step == 1:
            logits[0, vocab - 1] = torch.nan
        elif step == 2:
            logits = logits.round()
        own = logits[:, split.own_ids.start : split.own_ids.stop].to(device, copy=True)
        where = torch.from_numpy(rows).to(device), torch.from_numpy(lengths[rows]).to(device)
        wanted = wanted_logits_triton(*where, params)
        assert torch.equal(wanted, wanted_logits_torch(*where, params))
        on_host = rows, lengths[rows]
        flags = sampler.filtered[rows].any(), sampler.penalised[rows].any()
        token_ids = sampler.sample(own, *where, tokens, params, *map(bool, flags if step == 1 else (True, True)))
        found.append(token_ids)
        if not sampler.is_plain(*on_host):
            logprobs = sampler.resample(own, token_ids, *on_host, tokens, params)
            if logprobs is not None:
                found += (logprobs.ranks, logprobs.logprobs, logprobs.top_ids, logprobs.top_logprobs)
        lengths[rows] += 1
    return found, tokens[:-1]


def check_split_sampler(
    device: torch.device = CPU, cases: tuple[tuple[int, int, int], ...] = ((0, 2, 2100), (1, 3, 4))
) -> None:
    """Ranks with parts of the logits, by seed, number and vocabulary. All have one rank's tokens and log-probabilities,
    to the bit. This holds too if one has a logit that is not finite, or if some are without tokens."""
    for seed, size, vocab in cases:
        want, state = device_steps(None, device, seed, vocab, 4)
        for got, its_state in LockstepGroup(size).run(lambda rank: device_steps(rank, device, seed, vocab, 4)):  # noqa: B023
            assert torch.equal(its_state, state)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))  # a failed row has such log-probabilities
