"""The distilled draft: what it learns from, what it is asked to match, and that a server can load it."""

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.drafts import distill_draft
from benchmarks.drafts.acceptance import Text, extend
from benchmarks.drafts.calibrated_pair import TINY_DRAFT, TINY_TARGET, Pair
from benchmarks.drafts.distill_draft import (
    TINY,
    Clock,
    divergence,
    draft_config,
    load_teacher,
    new_draft,
    open_decoder,
    pack,
    save,
    train,
    write,
)
from benchmarks.drafts.distill_prompts import prompts
from benchmarks.library.make_random_model import write_folder
from benchmarks.library.models import CONFIGS
from runtime.llm import LLM
from runtime.loading.checkpoint import open_checkpoint
from runtime.spec.config import EngineConfig
from runtime.spec.types import SamplingParams
from runtime.text.tokenizer import Tokenizer
from runtime.worker.runner import choose_numerics

CPU = torch.device("cpu")
SMALL = {"hidden": 64, "num_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    pair = Pair(TINY_TARGET, TINY_DRAFT, choose_numerics(EngineConfig(device="cpu")))
    write_folder(folder, pair.target_config, pair.target(0.05))
    return folder


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return LLM(str(target), device="cpu", max_num_seqs=8, kv_cache_memory=0.1, num_threads=1)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[Text]:
    rng = np.random.default_rng(0)
    begun = [Text(rng.integers(2, 512, n).tolist(), n, 7 * n, n % 2 * 1.0) for n in range(5, 29)]
    return write(llm, iter(begun), 20)


def test_texts_are_those_of_the_engine(llm: LLM, texts: list[Text]):
    assert sorted(t.prompt_len for t in texts) == list(range(5, 29))
    for text in texts[:5]:
        params = SamplingParams(max_tokens=20, temperature=text.temperature, seed=text.seed)
        (answer,) = llm.generate(text.token_ids[: text.prompt_len], params)
        assert answer.token_ids == text.output


def test_what_is_over_is_kept_as_far_as_it_came(llm: LLM):
    begun = [Text([5, 6, 7], 3, seed, 1.0) for seed in range(8)]
    steps = iter(range(10))
    cut = write(llm, iter(begun), 100, lambda: next(steps) == 9)
    assert len(cut) == 8
    assert all(0 < len(text.output) < 10 for text in cut)
    assert not llm.engine.has_work


def test_batches_hold_every_output_token_once(texts: list[Text]):
    batches = pack(texts, 128, CPU)
    assert all(batch.token_ids.numel() <= 128 for batch in batches)
    learnt = [token for b in batches for token in b.token_ids.flatten()[b.learnt + 1].tolist()]
    assert sorted(learnt) == sorted(token for text in texts for token in text.output)


def test_the_teacher_is_the_model_and_slices_change_no_gradient(
    target: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
):
    checkpoint = open_checkpoint(target)
    teacher = load_teacher(checkpoint, CPU, torch.float32)
    greedy = [text for text in texts if text.temperature == 0]
    (batch,) = pack(greedy, 1 << 20, CPU)
    states = teacher.model(input_ids=batch.token_ids).last_hidden_state.flatten(0, 1)[batch.learnt]
    logits = teacher.lm_head(states)
    sampled = batch.token_ids.flatten()[batch.learnt + 1]
    assert (logits.argmax(-1) == sampled).float().mean() > 0.99

    draft = new_draft(draft_config(checkpoint.config, **SMALL), teacher)
    ours = draft.model(input_ids=batch.token_ids).last_hidden_state.flatten(0, 1)[batch.learnt]
    wanted, logprobs = logits.log_softmax(-1), draft.lm_head(ours).log_softmax(-1)
    plain = (wanted.exp() * (wanted - logprobs)).sum(-1).mean()
    expected = torch.autograd.grad(plain, list(draft.parameters()))
    monkeypatch.setattr(distill_draft, "_HEAD_SLICE", 50)
    assert float(divergence(teacher, draft, batch)) == pytest.approx(plain.item(), rel=1e-4)
    for parameter, grad in zip(draft.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_training_brings_the_draft_nearer(target: Path, texts: list[Text]):
    teacher = load_teacher(open_checkpoint(target), CPU, torch.float32)
    torch.manual_seed(0)
    draft = new_draft(draft_config(open_checkpoint(target).config, **SMALL), teacher)
    batches = pack(texts, 512, CPU)
    before = np.mean([float(divergence(teacher, draft, batch)) for batch in batches])
    draft.zero_grad()
    num_steps, _ = train(teacher, draft, batches, 60, Clock(minutes=5))
    assert num_steps == 60
    assert np.mean([float(divergence(teacher, draft, batch)) for batch in batches]) < 0.7 * before


def test_what_is_served_is_what_was_trained(target: Path, texts: list[Text], tmp_path: Path):
    checkpoint = open_checkpoint(target)
    config = draft_config(checkpoint.config, **SMALL)
    draft = new_draft(config, load_teacher(checkpoint, CPU, torch.float32))
    with torch.no_grad():
        for parameter in draft.parameters():  # as it is written
            parameter.copy_((3 * parameter).bfloat16())
    save(tmp_path, config, draft, Tokenizer.load(target))
    begun = [Text(text.token_ids, len(text.token_ids), 0, 0.0) for text in texts]
    for text in extend(open_decoder(tmp_path), begun, 10)[0]:
        guesses = draft(torch.tensor([text.token_ids])).logits[0, text.prompt_len - 1 : -1].argmax(-1)
        assert guesses.tolist() == text.output


def test_held_out_prompts_are_none_of_those_learnt_from():
    learnt, held_out = (
        {text for text, _ in islice(prompts(np.random.default_rng(0), held), 4000)} for held in (False, True)
    )
    assert len(learnt) > 1500
    assert len(held_out) > 60
    assert not learnt & held_out


def test_the_draft_for_smollm2_is_under_30_mb():
    config = draft_config(CONFIGS["smollm2-135m"], 256, 2)
    assert (config["intermediate_size"], config["num_attention_heads"]) == (1280, 4)
    for num_layers in (2, 3, 4):
        config = draft_config(CONFIGS["smollm2-135m"], 256, num_layers)
        assert 29e6 < 2 * distill_draft.num_weights(config) < 30e6
    with pytest.raises(ValueError, match="does not fit"):
        draft_config(CONFIGS["smollm2-135m"], 320, 2)


@pytest.mark.long
def test_the_script_writes_a_model(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = [str(tmp_path), "--model", str(target), "--hidden", "64", "--tiny"]
    monkeypatch.setattr(sys, "argv", ["distill_draft", *arguments])
    distill_draft.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["texts"] == TINY.most_texts
    assert line["steps"] == TINY.most_steps
    assert 0 <= min(line["acceptance"].values()) <= max(line["acceptance"].values()) <= 1
    assert (tmp_path / "model.safetensors").stat().st_size > line["draft_bytes"]
    draft = LLM(str(tmp_path), device="cpu", kv_cache_memory=0.1, num_threads=1)
    assert draft.runner.info.vocab_size == TINY_TARGET["vocab_size"]
    assert len(draft.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4))) == 1
    assert Tokenizer.load(tmp_path).eos_token_ids == Tokenizer.load(target).eos_token_ids
