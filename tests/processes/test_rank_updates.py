"""Updates of two ranks: each stages its slices alone, and together they equal a group that has loaded the weights."""

from dataclasses import replace

import pytest

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError, Request, SamplingParams
from runtime.base.weight_parts import ArraysPart
from runtime.core.executor import InProcess
from tests.support.models.weight_updates import changed, tensors_in, write_changed, write_tiny
from tests.support.ranks.rank_processes import RankedRunner, RankProcesses, rank_processes

CONFIG = EngineConfig(
    device="cpu", num_threads=1, max_num_seqs=4, block_size=4, num_kv_blocks=80, max_model_len=64,
    tensor_parallel_size=2, weight_updates=True, deterministic=True,
)  # fmt: skip
PARAMS = SamplingParams(max_tokens=8, temperature=0.7, logprobs=2)


@pytest.fixture(scope="module")
def processes():
    with rank_processes(2) as found:
        yield found


def answers(runner: RankedRunner, config: EngineConfig) -> list[tuple[int, tuple[float, ...]]]:
    """Tokens and log-probabilities of several requests."""
    runner.reset()
    config, found = config.sized_for("cpu"), list[tuple[int, tuple[float, ...]]]()
    core = build_engine(config, runner.info, InProcess(runner))
    for i, length in enumerate((3, 21, 40)):
        prompt = [7 * k % 260 + 1 for k in range(i, i + length)]
        core.add(Request(str(i), prompt, len(prompt), PARAMS, seed=i), i)
    while core.has_work:
        output = core.step()
        if output is not None:
            found += list(zip(output.token_ids, map(str, output.logprobs or ()), strict=False))
    return found


def apply(runner: RankedRunner, parts, update_id: str = "1") -> None:
    for part in parts:
        runner.ask("updates.receive", part)
    complete = runner.ask("updates.check")
    (version, _) = runner.ask("attribute", "updates", "version")
    fingerprints = runner.ask("update_weights", version.after(update_id, None, all(complete)))
    assert len(set(fingerprints)) == 1
    runner.info = replace(runner.info, fingerprint=fingerprints[0])


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"rank_invariant": True}, {"tie_word_embeddings": True}),
        ({"rank_invariant": True, "kernel_backend": "torch"}, {}),
        ({"quantization": "int8", "deterministic": False}, {"hidden_size": 64, "intermediate_size": 128}),
    ],
)
def test_two_ranks_take_their_slices(settings, changes, processes: RankProcesses, tmp_path):
    folder = write_tiny(tmp_path / "first", **changes)
    second = changed(tensors_in(folder))
    config = replace(CONFIG, weight_store=str(tmp_path / "store"), **settings)
    whole = write_changed(folder, second, tmp_path / "second")
    want = answers(processes.open(replace(config, weight_updates=False), whole), config)
    runner = processes.open(config, folder)
    before = answers(runner, config)
    assert before != want
    names = list(second)
    apply(runner, [ArraysPart({name: second[name] for name in names[i::2]}) for i in range(2)])
    assert answers(runner, config) == want
    staged = runner.ask("attribute", "updates", "_newest", "nbytes")
    assert max(staged) < 0.75 * sum(tensor.nbytes for tensor in second.values())
    runner.ask("updates.store")
    restarted = processes.open(config, folder)
    assert restarted.info.weights.serial == 1
    assert answers(restarted, config) == want


def test_ranks_agree_on_a_damaged_store(processes: RankProcesses, tmp_path):
    folder = write_tiny(tmp_path / "first")
    config = replace(CONFIG, weight_store=str(tmp_path / "store"))
    runner = processes.open(config, folder)
    before = answers(runner, config)
    with pytest.raises(CallboardError, match="no tensor"):
        runner.ask("updates.receive", ArraysPart({"absent": tensors_in(folder)["lm_head.weight"]}))
    apply(runner, [ArraysPart(changed(tensors_in(folder)))])
    runner.ask("updates.store")
    (path,) = (tmp_path / "store").glob("*-1of2.weights")
    path.write_bytes(path.read_bytes()[:-50])
    restarted = processes.open(config, folder)
    assert restarted.info.weights.serial == 0
    assert answers(restarted, config) == before
