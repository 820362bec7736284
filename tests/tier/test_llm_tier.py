"""A model in this process, with a tier: the same tokens from a cache hit, a tier hit, a miss and after a death."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from runtime.tier.disk.reads import DiskReads
from runtime.tier.place import stored_regions
from runtime.tier.region import Region
from runtime.worker.runner import ModelRunner
from tests.support.models.tiny_gguf import write_tiny_gguf
from tests.support.models.tiny_hybrid import write_tiny_hybrid
from tests.support.processes.tiers import flip_bits, num_entries, opened, regions_of

PROMPT_LEN, NUM_TOKENS, BLOCK = 1500, 20, 16
LEAST = PROMPT_LEN - 2 * BLOCK  # cached tokens of a prompt; with states a hit ends at a snapshot
PROMPTS = [np.random.default_rng(i).integers(3, 250, PROMPT_LEN + i).tolist() for i in range(3)]
PARAMS = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, temperature=0.8 * (i % 2)) for i in range(3)]


@pytest.fixture(params=["attention", "states"])
def start(request, tmp_path: Path, monkeypatch) -> Callable[..., LLM]:
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path / "tier"))
    path = tmp_path / "model.gguf"
    if request.param == "states":
        write_tiny_hybrid(path)
    else:
        write_tiny_gguf(path, llama__context_length=4096, llama__rope__freq_base=10000.0)

    def begin(**settings) -> LLM:
        own = {"deterministic": True, "num_threads": 1, "kv_cache_memory": 0.1, "kv_tier_name": "t"}
        return LLM(str(path), **own | {"kv_tier_memory": 0.05} | settings)

    return begin


def answers(llm: LLM) -> list[tuple[list[int], int]]:
    """Tokens and cached tokens of each prompt, one after another."""
    found = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
    return [(answer.token_ids, answer.num_cached) for answer in found]


def figures(llm: LLM) -> dict[str, float]:
    return {name.removeprefix("tier_"): value for name, value in llm.engine.stats().items() if "tier" in name}


def test_a_failed_start_leaves_the_region(start, monkeypatch, tmp_path):
    def fail(runner: ModelRunner) -> None:
        raise CallboardError("no warm-up")

    monkeypatch.setattr(ModelRunner, "_warm_up", fail)
    with pytest.raises(CallboardError, match="no warm-up"):
        start()
    (region,) = stored_regions(tmp_path / "tier")
    assert not region.is_used


def test_a_new_engine_continues_with_the_same_tokens(start):
    alone = answers(start(kv_tier_name=None))
    first = start()
    assert answers(first) == alone
    again = answers(first)
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in alone]
    assert all(cached >= LEAST for _, cached in again)
    assert figures(first)["hit_tokens"] == 0
    assert figures(first)["used_bytes"] > 0
    second = start()
    assert answers(second) == again, "a hit in the tier is as long as one on the device"
    assert figures(second)["hit_tokens"] == sum(cached for _, cached in again)
    assert figures(second)["damaged"] == 0


def test_flipped_bits_are_a_miss(start):
    first = start()
    alone = answers(first)
    flip_bits("t")
    second = start()
    assert [tokens for tokens, _ in answers(second)] == [tokens for tokens, _ in alone]
    assert figures(second)["damaged"] > 0
    assert figures(second)["hit_tokens"] == 0


def test_a_full_region_keeps_tokens_right(start):
    alone = answers(start(kv_tier_name=None))
    first = start(kv_tier_memory=16 * 3 * 4096 / 2**30)
    for _ in range(2):
        assert [tokens for tokens, _ in answers(first)] == [tokens for tokens, _ in alone]
    assert num_entries("t") <= 48
    assert [tokens for tokens, _ in answers(start(kv_tier_memory=16 * 3 * 4096 / 2**30))] == [t for t, _ in alone]


def test_a_new_region_is_filled_from_disk(start, tmp_path: Path):
    """As after a reboot."""
    first = start(kv_tier_folder=str(tmp_path / "disk"))
    alone = answers(first)
    (disk,) = (tmp_path / "disk").iterdir()
    while num_entries("t") > num_entries("t", tmp_path / "disk"):
        time.sleep(0.01)
    Region.wipe(tmp_path / "tier" / disk.name)
    second = start(kv_tier_folder=str(tmp_path / "disk"))
    again = answers(second)
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in alone]
    assert all(cached >= LEAST for _, cached in again)
    assert figures(second)["disk_tokens"] == figures(second)["hit_tokens"] == sum(cached for _, cached in again)


def test_a_keeper_ends_with_its_llm(start, tmp_path: Path):
    llm = start(kv_tier_folder=str(tmp_path / "disk"))
    process = llm.engine.extras[DiskReads]._disk._process
    assert process.poll() is None
    del llm
    gc.collect()
    assert process.wait(60) == 0


def test_a_lifetime_is_set_as_over_http(start):
    llm = start()
    for ttl_s, options in ((0, {}), (3600, {"cache_control": {"type": "ephemeral", "ttl": "1h"}})):
        llm.generate(PROMPTS[0], PARAMS[0], **options)
        while llm.engine.has_work:
            llm.engine.step()
        expires = {int(found) for folder in regions_of("t") for found in opened(folder).entries().expires}
        assert max(expires) == 0 if not ttl_s else 0 < max(expires) - time.time() <= ttl_s
    with pytest.raises(CallboardError, match=r"cache_control\.ttl"):
        llm.generate("a", cache_control={"type": "ephemeral", "ttl": "2h"})
