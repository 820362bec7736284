"""Every family against transformers, in fp32 on the CPU: names, logits, greedy tokens; and its kernels interpreted."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_cases import CASES, CONTEXT, save_model
from runner_driver import Driver
from transformers import DynamicCache, PreTrainedModel

from runtime.core.config import EngineConfig
from runtime.worker.runner import ModelRunner

NEW = 64  # tokens
TESTS = Path(__file__).parent


def open_runner(folder: Path, **config) -> ModelRunner:
    return ModelRunner(EngineConfig(model="tiny", device="cpu", kv_cache_memory=0.02, num_threads=1, **config), folder)


def generate(driver: Driver, prompts: list[list[int]], cuts: tuple[int, ...]) -> tuple[list[list[int]], torch.Tensor]:
    """Greedily, all in one batch: the sequences, and the logits that each new token was taken from. The last prompt is
    computed in chunks that end at `cuts`, beside the others' first tokens."""
    sequences, logits = [list(p) for p in prompts], []
    for slot, prompt in enumerate(prompts):
        driver.open(slot, prompt, room=NEW)
    last, start = len(prompts) - 1, 0
    for cut in cuts:
        driver.step((last, start, cut - start, 0))
        start = cut
    starts = [0] * last + [start]
    for _ in range(NEW):
        rows = [(i, a, len(s) - a, 1) for i, (a, s) in enumerate(zip(starts, sequences, strict=True))]
        starts = [len(s) for s in sequences]
        for sequence, token in zip(sequences, driver.step(*rows).token_ids.tolist(), strict=True):
            sequence.append(token)
        logits.append(driver.logits)
    return sequences, torch.stack(logits, 1)


@torch.no_grad()
def expected(model: PreTrainedModel, sequence: list[int], prompt_len: int, step_by_step: bool) -> torch.Tensor:
    """[NEW, vocab]: what transformers predicts each new token from."""
    if not step_by_step:
        return model(torch.tensor([sequence])).logits[0, prompt_len - 1 : -1]
    cache, logits, at = DynamicCache(config=model.config), [], 0
    for end in range(prompt_len, len(sequence)):
        logits.append(model(torch.tensor([sequence[at:end]]), past_key_values=cache).logits[0, -1])
        at = end
    return torch.stack(logits)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_and_greedy_tokens_are_those_of_transformers(case, deterministic, tmp_path, record_property):
    theirs = save_model(tmp_path, case)
    limits = {"max_model_len": 180} if case == "phi3, short context" else {}
    driver = Driver(open_runner(tmp_path, deterministic=deterministic, **limits))
    generator = torch.Generator().manual_seed(3)
    # transformers forgets the stretch of the sequence before only at the first step of one shorter than the context.
    lengths = (3, 21, CONTEXT - 1) if case == "dynamic" else (3, 21, 70)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in lengths]
    sequences, got = generate(driver, prompts, cuts=(17, 29))
    worst = 0.0
    for prompt, sequence, logits in zip(prompts, sequences, got, strict=True):
        want = expected(theirs, sequence, len(prompt), step_by_step=case == "dynamic")
        worst = max(worst, float((logits - want).abs().max() / want.abs().max()))
        assert want.argmax(-1).tolist() == sequence[len(prompt) :]
    record_property("error", worst)
    assert worst <= 2e-5
    if deterministic:
        again = Driver(driver.runner, seed=1)
        again.open(0, sequences[1][:-1])
        assert torch.equal(again.prefill(0, sequences[1][:-1], cuts=(40,)), got[1, -1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_steps_are_those_of_the_torch_path():
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    command = [sys.executable, str(TESTS / "family_steps.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stdout + done.stderr[-2000:]
