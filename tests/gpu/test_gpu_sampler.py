"""The compiled kernels of sampling, step inputs and staged writes: their twins' answers, the host never waiting."""

import numpy as np
import pytest
import torch

from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.gumbel import noise_bits, noise_keys
from runtime.kernels.sampling.sample import (
    MIN_P,
    NUM_PARAMS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    sample_tokens_triton,
)
from runtime.kernels.step.scatter_writes import scatter_writes
from runtime.kernels.step.step_inputs import build_inputs
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from tests.support.kernels.device_sampler_cases import (
    EOS,
    check_filters,
    check_graph_io,
    check_inputs,
    check_masks,
    check_penalties,
    check_sample,
    check_sampler,
    check_scatter_writes,
    make_state,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

GPU = torch.device("cuda")


def test_answers_equal_the_twins():
    check_scatter_writes(GPU)
    check_graph_io(GPU)
    check_masks(GPU)
    check_inputs(GPU)
    check_sample(GPU, (torch.float32, torch.float16, torch.bfloat16))


def test_filters_follow_their_definition():
    check_filters(GPU, (1, 100, 5000, 49152, 128256))


def test_penalties_equal_the_twins_bit_for_bit():
    check_penalties(GPU, (1, 50, 5000, 128256), rounds=16)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_filtered_rows_do_not_depend_on_their_number(spread):
    """One row has one program a tile, and 256 rows have one or two each."""
    torch.manual_seed(1)
    n, vocab = 300, 128256
    tokens, params = make_state(n, [0.8, 1.0, 0.3], GPU)
    floats = params.view(torch.float32)
    for i, (top_k, top_p, min_p) in enumerate(
        [(0, 0.9, 0.0), (0, 0.5, 0.0), (40, 0.95, 0.0), (4000, 0.9, 0.0), (0, 1.0, 0.2)]
    ):
        params[i::5, TOP_K], floats[i::5, TOP_P], floats[i::5, MIN_P] = top_k, top_p, min_p
    logits = torch.randn(n, vocab, device=GPU) * spread
    slots = torch.randperm(n, device=GPU).int()
    positions = torch.randint(0, 40, (n,), device=GPU).int()
    whole = sample_tokens_triton(logits, slots, positions, tokens, params)
    assert (whole >= 0).all()
    for size in (1, 2, 5, 48, 64, 150):
        for start in (0, 7, 100):
            rows = slice(start, start + size)
            part = sample_tokens_triton(logits[rows], slots[rows], positions[rows], tokens, params)
            assert torch.equal(part, whole[rows]), (size, start)


@pytest.mark.parametrize("vocab", [50, 5000])
def test_the_sampler_of_a_cpu_gives_the_same_tokens(vocab):
    check_sampler(GPU, rounds=20, vocab=vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_full_batch_against_float64_and_alone(vocab, dtype):
    torch.manual_seed(vocab)
    n = 256
    tokens, params = make_state(n, [0.0, 1.0, 0.6], GPU)
    logits = (torch.randn(n, vocab, device=GPU) * 3).to(dtype)
    slots = torch.randperm(n, device=GPU).int()
    positions = torch.randint(0, 40, (n,), device=GPU).int()
    got = sample_tokens_triton(logits, slots, positions, tokens, params)
    own = params[slots.long()]
    seeds = own[:, SEED_HIGH].long() << 32 | own[:, SEED_LOW].long() & 0xFFFFFFFF
    ids = torch.arange(vocab, dtype=torch.int32, device=GPU)
    temperature = own[:, TEMPERATURE].view(torch.float32).double()
    for row in range(n):
        scores = logits[row].double()
        if temperature[row] == 0:
            assert int(got[row]) == int((scores == scores.max()).nonzero()[0])
            continue
        u = (noise_bits(noise_keys(seeds[row : row + 1], positions[row : row + 1]), ids).double() + 0.5) * 2.0**-23
        scores = scores / temperature[row] - torch.log(-torch.log1p(-u))
        assert scores.max() - scores[int(got[row])] < 1e-5
    for rows in (slice(0, 1), slice(100, 107), slice(224, 256)):
        part = sample_tokens_triton(logits[rows], slots[rows], positions[rows], tokens, params)
        assert torch.equal(part, got[rows])


def test_a_captured_step_end_follows_its_inputs():
    tokens, params = make_state(8, [0.0, 1.0], GPU)
    logits = torch.randn(8, 9000, device=GPU)
    slots = torch.arange(8, dtype=torch.int32, device=GPU)
    positions = torch.full((8,), 5, dtype=torch.int32, device=GPU)
    sample_tokens_triton(logits, slots, positions, tokens, params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sample_tokens_triton(logits, slots, positions, tokens, params)
    for step in range(3):
        logits.copy_(torch.randn(8, 9000, device=GPU) * 3)
        positions.fill_(6 + step)
        graph.replay()
        replayed = token_ids.clone()
        assert torch.equal(tokens[:8, 6 + step], replayed)
        assert torch.equal(sample_tokens_triton(logits, slots, positions, tokens, params), replayed)


def test_captured_penalties_follow_sampled_tokens():
    """Replays with rows that count the tokens of earlier replays, against the sampler of a CPU."""
    n, vocab, max_len = 12, 40, 64
    kinds = [
        SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(top_p=0.9, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=1.5, top_k=20),
        SamplingParams(temperature=0.8),
    ]
    twin, host = Sampler(n, vocab, (EOS,), torch.device("cpu")), Slots(n, max_len, 1, torch.device("cpu"))
    sampler = DeviceSampler(n, vocab, (EOS,), Transfers(GPU))
    state = torch.zeros((n + 1, max_len + NUM_PARAMS), dtype=torch.int32, device=GPU)
    tokens, params = state.split((max_len, NUM_PARAMS), 1)
    for slot in range(n):
        new = NewSlot(slot, np.full(4, slot, np.int32), 3, slot, kinds[slot % len(kinds)])
        twin.add(new)
        host.add(new)
        params[slot] = torch.from_numpy(sampler.add(new)).to(GPU)
        tokens[slot, :4] = slot
    slots = torch.arange(n, dtype=torch.int32, device=GPU)
    positions, logits = torch.full_like(slots, 4), torch.zeros(n, vocab, device=GPU)
    sampler.sample(logits, slots, positions, tokens, params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sampler.sample(logits, slots, positions, tokens, params)
    for position in range(4, 40):
        fresh = torch.randn(n, vocab)
        logits.copy_(fresh)
        positions.fill_(position)
        graph.replay()
        rows, at = np.arange(n, dtype=np.int32), np.full(n, position, np.int32)
        assert sampler.is_plain(rows, at)
        want, _ = twin.sample(fresh, rows, at, host)
        host.write_sampled(torch.arange(n) * max_len + position, want)
        assert token_ids.tolist() == want.tolist()


def test_no_step_waits_for_the_device():
    """Every kind of request at once; torch raises at any synchronisation."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(logit_bias=((3, 2.0), (9, -1.0)), logprobs=3),
        SamplingParams(temperature=0, min_tokens=8, stop_token_ids=(7,)),
    ]
    vocab, max_len, n = 5000, 64, 5
    sampler = DeviceSampler(n, vocab, (EOS,), Transfers(GPU))
    state = torch.zeros((n + 1, max_len + 8 + NUM_PARAMS), dtype=torch.int32, device=GPU)
    tokens, tables, params = state.split((max_len, 8, NUM_PARAMS), 1)
    host = np.stack([sampler.add(NewSlot(i, np.arange(4, dtype=np.int32), 4, i, kind)) for i, kind in enumerate(kinds)])
    params[:n] = torch.from_numpy(host).to(GPU)
    logits = torch.randn(n, vocab, device=GPU)
    host_slots, host_positions = np.arange(n, dtype=np.int32), np.full(n, 5, np.int32)
    slots, positions = torch.from_numpy(host_slots).to(GPU), torch.from_numpy(host_positions).to(GPU)
    edges = torch.arange(n + 1, dtype=torch.int32, device=GPU)
    staged = torch.tensor([2, 0, 70, 3, 2, 0, 1, 2, 3, 4], dtype=torch.int32, device=GPU)

    def step() -> None:
        scatter_writes(state.view(-1), staged, 2)
        build_inputs(slots, positions - 1, edges, tokens, tables, 8, n, 1)
        token_ids = sampler.sample(logits, slots, positions, tokens, params)
        assert not sampler.is_plain(host_slots, host_positions)
        logprobs = sampler.resample(logits, token_ids, host_slots, host_positions, tokens, params)
        assert logprobs is not None

    step()  # compiled outside
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
