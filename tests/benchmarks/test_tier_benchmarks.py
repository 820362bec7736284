"""The tier's benchmarks run, and their arithmetic is right."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.tier_trace import IndexReplay, LeastRecentlyUsed, read

ROOT = Path(__file__).parents[2]


def lines_of(tmp_path: Path, *command: str) -> list[dict[str, Any]]:
    environment = os.environ | {"CALLBOARD_TIER": str(tmp_path / "tier")}
    arguments = [sys.executable, "-m", *command]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.thorough
def test_a_killed_conversation_continues(tmp_path: Path):
    sizes = ["--tokens", "1000", "--memory", "0.05", "--cells", "2x64x8", "--repeats", "1", "--copied", "0.001"]
    settings = ["--set", "num_threads=1", "deterministic=true", "kv_cache_memory=0.1"]
    lines = lines_of(tmp_path, "benchmarks.engine.tier", "--model", "tiny", *sizes, *settings)
    assert [line["line"] for line in lines] == ["prompt", "resume", "copies", "overhead", "start"]
    _, resume, copies, overhead, start = lines
    assert min(start[name] for name in ("new_s", "full_s", "none_s")) > 0
    assert (resume["different"], resume["damaged"]) == (0, 0)
    assert resume["hit_tokens"] >= 992
    assert overhead["decode_tok_s_ratio"] > 0
    assert min(copies["store_gb_s"], copies["load_gb_s"]) > 0
    assert not list((tmp_path / "tier").iterdir())


def test_a_trace_has_the_hits_of_an_lru(tmp_path: Path):
    """With room for all, the tier finds what an exact LRU finds."""
    requests = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 6], [5, 7]]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": i, "hash_ids": ids}) + "\n" for i, ids in enumerate(requests)))
    assert read(trace, None) == (requests, 0.004)
    replay, exact = IndexReplay(tmp_path, 640, 4), LeastRecentlyUsed(100)
    assert [replay.hits(ids) for ids in requests] == [exact.hits(ids) for ids in requests] == [0, 2, 0, 3, 1]
    replay.close()
    small = LeastRecentlyUsed(2)
    assert [small.hits(ids) for ids in requests] == [0, 2, 0, 1, 0], "the first hashes of a prompt stay"


def test_requests_that_lack_a_block_hit_less(tmp_path: Path):
    replay = IndexReplay(tmp_path, 64, 16)
    assert replay.hits([1, 2]) == 0
    replay._region.drop(replay._keys(2)[:16])
    assert replay.hits([1, 2]) == 1
    replay.close()


@pytest.mark.long
@pytest.mark.thorough
def test_two_engines_share_their_streams(tmp_path: Path):
    settings = ["--memory", "0.05", "--set", "num_threads=1", "deterministic=true", "kv_cache_memory=0.1"]
    pair = ["benchmarks.engine.tier_pair", "takeover", "--model", "tiny"]
    (taken,) = lines_of(tmp_path, *pair, "--streams", "2", "--tokens", "200", "--before", "4", *settings)
    assert (taken["compared"], taken["different"]) == (32, 0)
    assert 0 < taken["first_ms"] <= taken["all_ms"]
    pair[1] = "apart"
    sizes = ["--chats", "2", "--chat", "40", "8", "--long", "200", "--every", "0.2", "--seconds", "1"]
    lines = lines_of(tmp_path, *pair, *sizes, *settings)
    assert [line["roles"] for line in lines] == ["both", "apart"]
    assert all(line["chats"] >= 2 <= line["long"] for line in lines)
    assert not list((tmp_path / "tier").iterdir())
