"""Copies to and from a tier while a GPU computes: their order, pins, graphs and sleep."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.base.kv_cache_spec import KVCacheSpec, KVGroupSpec
from runtime.core.plan import StepPlan, Transfers
from runtime.tier.gpu_copies import GpuCopier
from runtime.tier.place import attached
from tests.support.engine.tier_copies import CopiedCache, keys_of
from tests.support.models.runner_driver import Driver, tiny_runner
from tests.support.models.specs import dense_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

LARGE = KVCacheSpec((KVGroupSpec(tuple(range(8)), 4, 128, "bfloat16"),))  # 256 KiB a block
SPIN_CYCLES = 100_000_000  # 50 ms or more
SPEC = dense_spec(
    num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=512, vocab_size=1000,
    max_positions=1024, norm_eps=1e-5,
)  # fmt: skip


@pytest.fixture
def folder(monkeypatch) -> Iterator[Path]:
    """A folder in memory: its pages can be pinned."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="callboard-test-"))
    monkeypatch.setenv("CALLBOARD_TIER", str(made))
    yield made
    shutil.rmtree(made)


def pinned(made: CopiedCache) -> CopiedCache:
    """Wait until all slots are pinned."""
    assert isinstance(made.copier, GpuCopier)
    end = time.monotonic() + 120
    while made.copier.pinned.is_pinning and time.monotonic() < end:
        time.sleep(0.01)
    assert made.copier.pinned.is_whole
    return made


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("delayed", ["steps", "copies"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_delayed_stores_hold_the_old_bytes(delayed: str, is_pinned: bool, folder: Path, monkeypatch):
    """Later plans overwrite the blocks before they have left the device, more often than staging has room."""
    if not is_pinned:
        monkeypatch.setattr("runtime.tier.pinning.Pinned._pin", lambda self: None)
    made = CopiedCache(folder, LARGE, "cuda")
    if is_pinned:
        pinned(made)
    blocks = [(0, block) for block in range(1, 21)]
    want = [made.block(*place) for place in blocks]
    torch.cuda.synchronize()
    for lane in made.copier._lanes if delayed == "copies" else ():
        with torch.cuda.stream(lane.stream):
            torch.cuda._sleep(SPIN_CYCLES)
    if delayed == "steps":
        torch.cuda._sleep(SPIN_CYCLES)
    for at in range(0, 20, 5):
        made.start(stores=made.transfers(blocks[at : at + 5], range(at, at + 5)))
        made.cache.clear(slice(at + 1, at + 6))
    assert len(made.ended(20)[0]) == 20
    assert made.load(blocks, range(20)) == [True] * 20
    assert all(same(made.block(*place), bits) for place, bits in zip(blocks, want, strict=True))
    made.copier.close()


def test_loads_wait_for_readers_of_their_blocks(folder: Path):
    made = pinned(CopiedCache(folder, LARGE, "cuda"))
    made.store([(0, 1)], "a")
    old, new = made.block(0, 5), made.block(0, 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    read = made.block(0, 5)  # an earlier plan
    loads = made.transfers([(0, 5)], "a")
    made.start(loads=loads)
    assert made.ended(1)[1] == set(loads.numbers.tolist())
    torch.cuda.synchronize()
    assert same(read, old)
    assert same(made.block(0, 5), new)
    made.copier.close()


def test_copies_stay_within_a_pinned_piece(folder: Path, monkeypatch):
    """Pieces of three slots, some pinned while others are not yet."""
    monkeypatch.setattr("runtime.tier.pinning._LEAST_BYTES", 3 * (256 << 10))
    monkeypatch.setattr("runtime.tier.pinning._HELD_S", 0)
    made = CopiedCache(folder, LARGE, "cuda")
    blocks = [(0, block) for block in range(1, 31)]
    want = [made.block(*place) for place in blocks]
    made.store(blocks[:15], range(15))
    pinned(made)
    assert len(made.copier.pinned._pieces) == -(-128 // 3)
    made.store(blocks[15:], range(15, 30))
    made.fill(1)
    assert made.load(blocks, range(30)) == [True] * 30
    assert all(same(made.block(*place), bits) for place, bits in zip(blocks, want, strict=True))
    made.copier.close()


def test_reset_waits_for_copies_in_flight(folder: Path):
    made = pinned(CopiedCache(folder, LARGE, "cuda"))
    made.store([(0, 1)], "a")
    for lane in made.copier._lanes:
        with torch.cuda.stream(lane.stream):
            torch.cuda._sleep(SPIN_CYCLES)
    made.start(stores=made.transfers([(0, 2)], "b"), loads=made.transfers([(0, 3)], "a"))
    made.copier.reset()
    assert not any(lane.jobs for lane in made.copier._lanes)
    assert same(made.block(0, 3), made.block(0, 1))
    assert made.region.find(keys_of(("b", 0))).all()
    made.copier.close()


class Decoding:
    """A prompt that graphs continue, and transfers of another prompt's blocks in the same steps."""

    def __init__(self, **config) -> None:
        settings = {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 500, "max_num_seqs": 8}
        settings |= {"kv_tier_name": "test", "kv_tier_memory": 0.1, "max_model_len": 512, "deterministic": True}
        self.driver = driver = Driver(tiny_runner(SPEC, **settings | config))
        region = attached(driver.runner.info.tier)
        assert region is not None
        self.region, self.prompt, self.tokens = region, [7 * i % 991 + 1 for i in range(100)], list[int]()
        for slot, prompt in enumerate((self.prompt, self.prompt[::-1])):
            driver.open(slot, prompt, room=200)
            driver.prefill(slot, prompt)
        self.blocks, self.spare = driver.tables[1][:6], driver.free_blocks[:6]
        self.stored, self.loaded, self.number = set[int](), set[int](), 0

    def transfers(self, blocks: list[int], key: int) -> Transfers:
        groups, self.number = np.zeros(6, np.int32), self.number + 6
        numbers = np.arange(self.number - 6, self.number, dtype=np.int32)
        return Transfers(numbers, groups, np.array(blocks, np.int32), groups, keys_of(*((key, i) for i in range(6))))

    def step(self, is_rowless: bool = False) -> None:
        if is_rowless:
            plan, self.driver.plan = self.driver.plan, StepPlan(self.driver.plan.step_id + 1)
            result = self.driver.runner.execute(plan)
        else:
            result = self.driver.step((0, 99 + len(self.tokens), 1, 1))
        self.tokens += result.token_ids.tolist()
        self.stored |= set(result.stored.tolist())
        self.loaded |= set(result.loaded.tolist())
        assert not len(result.damaged)

    def drain(self) -> None:
        end = time.monotonic() + 60
        while len(self.stored) + len(self.loaded) < self.number:
            assert time.monotonic() < end
            self.step(is_rowless=True)


def decoded(transfers: bool, **config) -> list[int]:
    """Sixty tokens, if wanted with transfers in each step."""
    own, stores = Decoding(**config), dict[int, Transfers]()
    for step in range(60):
        if transfers:
            stores[step] = own.transfers(own.blocks, step)
            own.region.reserve(stores[step].keys, 0)
            own.driver.plan.stores = stores[step]
            if ready := [at for at, found in stores.items() if own.stored >= set(found.numbers.tolist())]:
                own.driver.plan.loads = own.transfers(own.spare, ready[-1])
        own.step()
    if transfers:
        own.drain()
        own.driver.plan.loads = own.transfers(own.spare, 59)
        own.drain()
        for layer in own.driver.runner.steps.cache.layers:
            assert torch.equal(layer.values[:, :, own.spare], layer.values[:, :, own.blocks])
    own.driver.runner.tier.close()
    return own.tokens


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_transfers_change_no_token_of_other_rows(cuda_graphs: bool, folder: Path):
    assert decoded(True, cuda_graphs=cuda_graphs) == decoded(False, cuda_graphs=cuda_graphs)


def test_tier_works_after_sleep(folder: Path):
    settings = {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 500, "max_num_seqs": 8, "max_model_len": 512}
    runner = tiny_runner(SPEC, kv_tier_name="test", kv_tier_memory=0.1, sleep_mode=True, **settings)
    driver, region, prompt = Driver(runner), attached(runner.info.tier), [5 * i % 991 for i in range(64)]
    assert region is not None
    driver.open(0, prompt)
    driver.prefill(0, prompt)
    blocks, groups, keys = np.array(driver.tables[0][:4], np.int32), np.zeros(4, np.int32), keys_of(*range(4))
    places = blocks.tolist()
    want = [layer.values[:, :, places].clone() for layer in runner.steps.cache.layers]
    region.reserve(keys, 0)
    runner.execute(StepPlan(9, stores=Transfers(np.arange(4, dtype=np.int32), groups, blocks, groups, keys)))
    runner.sleep()  # it waits for the copies
    assert region.find(keys).all()
    runner.wake()
    loads = Transfers(np.arange(4, dtype=np.int32), groups, blocks, groups, keys)
    loaded = len(runner.execute(StepPlan(10, loads=loads)).loaded)
    for _ in range(5000):
        if loaded == 4:
            break
        loaded += len(runner.execute(StepPlan(11)).loaded)
    assert loaded == 4
    got = [layer.values[:, :, places] for layer in runner.steps.cache.layers]
    assert same(got, want)
    runner.tier.close()
    runner.sleep()  # leave no memory in use for later tests
