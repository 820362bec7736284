"""Two ranks with a tier: a block is loaded if both have its part."""

import os
import time

import numpy as np

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.tier.place import attached, base_folder, forget
from runtime.worker.sources import DummySource
from tests.support.models.specs import dense_spec
from tests.support.ranks.rank_processes import RankProcesses, rank_processes

SPEC = dense_spec(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=200,
    max_positions=512, norm_eps=1e-5,
)  # fmt: skip
PROMPT = np.random.default_rng(0).integers(0, 200, 400).tolist()


def answer(processes: RankProcesses, name: str, damaged_rank: int | None = None) -> tuple[list[int], dict[str, float]]:
    """The answer of a new group, and its engine's figures."""
    config = EngineConfig(
        device="cpu", num_threads=1, max_num_seqs=4, num_kv_blocks=120, max_model_len=512, tensor_parallel_size=2,
        deterministic=True, kv_tier_name=name, kv_tier_memory=0.05,
    ).sized_for("cpu")  # fmt: skip
    runner = processes.open(config, DummySource(SPEC))
    region = attached(runner.info.tier)
    assert region is not None
    if damaged_rank is not None:
        region.payload(damaged_rank)[:, 100] ^= 1
    core, tokens = build_engine(config, runner.info, InProcess(runner)), list[int]()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    core.add(Request("a", PROMPT, len(PROMPT), params))
    while core.has_work:
        if (output := core.step()) is not None:
            tokens += [int(token) for token in output.token_ids]
    return tokens, core.stats()


def test_both_ranks_load_their_parts():
    name = f"ranks-{os.getpid()}-{time.time_ns()}"
    try:
        with rank_processes(2) as processes:
            want, before = answer(processes, name)
            again, hit = answer(processes, name)
            damaged, missed = answer(processes, name, damaged_rank=1)
    finally:
        forget(base_folder(), name)
    assert want == again == damaged
    assert before["tier_hit_tokens"] == 0
    assert hit["tier_hit_tokens"] >= 384
    assert hit["tier_damaged"] == 0
    assert missed["tier_hit_tokens"] == 0
    assert missed["tier_damaged"] > 0
