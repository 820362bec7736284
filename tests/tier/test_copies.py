"""Blocks and states through a tier: the same bits on every backend, whatever happens to the slots meanwhile."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.tier.gpu_copies import GpuCopier
from tests.support.engine.tier_copies import SPECS, STATE, CopiedCache, keys_of
from tests.triton import INTERPRETING

BACKENDS = [
    "torch",
    pytest.param("triton", marks=[
        pytest.mark.triton, pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1"),
    ]),
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ]),
]  # fmt: skip
on_backends = pytest.mark.parametrize("backend", BACKENDS)


def blocks_of(made: CopiedCache, first: int, count: int) -> list[tuple[int, int]]:
    """Blocks of each group in turn, and a state's row."""
    groups = [*range(len(made.spec.groups)), *([STATE] if made.num_parts else [])]
    places = [(groups[i % len(groups)], first + i) for i in range(count)]
    return [(group, at % 10 + 1 if group == STATE else at) for group, at in places]


@on_backends
@pytest.mark.parametrize("name", SPECS)
def test_bits_return(name: str, backend: str, tmp_path: Path):
    made = CopiedCache(tmp_path, SPECS[name], backend)
    sources, targets, names = blocks_of(made, 3, 6), blocks_of(made, 19, 6), "abcdef"
    want = [made.block(*place) for place in sources]
    made.store(sources, names)
    made.fill(1)
    before = [words.clone() for words in made.memory()]
    assert all(made.load(targets, names))
    for place, bits in zip(targets, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made.block(*place), bits, strict=True)), place
    changed = sum(int((a != b).sum()) for a, b in zip(made.memory(), before, strict=True))
    assert changed == sum(x.numel() for bits in want for x in bits) // 8, "no other word has changed"
    made.copier.close()


@on_backends
def test_another_process_finds_the_blocks(backend: str, tmp_path: Path):
    """The region outlives its copier, and other backends read the same bytes."""
    first = CopiedCache(tmp_path, SPECS["int8"], "torch")
    want = first.block(0, 7)
    first.store([(0, 7)], ["a"])
    first.copier.close()
    other = CopiedCache(tmp_path, SPECS["int8"], backend)
    other.fill(5)
    assert other.load([(0, 9)], ["a"]) == [True]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(other.block(0, 9), want, strict=True))
    other.copier.close()


@on_backends
def test_more_blocks_than_staging(backend: str, tmp_path: Path):
    made = CopiedCache(tmp_path, SPECS["two lengths"], backend, staging=4)
    sources = [(i % 2, i + 1) for i in range(17)]
    want = [made.block(*place) for place in sources]
    made.store(sources, range(17))
    made.fill(1)
    targets = [(group, 38 - block) for group, block in sources]
    assert all(made.load(targets, range(17)))
    for place, bits in zip(targets, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made.block(*place), bits, strict=True))
    made.copier.close()


@on_backends
def test_damaged_slots_leave_their_blocks(backend: str, tmp_path: Path):
    """A flipped bit is found before the block is written."""
    made = CopiedCache(tmp_path, SPECS["mixed int8"], backend)
    made.store([(0, 1), (1, 2), (0, 3)], "abc")
    (slot,) = made.region.slots_of(keys_of(("b", 0)), ready=True)
    made.region.payload(0)[slot, 77] ^= 4
    made.fill(1)
    before = made.block(1, 5)
    assert made.load([(0, 4), (1, 5), (0, 6)], "abc") == [True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(made.block(1, 5), before, strict=True))
    made.copier.close()


@on_backends
def test_missing_and_unfinished_keys_are_damaged(backend: str, tmp_path: Path):
    made = CopiedCache(tmp_path, SPECS["bfloat16"], backend)
    made.store([(0, 1)], "a")
    made.region.reserve(keys_of(("b", 0)), 0)
    assert made.load([(0, 4), (0, 5), (0, 6)], "bac") == [False, True, False]
    made.copier.close()


@on_backends
def test_store_without_a_slot_ends(backend: str, tmp_path: Path):
    made = CopiedCache(tmp_path, SPECS["bfloat16"], backend)
    stores = made.transfers([(0, 1), (0, 2)], "ab")
    made.start(stores=stores)
    made.region.drop(keys_of(("c", 0)))
    assert made.ended(2)[0] == {0, 1}
    lost = made.transfers([(0, 3)], "c")
    with torch.inference_mode():
        made.copier._begin(lost, is_store=True)
    assert made.ended(1)[0] == {2}
    assert made.region.find(keys_of(("a", 0), ("b", 0), ("c", 0))).tolist() == [True, True, False]
    made.copier.close()


