"""Two ranks give the same tokens with a head and without, also after a weight update."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.base.weight_parts import ArraysPart
from runtime.core.executor import InProcess
from runtime.core.stats import EngineStats
from runtime.policy.admission import Admission
from runtime.speculation.choose_k import Speculation
from runtime.speculation.head_drafter import HeadDrafter
from tests.heads.test_updates import write
from tests.support.engine.fake_runner import FixedShare
from tests.support.models.weight_updates import changed, tensors_in, write_changed
from tests.support.ranks.rank_processes import RankedRunner, RankProcesses, rank_processes

CONFIG = EngineConfig(
    device="cpu", dtype="float32", num_threads=1, max_num_seqs=6, block_size=16, num_kv_blocks=18, max_model_len=128,
    max_num_batched_tokens=80, tensor_parallel_size=2, deterministic=True, num_draft_tokens=3,
)  # fmt: skip
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": ((3, 2.0),)}, {"temperature": 0.8, "min_tokens": 20},
]  # fmt: skip
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def processes():
    with rank_processes(2) as found:
        yield found


def answers(runner: RankedRunner) -> tuple[dict[str, list[Any]], EngineStats]:
    """Each request's tokens and log-probabilities, and the engine's figures. Memory is short."""
    runner.reset()
    head = runner.info.head
    drafts = None if head is None else Speculation(HeadDrafter(head), 3, (), 0.0)
    core = build_engine(CONFIG.sized_for("cpu"), runner.info, InProcess(runner), drafts)
    core.extras[Admission].lengths = FixedShare(0.1)
    found: dict[str, list[Any]] = {str(i): [] for i in range(NUM_REQUESTS)}
    for i in range(NUM_REQUESTS):
        tokens = [3 + (7 * i + 13 * k + i * k) % 250 for k in range(9 + 7 * i % 50)]
        params = SamplingParams(max_tokens=40, logprobs=1, **PARAMS[i % len(PARAMS)])
        core.add(Request(str(i), tokens, len(tokens), params, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for at, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
                found[state.request.request_id].append((token, output.logprobs[at]))
    return found, core.scheduler.stats


@pytest.mark.rotated
@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("qwen3.5-moe", marks=pytest.mark.thorough)])
def test_two_ranks_have_the_same_answers_with_a_head(name: str, processes: RankProcesses, tmp_path: Path):
    folder = write(tmp_path / "first", name)
    second = changed(tensors_in(folder))
    want, _ = answers(processes.open(CONFIG, folder))
    updated, _ = answers(processes.open(CONFIG, write_changed(folder, second, tmp_path / "second")))
    runner = processes.open(replace(CONFIG, draft="mtp", weight_updates=True), folder)
    got, stats = answers(runner)
    assert got == want
    assert NUM_REQUESTS < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.preemptions > 0

    runner.ask("updates.receive", ArraysPart(second))
    assert runner.ask("updates.check") == [True, True]
    (version, _) = runner.ask("attribute", "updates", "version")
    fingerprint, _ = runner.ask("update_weights", version.after("1", None, True))
    runner.info = replace(runner.info, fingerprint=fingerprint)
    assert runner.ask("attribute", "updates", "draft_head") == ["updated", "updated"]
    assert updated != want
    assert answers(runner)[0] == updated
    heads = runner.ask("attribute", "updates", "_newest", "nbytes")
    assert max(heads) < 0.75 * sum(tensor.nbytes for tensor in second.values()), "each rank has slices"
