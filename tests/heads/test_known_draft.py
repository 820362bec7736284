"""Drafts that are heads: from a hub, by their config.json; in GGUF files, which are refused; and their layers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.assembly.runner import build_runner
from runtime.base.config import HEAD, EngineConfig
from runtime.base.types import CallboardError
from runtime.compilation.spec_source import SpecSource
from runtime.family_report import family_details
from runtime.inspection import model_report
from runtime.loading.resolve import with_known_draft
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource
from tests.heads.test_eagle import HIDDEN, VOCAB, head_folder
from tests.support.models.fake_hub import FakeHub
from tests.support.models.mtp_models import head_tensors, random_pair, write_model

COMMIT = "a" * 40
KINDS = {"org/eagle3": "eagle3", "org/eagle1": "eagle"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the heads' sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repos = {}
    for name, kind in KINDS.items():
        (folder := tmp_path / kind).mkdir()
        head_folder(folder, kind=kind)
        repos[name] = {COMMIT: {path.name: path.read_bytes() for path in folder.iterdir()}}
    plain = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 24}
    repos["org/model"] = {COMMIT: {"config.json": json.dumps(plain).encode(), "model.safetensors": b"weights"}}
    with FakeHub(repos, {"main": COMMIT}) as hub:
        hub.use(tmp_path, monkeypatch)
        yield hub


def runner_with(target: Path, draft: str, monkeypatch: pytest.MonkeyPatch, **config) -> ModelRunner:
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: None)
    sizes = {"device": "cpu", "num_kv_blocks": 20, "max_num_seqs": 2, "num_threads": 1, "max_model_len": 64}
    own = with_known_draft(EngineConfig(model=str(target), draft=draft, **sizes | config))
    return build_runner(own, CheckpointSource(target))


@pytest.mark.parametrize("name", KINDS)
def test_a_head_of_the_hub_drafts(name, hub, target, monkeypatch):
    runner = runner_with(target, name, monkeypatch)
    assert runner.config.draft == f"{HEAD}{name}"
    assert runner.info.head is not None
    assert runner.info.head.kind == KINDS[name]
    assert "model.safetensors" in hub.asked


def test_small_files_decide_on_a_head(hub):
    for name in ("org/eagle3", "org/model"):
        config = EngineConfig(draft=name)
        assert with_known_draft(config).draft == (name if name == "org/model" else f"{HEAD}{name}")
    assert not any(file.endswith(".safetensors") for file in hub.asked)
    with pytest.raises(CallboardError, match="no model 'org/absent'"):
        with_known_draft(EngineConfig(draft="org/absent"))


def test_a_head_in_a_gguf_file_is_refused(write_tiny_gguf):
    path = write_tiny_gguf(**{"general.architecture": "eagle3"})
    assert with_known_draft(EngineConfig(draft=str(path))).has_draft_model
    with pytest.raises(CallboardError, match=r"draft head \(eagle3\), which is not read from GGUF files; give"):
        CheckpointSource(path)


def test_layers_of_the_settings_replace_the_configs(tmp_path, target, monkeypatch):
    head_folder(tmp_path)
    for layers, taps in ((None, (2, 4, 5)), ("1, 3,8", (1, 3, 8))):
        assert runner_with(target, str(tmp_path), monkeypatch, draft_layers=layers).head.spec.taps == taps
    with pytest.raises(CallboardError, match=r"3 of the target's 8 layers, .* draft_layers sets them"):
        runner_with(target, str(tmp_path), monkeypatch, draft_layers="1,3,9")


def test_layers_without_a_head_that_reads_them_are_refused(tmp_path, target, monkeypatch):
    head_folder(tmp_path, kind="eagle")
    for draft in (str(tmp_path), "ngram"):
        with pytest.raises(CallboardError, match="draft_layers is for EAGLE-3 heads, and draft is"):
            runner_with(target, draft, monkeypatch, draft_layers="1,3,8")
    with pytest.raises(CallboardError, match="draft_layers is '1,x'; it must be numbers"):
        EngineConfig(draft_layers="1,x")


def test_inspect_counts_the_head_of_a_checkpoint(tmp_path, monkeypatch):
    """The tiny model lacks a tokenizer."""
    monkeypatch.setattr("runtime.inspection._text", lambda config, path: [])
    model, head = random_pair("glm4-moe")
    tensors = head_tensors("glm4-moe", head, False)
    folder = write_model(tmp_path, model, tensors)
    config = EngineConfig(model=str(folder), device="cpu", kernel_backend="torch")
    own, size = report(config), sum(tensor.numel() for tensor in tensors.values())
    assert own["draft head"] == f"mtp, {size:,} parameters; 0.00 GiB on the device; --draft mtp uses it"
    with_head = report(replace(config, draft="mtp"))
    assert with_head["draft head"] == f"mtp, {size:,} parameters; 0.00 GiB on the device"
    assert with_head["memory plan"] != own["memory plan"]
    (tmp_path / "other").mkdir()
    without = report(replace(config, model=str(write_model(tmp_path / "other", model, {}))))
    assert without["draft head"].startswith("none that runs. draft is mtp, but this checkpoint lacks")


def report(config: EngineConfig) -> dict[str, str]:
    """Label -> text."""
    lines = (line.partition("  ") for line in model_report(config).splitlines())
    return {label.strip(): text.strip() for label, _, text in lines}


def test_models_names_families_with_heads():
    names = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "LlamaForCausalLM")
    found = [
        next(line for line in family_details(name).splitlines() if line.startswith("  draft heads")) for name in names
    ]
    assert [line.removeprefix("  draft heads").strip() for line in found] == [
        *["in its checkpoints (--draft mtp), and EAGLE"] * 3,
        "EAGLE",
    ]


@pytest.mark.parametrize("kind", KINDS.values())
def test_kernels_are_compiled_for_heads_in_folders(kind, target, tmp_path):
    """A description of the target by its config.json alone has the head that a start with all files has."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_bytes((target / "config.json").read_bytes())
    (folder := tmp_path / kind).mkdir()
    head_folder(folder, kind=kind)
    config = with_known_draft(EngineConfig(model=str(model), draft=str(folder)))
    found = SpecSource.at(model, config).draft_head
    assert found is not None
    assert found.kind == kind
    head = CheckpointSource(target).head(config.draft)
    assert head is not None
    assert found == head.spec