@on_backends
@pytest.mark.parametrize("other", [None, "z"])
def test_slot_that_changes_in_a_copy_is_damaged(other: str | None, backend: str, tmp_path: Path, monkeypatch):
    """Between look-up and check the slot is evicted, or another key takes it."""
    made = CopiedCache(tmp_path, SPECS["bfloat16"], backend)
    made.store([(0, 1)], "a")
    (slot,) = made.region.slots_of(keys_of(("a", 0)), ready=True)
    plain = made.copier.region.sums

    def sums(rank: int, slots: np.ndarray) -> np.ndarray:
        found = plain(rank, slots)
        made.region.drop(keys_of(("a", 0)))
        if other is not None:
            way, index = divmod(int(slot), made.region.num_slots // 16)
            words = np.frombuffer(keys_of((other, 0)), np.uint64)
            made.region._low[index, way], made.region._high[index, way] = words
        return found

    monkeypatch.setattr(made.copier.region, "sums", sums)
    assert made.load([(0, 4)], "a") == [False]
    made.copier.close()


@on_backends
def test_stores_read_before_later_plans(backend: str, tmp_path: Path):
    """A plan may overwrite a block that the plan before it stores."""
    made = CopiedCache(tmp_path, SPECS["bfloat16"], backend)
    want, stores = made.block(0, 3), made.transfers([(0, 3)], "a")
    made.start(stores=stores)
    made.cache.clear(3)
    made.ended(1)
    assert made.load([(0, 8)], "a") == [True]
    assert all(torch.equal(a, b) for a, b in zip(made.block(0, 8), want, strict=True))
    made.copier.close()


@on_backends
def test_reset_forgets_transfers_in_flight(backend: str, tmp_path: Path):
    made = CopiedCache(tmp_path, SPECS["states"], backend)
    stores = made.transfers([(0, 1), (STATE, 2)], "ab")
    made.start(stores=stores)
    made.copier.reset()
    assert made.region.find(stores.keys).all(), "what has been copied is kept"
    assert made.load([(0, 2), (STATE, 3)], "ab") == [True] * (1 + made.num_parts)
    made.copier.close()


@on_backends
def test_two_ranks_load_only_what_both_have(backend: str, tmp_path: Path):
    made: list[CopiedCache] = []

    def make(rank: int, barrier=lambda: None) -> None:
        handles = [b"rank 0", b"rank 1"]
        made.append(CopiedCache(tmp_path, SPECS["int8"], backend, rank=rank, handles=handles, barrier=barrier))

    make(0, lambda: make(1))  # rank 0 waits until rank 1 is there
    made.reverse()
    assert not list(made[0].region.folder.glob("acks-*")), "the file has no name any more"
    for own in made:
        own.fill(7)
        own.store([(0, 1), (0, 2)], "ab")
        assert own.region.find(keys_of(("a", 0), ("b", 0))).all() == (own is made[1])
    (slot,) = made[0].region.slots_of(keys_of(("b", 0)), ready=True)
    made[0].region.payload(1)[slot, 5] ^= 1
    for own in made:
        own.start(loads=own.transfers([(0, 3), (0, 4)], "ab"))
    made[1].ended(2)
    assert made[0].ended(2) == (set(), {2}, {3})
    for own in made:
        own.copier.close()


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("is_small", [True, False])
def test_threads_copy_what_is_not_pinned(is_small: bool, backend: str, tmp_path: Path, monkeypatch):
    """Some slots pass through a lane's bounce, in both directions, in one kernel or slot by slot."""
    for name in ("_LOAD_KERNEL_BYTES", "_STORE_KERNEL_BYTES"):
        monkeypatch.setattr(f"runtime.tier.gpu_copies.{name}", 512 << 10 if is_small else 0)
    monkeypatch.setattr("runtime.tier.pinning.Pinned.is_whole", False)
    monkeypatch.setattr("runtime.tier.pinning.Pinned._pin", lambda self: None)
    made = CopiedCache(tmp_path, SPECS["two lengths"], backend, staging=12)
    assert isinstance(made.copier, GpuCopier)
    made.copier.pinned.num_slots = 64 if backend == "triton" else 0
    sources = [(i % 2, i + 1) for i in range(17)]
    want = [made.block(*place) for place in sources]
    made.store(sources, range(17))
    made.fill(1)
    assert all(made.load(sources, range(17)))
    for place, bits in zip(sources, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made.block(*place), bits, strict=True))
    made.copier.close()
