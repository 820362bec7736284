"""Every family against transformers, in fp32 on the CPU: names, logits, greedy tokens; and its kernels interpreted."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_cases import CASES, CONTEXT, save_model
from runner_driver import Driver
from transformers import DynamicCache, PreTrainedModel

from runtime.core.config import EngineConfig
from runtime.loading.checkpoint import Checkpoint, open_checkpoint
from runtime.models import describe
from runtime.models.decoder import Decoder
from runtime.models.layout import Layout
from runtime.models.llama import LAYOUT as LLAMA
from runtime.models.spec import DecoderSpec
from runtime.text.tokenizer import Tokenizer
from runtime.worker.runner import ModelRunner

NEW = 64  # tokens
TESTS = Path(__file__).parent


def open_runner(folder: Path, **config) -> ModelRunner:
    return ModelRunner(EngineConfig(model="tiny", device="cpu", kv_cache_memory=0.02, num_threads=1, **config), folder)


def generate(
    driver: Driver, prompts: list[list[int]], cuts: tuple[int, ...], new: int = NEW
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedily, all in one batch: the sequences, and the logits that each new token was taken from. The last prompt is
    computed in chunks that end at `cuts`, beside the others' first tokens."""
    sequences, logits = [list(p) for p in prompts], []
    for slot, prompt in enumerate(prompts):
        driver.open(slot, prompt, room=new)
    last, start = len(prompts) - 1, 0
    for cut in cuts:
        driver.step((last, start, cut - start, 0))
        start = cut
    starts = [0] * last + [start]
    for _ in range(new):
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


class Copies:
    """A checkpoint in Mixtral's layout, in which all experts are the feed-forward layer of a dense one."""

    def __init__(self, dense: Checkpoint, spec: DecoderSpec, layout: Layout) -> None:
        parameters = {name: parameter for parameter, name in layout.names_of(spec).items()}
        sources = LLAMA.names_of(replace(spec, experts=None))
        self.dense, self.router = dense, {name for name, p in parameters.items() if "router" in p}
        self.sources = {n: sources.get(re.sub(r"experts\.\d+\.", "", p)) for n, p in parameters.items()}
        self.shapes = {name: spec.shapes()[parameter] for name, parameter in parameters.items()}

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if name in self.router:
            return torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(len(name)))
        return self.dense.tensor(self.sources[name], dtype, device)


@pytest.mark.slow
def test_a_mixture_of_copies_answers_like_the_dense_model(smollm2_path):
    tokens = Tokenizer.load(smollm2_path).encode("Once upon a time, in a small village by the sea,")
    config = EngineConfig(device="cpu", num_threads=2, max_model_len=128, max_num_seqs=2, dtype="float32")
    dense = ModelRunner(config, smollm2_path)
    checkpoint = open_checkpoint(smollm2_path)
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    spec, layout = describe(checkpoint.config | mixtral)
    mixture = ModelRunner.dummy(config, replace(spec, num_layers=1))
    copies = Copies(checkpoint, spec, layout)
    decoder = Decoder.load(copies, spec, layout, mixture.numerics, 128)
    mixture._open(decoder, "copies", checkpoint.eos_token_ids)
    answers = []
    for runner in (dense, mixture):
        driver = Driver(runner)
        sequences, logits = generate(driver, [tokens], cuts=(5,), new=24)
        answers.append((sequences[0], logits))
    (want, want_logits), (got, got_logits) = answers
    assert Tokenizer.load(smollm2_path).decode(want[len(tokens) :]).startswith(" there was a wise old wizard named")
    assert got == want
    torch.testing.assert_close(got_logits, want_logits, atol=1e-3, rtol=1e-4)
