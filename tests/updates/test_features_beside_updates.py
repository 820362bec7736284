"""What reads a decoder's weights beside its forward pass: tapes, adapters, and the classifier of scores."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

from benchmarks.library.make_adapter import modules_of, save_adapter
from runtime.assembly.engine import build_engine
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.images import ImageSpan
from runtime.base.types import Request, SamplingParams
from runtime.base.weight_parts import ArraysPart
from runtime.core.executor import InProcess
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.support.models.family_cases import save_model
from tests.support.models.runner_driver import Driver, open_runner
from tests.support.models.tower_cases import random_image, save_tower_model
from tests.support.models.weight_updates import changed, tensors_in, update, write_changed, write_tiny

POOLED = SamplingParams(max_tokens=1, pooled=True)
PROMPTS = [[i * k % 100 + 1 for k in range(5 * i, 9 * i + 4)] for i in range(1, 6)]


def tokens_of(runner: ModelRunner, params: SamplingParams) -> list[object]:
    """Tokens of each prompt, or its vector."""
    runner.reset()
    core, found = build_engine(runner.config, runner.info, InProcess(runner)), [[] for _ in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        core.add(Request(str(i), prompt, len(prompt), params, seed=i), found[i])
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                state.owner.append(token)
            for state, vector in output.reports:
                state.owner.append(vector.numbers)
    return found


def test_recorded_tapes_end_with_their_weights(tmp_path):
    folder = write_tiny(tmp_path / "first")
    second = changed(tensors_in(folder))
    params = SamplingParams(max_tokens=12, temperature=0.0)
    want = tokens_of(open_runner(write_changed(folder, second, tmp_path / "second")), params)
    runner = open_runner(folder, weight_updates=True)
    assert tokens_of(runner, params) != want
    assert runner.steps.tapes is None or runner.steps.tapes.sizes
    update(runner, [ArraysPart(second)])
    assert tokens_of(runner, params) == want


@pytest.mark.parametrize("backend", ["torch", "llvm"])
def test_adapters_go_on_beside_new_weights(backend, tmp_path):
    folder = write_tiny(tmp_path / "first")
    second = changed(tensors_in(folder))
    folder_of_second = write_changed(folder, second, tmp_path / "second")
    settings = {"max_loras": 1, "max_lora_rank": 8, "kernel_backend": backend, "deterministic": True}
    runners = [open_runner(folder, weight_updates=True, **settings), open_runner(folder_of_second, **settings)]
    source = CheckpointSource(folder)
    save_adapter(tmp_path / "adapter", modules_of(source.spec, source.weight_map), r=4)
    runners[1].load_adapter(1, str(tmp_path / "adapter"))
    runners[0].load_adapter(1, str(tmp_path / "adapter"))
    update(runners[0], [ArraysPart(second)])
    found = []
    for runner in runners:
        driver = Driver(runner)
        for slot, adapter in ((0, 1), (1, 0)):
            driver.open(slot, PROMPTS[2], adapter=adapter)
        driver.step((0, 0, len(PROMPTS[2]), 1), (1, 0, len(PROMPTS[2]), 1))
        found.append(driver.logits)
    assert not torch.equal(*found[0])  # the adapter changes its row
    assert torch.equal(*found)


@torch.no_grad()
def test_scores_follow_an_update(tmp_path):
    """By a classifier of its own, and by two rows of the head."""
    theirs = save_model(tmp_path / "rows", "qwen3")
    (tmp_path / "rows/modules.json").write_text(
        json.dumps([{"path": "", "type": "x.Transformer"}, {"path": "1", "type": "x.LogitScore"}])
    )
    (tmp_path / "rows/1").mkdir()
    (tmp_path / "rows/1/config.json").write_text(json.dumps({"true_token_id": 7, "false_token_id": 9}))
    config = transformers.Qwen3Config(**theirs.config.to_dict() | {"num_labels": 1})
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    for name in ("rows", "classifier"):
        second = changed(tensors_in(tmp_path / name))
        want = tokens_of(start(write_changed(tmp_path / name, second, tmp_path / f"{name} 2")), POOLED)
        runner = start(tmp_path / name, weight_updates=True)
        assert tokens_of(runner, POOLED) != want
        update(runner, [ArraysPart(second)])
        assert tokens_of(runner, POOLED) == want


def test_an_image_encoder_follows_an_update(tmp_path):
    save_tower_model(tmp_path / "first", "mistral3")
    second = changed(tensors_in(tmp_path / "first"))
    image, _ = random_image([(24, 24)], 0)
    prompt = [5, *[150] * 4, 6]

    def logits_of(runner: ModelRunner) -> torch.Tensor:
        driver = Driver(runner)
        driver.open(0, prompt, spans=[ImageSpan(1, 4, image)])
        return driver.prefill(0, prompt)

    want = logits_of(start(write_changed(tmp_path / "first", second, tmp_path / "second"), deterministic=True))
    runner = start(tmp_path / "first", weight_updates=True, deterministic=True)
    text = {name: tensor for name, tensor in second.items() if "language_model" in name or "lm_head" in name}
    update(runner, [ArraysPart(text)])
    assert not torch.equal(logits_of(runner), want)
    update(runner, [ArraysPart(second)], "2")
    assert torch.equal(logits_of(runner), want)


def test_a_texts_update_is_complete_beside_an_old_encoder(tmp_path):
    """The encoder is the checkpoint's on all engines, so older updates do not matter."""
    save_tower_model(tmp_path, "mistral3")
    second = changed(tensors_in(tmp_path))
    text = {name: tensor for name, tensor in second.items() if "language_model" in name or "lm_head" in name}
    runners = [start(tmp_path, weight_updates=True) for _ in range(2)]
    update(runners[0], [ArraysPart(text)])
    versions = [update(runner, [ArraysPart(text)], "2") for runner in runners]
    assert versions[0].identity == versions[1].identity
    update(runners[0], [ArraysPart(second)], "3")
    versions = [update(runner, [ArraysPart(text)], "4") for runner in runners]
    assert versions[0].identity != versions[1].identity, "one of them has a newer encoder"
    versions = [update(runner, [ArraysPart(second)], "5") for runner in runners]
    assert versions[0].identity == versions[1].identity
    update(runners[1], [ArraysPart(dict([*text.items()][1:]))], "6")
    versions = [update(runner, [ArraysPart(dict([*text.items()][1:]))], "7") for runner in runners]
    assert versions[0].identity != versions[1].identity, "it lacks a tensor of the decoder"


def start(folder: Path, **config) -> ModelRunner:
    sizes = {"num_kv_blocks": 80, "max_num_seqs": 4, "block_size": 4, "device": "cpu", "num_threads": 1}
    with mock.patch.object(ModelRunner, "_warm_up"):
        return build_runner(EngineConfig(**sizes | config), CheckpointSource(folder))
