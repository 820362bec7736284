"""Where regions lie, their sizes, and the room that unused ones make."""

import os
from pathlib import Path

import numpy as np
import pytest

from runtime.base.config import EngineConfig
from runtime.base.model_info import TierInfo
from runtime.tier import place
from runtime.tier.region import Region

SLOT, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path))


def opened(name: str | None = "app", layout: str = "a", **settings) -> Region | None:
    settings.setdefault("kv_tier_memory", 32 / 1024)
    config = EngineConfig(kv_tier_name=name, **settings)
    return place.open_region(config, "cpu", layout, SLOT, 1, 8 * GIB)


def fill(region: Region, count: int) -> None:
    keys = np.random.default_rng(count).bytes(16 * count)
    assert region.reserve(keys, 0).sum() > count // 2
    slots = region.slots_of(keys, ready=False)
    for slot in slots[slots >= 0]:
        region.payload(0)[slot] = 1
    region.commit(0, slots[slots >= 0], b"".join(keys[16 * i :][:16] for i in np.flatnonzero(slots >= 0)),
                  np.zeros((slots >= 0).sum(), np.uint64))  # fmt: skip


@pytest.mark.parametrize("setting", [{"kv_tier_memory": 0}, {"prefix_cache": False}, {"name": None}])
def test_no_tier_without_a_name_a_size_or_a_prefix_cache(tmp_path: Path, setting):
    assert opened(**setting) is None
    assert list(tmp_path.iterdir()) == []


def test_engines_of_one_name_and_layout_share_a_region(tmp_path: Path):
    regions = [opened(), opened(), opened(layout="b"), opened(name="a/../b")]
    assert len({region.folder for region in regions}) == 3
    assert {region.folder.parent for region in regions} == {tmp_path}


def test_a_default_size_keeps_a_region_as_it_is(tmp_path: Path):
    first = opened()
    fill(first, 8)
    figures = first.figures()
    first.close()
    again = opened(kv_tier_memory=None)
    assert again.figures() == figures
    assert figures.entries > 0


def test_a_default_size_follows_memory_and_free_space(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(place, "_free_bytes", lambda base: 10 * GIB)
    assert place.default_bytes("cuda", tmp_path, 1 * GIB) == 5 * GIB, "the available memory does not limit a disk"
    monkeypatch.setattr(place, "_MEMORY", tmp_path.parent)
    assert place.default_bytes("cuda", tmp_path, 1 * GIB) == GIB // 4
    assert place.default_bytes("cpu", tmp_path, 100 * GIB) == 4 * GIB
    assert place.default_bytes("cpu", tmp_path, 200 << 20) == 0


def test_a_small_shared_memory_is_one_sentence(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(place, "_free_bytes", lambda base: 64 << 20)  # a container's by default
    assert opened(kv_tier_memory=None) is None
    (sentence,) = caplog.messages
    assert "--shm-size" in sentence
    assert "0.06 GiB" in sentence


def test_too_large_a_region_is_one_sentence(tmp_path: Path, caplog):
    assert opened(kv_tier_memory=1e6) is None
    (sentence,) = caplog.messages
    assert sentence.startswith("KV tier: off. ")


def test_unused_regions_make_room_the_oldest_first(tmp_path: Path, monkeypatch):
    regions = [opened(name=f"app{i}") for i in range(4)]
    for i, region in enumerate(regions):
        fill(region, 24)
        os.utime(region.folder, (i, i))
    for region in regions[:3]:
        region.close()
    sizes = [each.num_bytes for each in place.stored_regions(tmp_path)]
    assert all(size > 12 * SLOT for size in sizes)
    monkeypatch.setattr(place, "default_bytes", lambda *_: sizes[2] + 1)
    assert opened(name="new") is not None
    names = [each.folder.name.rpartition("-")[0] for each in place.stored_regions(tmp_path)]
    assert names == ["app2", "app3", "new"], "one that is used stays, and as much of the others as a new one may take"


def test_forget_wipes_one_name_alone(tmp_path: Path):
    used, other = opened("app"), opened("app-0123456789abcdef")
    closed = opened("app", layout="b")
    for region in (used, other, closed):
        fill(region, 8)
    closed.close()
    left_over = tmp_path / f"{used.folder.name}.killed"
    left_over.mkdir()
    assert place.forget(tmp_path, "app") > 8 * SLOT
    assert [each.folder for each in place.stored_regions(tmp_path)] == [other.folder]
    assert used.figures().entries == 0


def test_an_engine_attaches_on_the_same_machine_alone(tmp_path: Path):
    region = opened()
    info = TierInfo(str(region.folder), "a", SLOT, region.num_slots, 1, host=place.host())
    fill(region, 8)
    assert place.attached(info).figures() == region.figures()
    assert place.attached(TierInfo(str(region.folder), "a", SLOT, region.num_slots, 1, host="another")) is None
