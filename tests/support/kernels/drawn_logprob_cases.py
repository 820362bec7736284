"""`sampling_logprobs` of both samplers against a plain softmax in float64 over the tokens that may be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.sample import NUM_PARAMS
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from runtime.worker.logprobs import Logprobs
from runtime.worker.slot_sampling import MASKED_LOGIT

CPU = torch.device("cpu")
EOS, VOCAB, MAX_LEN = 2, 60, 40

drawn_params = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 7, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((5, 3.0), (9, -4.0))]),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(2, 33))]),
    min_tokens=st.sampled_from([0, 0, 8]),
    logprobs=st.just(0),
    sampling_logprobs=st.just(True),
)


def plain_logprobs(
    logits: np.ndarray, params: SamplingParams, tokens: list[int], prompt_len: int
) -> tuple[np.ndarray, bool]:
    """The log-probability of each token by the definition, and whether a filter's bound is a matter of rounding."""
    x = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        x[token_id] += bias
    if len(tokens) < prompt_len + params.min_tokens:
        x[EOS] = MASKED_LOGIT
    if params.allowed_token_ids:
        kept = np.isin(np.arange(len(x)), params.allowed_token_ids)
        x[~kept] = -math.inf
    counts = np.bincount(tokens[prompt_len:], minlength=len(x))
    seen = np.bincount(tokens, minlength=len(x)) > 0
    factor = np.where(x > 0, 1 / params.repetition_penalty, params.repetition_penalty)
    x = x * np.where(seen, factor, 1.0) - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty
    if params.temperature == 0:
        return np.zeros(len(x)), False
    x, near = x / params.temperature, False
    order = np.sort(x)[::-1]
    bound = order[params.top_k - 1] if 0 < params.top_k < len(x) else -math.inf
    masses = np.exp(order - order[0]) * (order >= bound)
    reached = np.cumsum(masses) / masses.sum()
    if params.top_p < 1:
        before = reached - masses / masses.sum()
        near |= bool((np.abs(before - params.top_p) < 1e-5).any())
        bound = max(bound, order[(before < params.top_p).sum() - 1])
    if params.min_p > 0:
        least = order[0] + math.log(params.min_p)
        near |= bool((np.abs(x - least) < 1e-4).any())
        bound = max(bound, least)
    kept = np.where(x >= bound, x, -math.inf)
    return kept - order[0] - np.log(np.exp(kept - order[0]).sum()), near


class Rows:
    """Requests with random tokens and logits, one row each."""

    def __init__(self, params: list[SamplingParams], seed: int, spread: float = 3.0, vocab: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        self.params, self.vocab = params, vocab
        self.tokens = [rng.integers(0, vocab, rng.integers(2, 12)).tolist() for _ in params]
        self.prompt_lens = [int(rng.integers(1, len(tokens) + 1)) for tokens in self.tokens]
        self.seeds = rng.integers(2**62, size=len(params)).tolist()
        self.logits = torch.from_numpy(rng.normal(size=(len(params), vocab)) * spread).float()

    def news(self) -> list[NewSlot]:
        rows = enumerate(zip(self.tokens, self.prompt_lens, self.seeds, self.params, strict=True))
        return [
            NewSlot(slot, np.array(tokens, np.int32), prompt_len, seed, params)
            for slot, (tokens, prompt_len, seed, params) in rows
        ]

    def on_host(self, slots: np.ndarray, *kernels) -> tuple[list[int], list[float]]:
        """Token ids and their log-probabilities by `Sampler`, of these rows."""
        sampler = Sampler(len(self.params), self.vocab, (EOS,), CPU, None, *kernels)
        state = Slots(len(self.params), MAX_LEN, 4, CPU)
        for new in self.news():
            sampler.add(new)
            state.add(new)
        positions = np.array([len(self.tokens[slot]) for slot in slots], np.int32)
        ids, found = sampler.sample(self.logits[slots].clone(), slots.astype(np.int32), positions, state)
        return ids.tolist(), [] if found.drawn is None else found.drawn.tolist()

    def on_device(self, slots: np.ndarray, device: torch.device = CPU) -> tuple[list[int], list[float]]:
        """Token ids and their log-probabilities by `DeviceSampler`, of these rows."""
        ids, found = self.prepared(slots, device)()
        return ids.tolist(), found.drawn.tolist()

    def prepared(
        self, slots: np.ndarray, device: torch.device = CPU
    ) -> Callable[[], tuple[torch.Tensor, Logprobs | None]]:
        """Both passes of `DeviceSampler` over these rows, as a call."""
        sampler = DeviceSampler(len(self.params), self.vocab, (EOS,), Transfers(device))
        state = torch.zeros((len(self.params) + 1, MAX_LEN + NUM_PARAMS), dtype=torch.int32, device=device)
        tokens, params = state[:, :MAX_LEN], state[:, MAX_LEN:]
        for new in self.news():
            params[new.slot] = torch.from_numpy(sampler.add(new)).to(device)
            tokens[new.slot, : len(new.token_ids)] = torch.from_numpy(new.token_ids).to(device)
        slots, positions = slots.astype(np.int32), np.array([len(self.tokens[slot]) for slot in slots], np.int32)
        where = torch.from_numpy(slots).to(device), torch.from_numpy(positions).to(device)
        logits = self.logits[slots].to(device, copy=True)

        def run() -> tuple[torch.Tensor, Logprobs | None]:
            ids = sampler.sample(logits, *where, tokens, params)
            return ids, sampler.resample(logits, ids, slots, positions, tokens, params)

        return run


def check_definition(params: list[SamplingParams], seed: int, sampled, **rows) -> None:
    """Args:
    sampled: `Rows.on_host` or `Rows.on_device`, or a call of one."""
    made = Rows(params, seed, **rows)
    every = np.arange(len(params))
    ids, drawn = sampled(made, every)
    for row in every:
        want, is_near = plain_logprobs(made.logits[row].numpy(), params[row], made.tokens[row], made.prompt_lens[row])
        if not is_near:
            assert abs(drawn[row] - want[ids[row]]) < 1e-5 * max(1.0, abs(want[ids[row]])), (row, params[row])
        assert math.isfinite(drawn[row])
    for part in (every[:1], every[::2][::-1].copy()):  # the same bits among other rows
        assert sampled(made, part) == ([ids[row] for row in part], [drawn[row] for row in part])


def varied(num_rows: int) -> list[SamplingParams]:
    """Requests that differ in temperature and filters."""
    base = SamplingParams(max_tokens=20, logprobs=0, sampling_logprobs=True)
    filters = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.05}, {"repetition_penalty": 1.2}]
    return [
        replace(base, temperature=(1.0, 0.6, 0.0, 1.3)[i % 4], **filters[i % len(filters)]) for i in range(num_rows)
    ]


def check_twins(device: torch.device = CPU, num_rows: int = 20, vocab: int = VOCAB) -> None:
    """Both samplers draw the same tokens with the same log-probabilities, up to rounding."""
    for seed in range(3):
        rows, every = Rows(varied(num_rows), seed, vocab=vocab), np.arange(num_rows)
        (want, want_drawn), (got, drawn) = rows.on_host(every), rows.on_device(every, device)
        assert got == want
        torch.testing.assert_close(torch.tensor(drawn), torch.tensor(want_drawn), atol=1e-5, rtol=1e-5)
