"""A ModelRunner without the features that plug into it."""

import numpy as np
import pytest

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, SamplingParams
from runtime.core.plan import NewSlot, StepPlan
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource
from tests.support.models.specs import TINY

CONFIG = EngineConfig(device="cpu", num_kv_blocks=16, max_num_seqs=4, max_model_len=64, num_threads=1)
PARAMS = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, repetition_penalty=1.1, logprobs=2)


def tokens_of(runner: ModelRunner) -> list[int]:
    """A prompt of five tokens and eight steps of decoding."""
    one = np.ones(1, np.int32)
    tables = np.array([[0, 0, 0, 0], [0, 1, 2, 3], [1, 2, 3, 4]], np.int32)
    new = [NewSlot(0, np.arange(5, dtype=np.int32), 5, 7, PARAMS)]
    plan = StepPlan(0, new=new, block_table_writes=tables, slots=one - 1, num_computed=one - 1, num_tokens=5 * one,
                    num_samples=one)  # fmt: skip
    results = [runner.execute(plan)]
    for i in range(8):
        row = StepPlan(1 + i, slots=one - 1, num_computed=(5 + i) * one, num_tokens=one, num_samples=one)
        results.append(runner.execute(row))
    assert all(len(result.logprobs) == 1 for result in results)
    return [int(result.token_ids[0]) for result in results]


def test_a_runner_without_extras_samples_the_same_tokens():
    runner = ModelRunner(CONFIG, DummySource(TINY))
    assert tokens_of(runner) == tokens_of(build_runner(CONFIG, DummySource(TINY)))
    assert runner.info.pooling is None
    with pytest.raises(CallboardError, match="serves no adapters"):
        runner.load_adapter(1, "folder")
