"""docs/kv-tier.md: its sizes are the models', its flags exist, its metrics are declared, and its example runs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.wire.metrics import ENGINE_METRICS
from benchmarks.library.models import spec_of
from runtime.base.config import EngineConfig
from runtime.worker.memory import tier_slot_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kv-tier.md").read_text()
SIZES = re.findall(r"^\| (\S+) \| (bfloat16|fp8|int8) \| ([\d,]+) \| (\S+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", SIZES, ids=" ".join)
def test_sizes_are_those_of_the_models(row: tuple[str, ...]):
    model, kept, a_token, a_snapshot, in_64_gib = row
    spec, size = spec_of(model), EngineConfig().block_size
    cache = spec.kv_cache("bfloat16", "auto" if kept == "bfloat16" else kept, spec.max_positions)
    slot = tier_slot_bytes(cache, size)
    per_token = slot * sum(group.window is None for group in cache.groups) // size
    snapshot = 0 if cache.states is None else -(-cache.states.bytes_per_state // slot) * slot
    assert [f"{n:,}" for n in (per_token, (64 << 30) // per_token)] == [a_token, in_64_gib]
    assert a_snapshot == (f"{snapshot:,}" if snapshot else "-")


def test_the_page_has_sizes():
    assert len(SIZES) > 8


def test_flags_and_metrics_of_the_page_exist():
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {flag.replace("-", "_") for flag in re.findall(r"--(kv-[a-z-]+|prefix-cache)", PAGE)} <= fields
    named = set(re.findall(r"callboard:kv_tier_\w+", PAGE))
    assert named == {name for name in ENGINE_METRICS if "kv_tier" in name}


def test_the_example_loads_what_a_killed_process_computed(write_tiny_gguf, tmp_path: Path):
    model = write_tiny_gguf(llama__context_length=1024)
    environment = os.environ | {"CALLBOARD_TIER": str(tmp_path / "tier"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "docs/kv_tier.py", str(model), "600", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (re.fullmatch(r"(.*): token (.*), (\d+) of 600 .*", line) for line in done.stdout.splitlines())
    assert first
    assert second
    assert (first[1], first[3]) == ("computed", "0")
    assert (second[1], second[3]) == ("after kill -9", "592")
    assert first[2] == second[2]
    assert not list((tmp_path / "tier").iterdir()), "it is deleted at the end"
