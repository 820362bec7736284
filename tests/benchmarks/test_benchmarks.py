"""The benchmarks run, and their arithmetic is right. Their figures are not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.drafts import ngram
from benchmarks.engine.profile_step import by_name
from benchmarks.library.history import markdown, pasts
from benchmarks.library.models import CONFIGS, spec_of
from benchmarks.quality import divergence
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


def run(*commands: list[str]) -> str:
    """The output of `python -m benchmarks.MODULE ARGUMENTS` for each [module, *arguments]. One process runs all,
    because most of a small benchmark's time is the import of torch."""
    code = """
import json, runpy, sys
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    runpy.run_module(f"benchmarks.{module}", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.thorough
def test_ngram():
    lines = run(["drafts.ngram", "--repeats", "1", "--tokens", "3"]).splitlines()
    assert [line.count("|") for line in lines] == [7] * 10


def test_replayed_edits_are_drafted():
    """Characters stand for tokens."""
    pairs = [([*map(ord, prompt)], [*map(ord, output)]) for prompt, output in ngram.edits(100)]
    rate, speed, right, drafted, _ = ngram.replay(pairs, 15)
    assert rate > 5
    assert speed > 2
    assert 0.9 < right / drafted < 1


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-3.1-8b", 8.030),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("gemma-3-1b", 1.000),
        ("gemma-2-2b", 2.614),
        ("qwen3-30b-a3b", 30.53),
        ("mixtral-8x7b", 46.70),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("gpt2", 0.1244),
        ("smollm2-135m", 0.1345),
    ],
)
def test_published_shapes_have_their_published_number_of_weights(model, billions):
    count = 0
    for shape in spec_of(model).shapes().values():
        size = 1
        for n in shape:
            size *= n
        count += size
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


def test_divergence_covers_the_whole_distributions():
    p, q = torch.randn(2, 50, 4096).mul(3).log_softmax(-1)
    ids = p.topk(256).indices
    whole = (p.exp() * (p - q)).sum().item()
    assert 0.9 * whole < divergence(p.gather(1, ids), q.gather(1, ids)) < whole
    assert divergence(p.gather(1, ids), p.gather(1, ids)) == 0


def test_each_moment_counts_for_one_kernel():
    times = [("a", 0, 5), ("b", 3, 1), ("a", 4, 4), ("b", 10, 2)]
    events = [{"name": name, "ts": start, "dur": duration} for name, start, duration in times]
    rows = {row["name"]: (row["calls"], row["us"]) for row in by_name(events, 2)}
    assert rows == {"a": (1, 3.5), "b": (1, 1.5)}  # a until 3, b until 4, a until 8, b from 10


@pytest.mark.long
def test_a_random_model_is_a_model(tmp_path):
    run(["library.make_random_model", "tiny", str(tmp_path)])
    checkpoint, tokenizer = open_checkpoint(tmp_path), Tokenizer.load(tmp_path)
    assert load_spec(checkpoint.config)[0] == spec_of("tiny")
    assert set(checkpoint.names()) == {name for name in checkpoint.names() if checkpoint.shape(name)}
    assert tokenizer.vocab_size == CONFIGS["tiny"]["vocab_size"]
    words = {tokenizer.decode([i]) for i in range(1000, 30000)}
    assert len(words) == 29000  # each id of the serving benchmark has a word of its own
    assert tokenizer.decode(tokenizer.encode("Ärger, 日本\n")) == "Ärger, 日本\n"


@pytest.mark.long
@pytest.mark.thorough
def test_lines_become_a_report(tmp_path):
    out = tmp_path / "lines.jsonl"
    small = ["--out", str(out), "--set", "num_threads=1", "kv_cache_memory=0.1"]
    run(
        ["library.make_random_model", "tiny", str(tmp_path / "tiny-8b")],
        ["engine.start", "--folder", str(tmp_path / "tiny-8b"), *small],
        ["engine.decode", "--model", "tiny", "--cells", "1x128x8", "3x20x4", "--repeats", "2", *small],
        ["engine.adapters", "--model", "tiny", "--cells", "3x20x4", "--adapters", "0", "2", "--repeats", "1", "--loads",
         "1", "--streams", "2", *small],
        ["engine.prefill", "--model", "tiny", "--lengths", "64", "--repeats", "1", *small],
        ["serving", "--engine", "tiny", "--workloads", "sequential", "--repeats", "1", *small],
        ["engine.agreement", "--model", "tiny", "--variants", "overlap-off", "--prompts", "3", "--output", "8", *small],
        ["quality", "--model", str(tmp_path / "tiny-8b"), "--tokens", "64", "--window", "16", "--needles", "200",
         "--variants", "max_num_batched_tokens=8,dtype=bfloat16", "--round", "int4:32:min", *small],
        ["library.report", str(out), "--into", str(tmp_path)],
    )  # fmt: skip
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    adapters, lines = ([line for line in lines if (line["benchmark"] == "adapters") is own] for own in (True, False))
    assert [line.get("adapters") for line in adapters] == [0, 2, None]
    assert adapters[0]["of_none"] == 1 > adapters[2]["load_s"] > 0
    starts, lines = lines[:2], lines[2:]
    assert [(line["benchmark"], line["cache"]) for line in starts] == [("start", "cold"), ("start", "warm")]
    assert all(0 < line["imports_s"] < line["ready_s"] == line["phases"]["ready"][0] for line in starts)
    kinds = ["decode", "decode", "prefill", "serving", "agreement"]
    assert [line["benchmark"] for line in lines] == [*kinds, "quality", "quality", "quality"]
    assert lines[1]["batch"] == 3
    assert lines[1]["decode_range"][0] <= lines[1]["decode_tok_s"] <= lines[1]["decode_range"][1]
    assert lines[2]["first_token_ms"] > 0
    assert lines[3]["requests"] == 10
    assert lines[4]["equal"] == 3
    assert [line["scored"] for line in lines[5:]] == [60] * 3
    assert 0 < lines[6]["kl"] < lines[7]["kl"] < 0.1
    assert lines[7]["top1"] < lines[6]["top1"] < 1
    assert [len(line["needles"]) for line in lines[5:]] == [8] * 3
    report = (tmp_path / "RESULTS.md").read_text()
    assert "| tiny | 3 x (20, 4) |" in report
    assert "| tiny-8b cold |" in report
    assert "| tiny | sequential | engine |" in report
    assert "-m benchmarks.engine.decode --model tiny" in report


def test_history_shows_what_became_slower():
    common = {
        "benchmark": "prefill",
        "model": "tiny",
        "prompt_len": 64,
        "config": {},
        "range": [1.0, 2.0],
        "tok_s": 5.0,
    }

    def line(day: str, ms: float, machine: str = "NVIDIA H200, 16 CPU cores", **others) -> dict:
        versions = {"commit": f"c{day}"}
        return common | {"time": f"2026-11-{day} 10:00 UTC", "versions": versions, "machine": machine} | {
            "first_token_ms": ms, **others
        }  # fmt: skip

    lines = [line("02", 5.0), line("01", 4.0), line("03", 9.0), line("03", 8.0, "NVIDIA H200, 32 CPU cores")]
    others = [line("03", 1.0, "2 CPU cores"), line("04", 1.0, prompt_len=32), line("04", 1.0, config={"draft": "mtp"})]
    (found,) = pasts(lines + others)
    assert found.figures == [("2026-11-01", "c01", 4.0), ("2026-11-02", "c02", 5.0), ("2026-11-03", "c03", 8.0)]
    assert found.ratio == 0.5
    assert "| prefill | tiny 64 default | NVIDIA H200 | ms |" in markdown([found])
