"""Every family: a runner that is updated to a second checkpoint equals a runner that has loaded it, to the bit."""

import pytest
import torch

from runtime.base.weight_parts import ArraysPart
from tests.support.models.family_cases import CASES, save_model, spec_of
from tests.support.models.runner_driver import open_runner, tiny_runner
from tests.support.models.weight_updates import (
    changed,
    logits,
    random_parts,
    random_tensors,
    tensors_in,
    update,
    write_changed,
)

pytestmark = pytest.mark.usefixtures("cold_runners")
LIMITS = {"deterministic": True, "max_model_len": 64}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_an_updated_family_equals_a_loaded_one(case, tmp_path):
    save_model(tmp_path / "first", case)
    second = changed(tensors_in(tmp_path / "first"))
    write_changed(tmp_path / "first", second, tmp_path / "second")
    for seed, backend in enumerate(("torch", "llvm")):
        runner = open_runner(tmp_path / "first", kernel_backend=backend, weight_updates=True, **LIMITS)
        before, want = logits(runner), logits(open_runner(tmp_path / "second", kernel_backend=backend, **LIMITS))
        assert not torch.equal(before, want)
        parts = random_parts(second, tmp_path / backend, seed)
        for part in parts:
            runner.updates.receive(part)
        assert torch.equal(logits(runner), before), "staged tensors show"
        assert runner.updates.check()
        update(runner, [])
        assert torch.equal(logits(runner), want)


@pytest.mark.parametrize("backend", ["torch", "llvm"])
def test_sinks_follow_an_update(backend):
    runner = tiny_runner(spec_of("sinks"), kernel_backend=backend, weight_updates=True, **LIMITS)
    tensors = random_tensors(runner)
    sinks = {name: tensor for name, tensor in tensors.items() if name.endswith("sinks")}
    update(runner, [ArraysPart(tensors)], "1")
    want = logits(runner)
    update(runner, [ArraysPart({name: tensor + 1 for name, tensor in sinks.items()})], "2")
    assert not torch.equal(logits(runner), want)
    update(runner, [ArraysPart(sinks)], "3")
    assert torch.equal(logits(runner), want)


@pytest.mark.parametrize(
    "case",
    [
        "llama", "qwen3.5 moe", "gemma3, stretched", "lfm2 moe", "gpt2", "phi4-mini", "glm4 moe", "granite moe",
        "deepseek v2 lite",
    ],
)  # fmt: skip
def test_a_partial_update_changes_its_tensors_alone(case, tmp_path):
    save_model(tmp_path / "first", case)
    tensors = tensors_in(tmp_path / "first")
    runner = open_runner(tmp_path / "first", weight_updates=True, **LIMITS)
    whole = {}
    for step, own in enumerate((list(tensors)[::3], list(tensors)[1::4], list(tensors)[-3:])):
        part = changed({name: tensors[name] for name in own}, seed=step)
        whole |= part
        update(runner, [ArraysPart(part)], str(step))
        runner.updates.store()
        folder = write_changed(tmp_path / "first", whole, tmp_path / f"state {step}")
        assert torch.equal(logits(runner), logits(open_runner(folder, **LIMITS)))
