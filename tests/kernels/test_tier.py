"""Blocks in slots of a tier, and their checksums: kernels against the references, and these against plain numbers."""

import numpy as np
import pytest
import torch

from runtime.kernels.tier.block_runs import (
    BlockRuns,
    gather_runs_torch,
    gather_runs_triton,
    scatter_runs_torch,
    scatter_runs_triton,
)
from runtime.kernels.tier.slot_copies import copy_slots_torch, copy_slots_triton
from runtime.kernels.tier.slot_sums import slot_sums_torch, slot_sums_triton
from runtime.tier.sums import payload_sums
from tests.kernels.backends import BACKENDS, Backend

# runs, words in a run, words from one run to the next, words from one block to the next, blocks
SHAPES = {
    "small": (6, 8, 80, 8, 10),
    "one run": (1, 3000, 0, 3008, 5),
    "odd": (7, 33, 400, 33, 12),
    "long": (5, 2600, 13000, 2600, 5),
}
ON = [own for own in BACKENDS if own.values[0].dtype == torch.float32 and own.values[0].name != "llvm"]
on_backends = pytest.mark.parametrize("backend", ON)


def runs_of(name: str, device: str = "cpu", seed: int = 0) -> BlockRuns:
    num_runs, run, stride, block, num_blocks = SHAPES[name]
    length = (num_runs - 1) * stride + (num_blocks - 1) * block + run
    words = torch.randint(-(2**63), 2**63 - 1, (length,), generator=torch.Generator().manual_seed(seed))
    return BlockRuns(words.to(device), num_runs, run, stride, block)


@on_backends
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_return_from_slots(name: str, backend: Backend):
    is_triton = backend.name == "triton"
    gather = gather_runs_triton if is_triton else gather_runs_torch
    scatter = scatter_runs_triton if is_triton else scatter_runs_torch
    runs, other = runs_of(name, backend.device), runs_of(name, backend.device, seed=1)
    blocks, first = torch.tensor([3, 0, 2], device=backend.device), 5
    slots = torch.zeros((3, first + runs.size + 4), dtype=torch.int64, device=backend.device)
    gather(runs, blocks * runs.block, slots, first)
    for i, block in enumerate(blocks.tolist()):
        at = [block * runs.block + r * runs.stride for r in range(runs.num_runs)]
        want = torch.cat([runs.words[begin : begin + runs.run] for begin in at])
        assert torch.equal(slots[i, first : first + runs.size], want)
    assert not slots[:, :first].any()
    assert not slots[:, first + runs.size :].any()

    fits, want = torch.tensor([True, False, True], device=backend.device), other.words.clone()
    for block in (3, 2):
        for r in range(runs.num_runs):
            own = slice(begin := block * runs.block + r * runs.stride, begin + runs.run)
            want[own] = runs.words[own]
    scatter(other, blocks * runs.block, slots, first, fits)
    assert torch.equal(other.words, want)


@on_backends
@pytest.mark.parametrize("size", [1, 60, 2048, 5000])
def test_sums_are_those_of_the_region(size: int, backend: Backend):
    words = runs_of("long").words[:15600].view(3, 5200)
    sums = slot_sums_triton if backend.name == "triton" else slot_sums_torch
    got = sums(words.to(backend.device), size).cpu().numpy().view(np.uint64)
    payload = np.ascontiguousarray(words[:, :size].numpy()).view(np.uint8)
    assert got.tolist() == payload_sums(payload, bytes(48)).tolist()
    changed = words.clone()
    changed[1, size - 1] ^= 1 << 63
    assert (sums(changed.to(backend.device), size).cpu().numpy().view(np.uint64) == got).tolist() == [True, False, True]


@on_backends
@pytest.mark.parametrize(("size", "count"), [(1, 3), (4096, 1), (5000, 20)])
def test_slots_move_to_host_and_back(size: int, count: int, backend: Backend):
    """Programs copy several blocks each, and no other word changes."""
    copy, is_gpu = copy_slots_triton if backend.name == "triton" else copy_slots_torch, backend.device == "cuda"
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (count, 5008), generator=generator)
    host = torch.zeros((count + 1, 5008), dtype=torch.int64, pin_memory=is_gpu)
    rows = torch.randperm(count, generator=generator) + 1
    addresses = (rows * 5008 * 8 + host.data_ptr()).to(backend.device)
    copy(words.to(backend.device), addresses, size, True)
    if is_gpu:
        torch.cuda.synchronize()
    assert torch.equal(host[rows, :size], words[:, :size])
    assert not host[0].any()
    assert not host[:, size:].any()

    slots = torch.zeros_like(words, device=backend.device)
    copy(slots, addresses, size, False)
    assert torch.equal(slots[:, :size].cpu(), words[:, :size])
    assert not slots[:, size:].any()
