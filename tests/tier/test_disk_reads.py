"""Requests wait for their prefixes on disk, or are computed."""

from dataclasses import replace

import numpy as np
import pytest

from runtime.assembly.engine import extras_of
from runtime.base.config import EngineConfig
from runtime.base.model_info import TierInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.tier.disk import reads as module
from runtime.tier.disk.reads import DiskReads
from runtime.tier.keys import TierKeys, split
from tests.support.engine.drafts import info as model_info
from tests.support.engine.fake_runner import FakeRunner, sequential

BLOCK = 4
TIER = TierInfo(folder="", layout="", slot_bytes=4096, num_slots=1024)
PROMPT = list(range(1, 20)) * 4


class Index:
    """Entries in RAM."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def find(self, keys: bytes) -> np.ndarray:
        return np.array([key in self.keys for key in split(keys)], bool)

    def touch(self, keys: bytes, expires: float = 0) -> None:
        pass


class Disk(Index):
    """Entries on disk, and requests that end by `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[bytes, int, float]] = []
        self.num_ended, self.is_busy, self.read_rate = 0, False, 0.0

    def request(self, keys: bytes, salt: int, expires: float = 0) -> int:
        if self.is_busy:
            return 0
        self.requests.append((keys, salt, expires))
        return len(self.requests)

    def has_ended(self, number: int) -> bool:
        return number <= self.num_ended


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """An engine with DiskReads. Its disk has all blocks of PROMPT."""

    def __init__(self, prefill_rate: float = 10.0, slot_bytes: int = 4096) -> None:
        config = EngineConfig(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=64)
        info = replace(model_info(max_len=400, blocks=400), tier=replace(TIER, slot_bytes=slot_bytes))
        self.ram, self.disk, self.clock = Index(), Disk(), Clock()
        self.reads = DiskReads(info, self.ram, self.disk, self.clock, lambda: prefill_rate, shortest=16)
        self.core = EngineCore(config, info, FakeRunner(config, info), [self.reads, *extras_of(config, info)])
        state = self.core.add(request("probe"))
        hashes = self.core.scheduler.kv_cache.prefix_hashes(state)
        self.core.abort("probe")
        self.keys = TierKeys(TIER, 1).block_keys(hashes, 0)
        self.disk.keys |= set(split(self.keys))

    def run(self, most: int = 200) -> list[int]:
        """Run steps until the requests have ended. Returns the tokens."""
        tokens = []
        for _ in range(most):
            if (output := self.core.step()) is not None:
                tokens += output.token_ids
            if not self.core.has_work:
                break
        return tokens


def request(name: str, prompt: list[int] | None = None, **fields) -> Request:
    prompt = prompt or PROMPT
    return Request(name, prompt, len(prompt), SamplingParams(max_tokens=5, ignore_eos=True), seed=0, **fields)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(module.time, "sleep", found.append)
    return found


def test_a_request_waits_until_its_blocks_are_in_ram(naps):
    rig = Rig()
    rig.core.add(request("a", cache_salt="", cache_ttl_s=60.0))
    assert rig.run(20) == []
    assert len(naps) == 20  # an idle engine polls
    ((keys, salt, expires),) = rig.disk.requests
    assert (keys, salt, expires) == (rig.keys, 0, rig.clock.now + 60)
    rig.disk.num_ended = 1
    assert rig.run() == sequential(request("a"), 400)[0]
    assert rig.reads.stats() == {"tier_disk_tokens": 72, "tier_disk_bytes": 18 * 4096}


def test_only_missing_blocks_are_read(naps):
    rig = Rig()
    rig.ram.keys |= set(split(rig.keys)[:10])
    rig.core.add(request("a"))
    assert rig.disk.requests[0][0] == rig.keys[160:]


def test_other_requests_go_on(naps):
    rig = Rig()
    rig.core.add(request("a"))
    rig.core.add(other := request("b", [7, 7, 7]))
    assert rig.run(20) == sequential(other, 400)[0]


def test_an_aborted_request_is_forgotten(naps):
    rig = Rig()
    rig.core.add(request("a"))
    rig.core.abort("a")
    assert not rig.core.has_work
    assert not rig.reads.held()


def test_a_slow_disk_is_not_waited_for(naps):
    rig = Rig()
    rig.core.add(request("a"))
    assert rig.run(3) == []
    rig.clock.now += 31
    assert rig.run() == sequential(request("a"), 400)[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda rig: rig.disk.keys.clear(),
        lambda rig: setattr(rig.disk, "is_busy", True),
        lambda rig: rig.disk.keys.difference_update(split(rig.keys)[3:4]),  # less than 16 tokens are left
        lambda rig: rig.ram.keys.update(split(rig.keys)),
    ],
)
def test_requests_do_not_wait_in_vain(naps, change):
    rig = Rig()
    change(rig)
    rig.core.add(request("a"))
    assert rig.run() == sequential(request("a"), 400)[0]
    assert rig.disk.requests == naps == []


def test_blocks_are_computed_if_that_is_quicker(naps, monkeypatch):
    monkeypatch.delenv("CALLBOARD_TIER_SHARE")
    rig = Rig(prefill_rate=1e6)
    rig.core.add(request("a"))
    assert rig.run() == sequential(request("a"), 400)[0]
    assert rig.disk.requests == []


@pytest.mark.parametrize(("read_rate", "num_requests"), [(0.0, 0), (0.5e9, 0), (6e9, 1)])
def test_a_fast_disk_is_read_before_any_load_was_measured(naps, monkeypatch, read_rate, num_requests):
    """72 tokens take 2.4 s to compute, and their 1.2 GB 0.2 s to read at 6 GB/s."""
    monkeypatch.delenv("CALLBOARD_TIER_SHARE")
    rig = Rig(prefill_rate=30.0, slot_bytes=64 << 20)
    rig.disk.read_rate = read_rate
    rig.core.add(request("a"))
    assert len(rig.disk.requests) == num_requests
