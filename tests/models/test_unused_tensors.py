"""Tensors that a model does not read: each is known, without an effect, or named in a warning, in every format."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.base.types import CallboardError
from runtime.loading.checkpoint import open_checkpoint
from runtime.models.checkpoint_model import UnusedTensors, checkpoint_model, unused_tensors
from runtime.models.weights import locate_parameters
from tests.models.test_gguf_architectures import export_model
from tests.support.models.family_cases import save_model
from tests.support.models.runner_driver import Driver, open_runner

TOKENS = torch.tensor([3, 14, 15, 92, 65, 35])
TIED = {  # a case of each place of tie_word_embeddings -> the names of its embedding and its head
    "llama, all heads, biases": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "gemma2": ("model.embed_tokens.weight", "lm_head.weight"),
    "lfm2": ("model.embed_tokens.weight", "lm_head.weight"),
}


def _change(folder: Path, *removed: str, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in removed}
    save_file(kept | tensors, path, metadata={"format": "pt"})


def _unused(path: Path) -> UnusedTensors:
    checkpoint = open_checkpoint(path)
    spec, weight_map = checkpoint_model(checkpoint.config, checkpoint)
    return unused_tensors(spec, weight_map, checkpoint, locate_parameters(spec, weight_map, checkpoint))


@torch.no_grad()
def _assert_equal_logits(folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    driver = Driver(open_runner(folder))
    driver.open(0, TOKENS.tolist())
    got, want = driver.prefill(0, TOKENS.tolist()), theirs(TOKENS[None]).logits[0, -1]
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("case", TIED)
def test_a_head_unlike_its_tied_embedding_is_used(case, tmp_path, caplog):
    save_model(tmp_path, case, tie_word_embeddings=True)
    embed, head = TIED[case]
    table = load_file(tmp_path / "model.safetensors")[embed]
    other = table.clone()
    other[-1, -1] += 1.0
    _change(tmp_path, **{head: other})
    _assert_equal_logits(tmp_path)
    assert f"{head} differs from the embedding and is used" in caplog.text
    assert not any(_unused(tmp_path))
    caplog.clear()
    _change(tmp_path, **{head: table.clone()})
    _assert_equal_logits(tmp_path)
    assert "differs" not in caplog.text
    assert open_checkpoint(tmp_path).names().count(head) == 1
    assert not any(_unused(tmp_path))


def test_a_tied_matrix_may_have_the_name_of_the_head(tmp_path):
    save_model(tmp_path, "qwen3")
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _change(tmp_path, "model.embed_tokens.weight", **{"lm_head.weight": table})
    _assert_equal_logits(tmp_path)


def test_a_missing_head_that_is_not_tied_is_an_error(tmp_path):
    save_model(tmp_path, "llama")
    _change(tmp_path, "lm_head.weight")
    with pytest.raises(CallboardError, match=r"lacks tensor lm_head\.weight"):
        open_runner(tmp_path)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama", ["bogus"]),
        ("llama", ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias"]),
        ("llama", [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3, 9)]),  # beyond the config's layers
        ("llama", ["model.layers.1.mlp.up_proj.weight_scale"]),
        ("qwen3", ["model.layers.0.self_attn.q_proj.bias"]),
        ("mixtral", ["model.layers.1.block_sparse_moe.experts.5.w2.weight"]),
        ("gpt2", ["transformer.h.3.ln_1.weight"]),
    ],
)
def test_unknown_tensors_are_a_warning_that_names_them(case, names, tmp_path, caplog):
    save_model(tmp_path, case)
    _change(tmp_path, **{name: torch.ones(10) for name in names})
    if case == "mixtral":  # transformers refuses it
        open_runner(tmp_path)
    else:
        _assert_equal_logits(tmp_path)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "no place" in r.getMessage()]
    assert line.startswith(f"{len(names)} tensors of the checkpoint have no place in the model")
    assert line.endswith(f"not used: {', '.join(names[:4])}" + " and 2 more" * (len(names) == 6))


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "deepseek v3", "gpt2"])
def test_tensors_without_an_effect_are_not_named(case, tmp_path):
    save_model(tmp_path, case)
    names = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_proj.k_scale"
    _change(tmp_path, **{name: torch.ones(5) for name in names})
    if case != "gpt2":
        _change(tmp_path, **{"model.layers.0.mlp.down_proj.bias": torch.zeros(60)})
    assert not any(_unused(tmp_path))


@pytest.mark.parametrize(
    ("case", "names", "line"),
    [
        ("qwen3.5", ["mtp.fc.weight", "mtp.norm.weight"], "2 of mtp"),
        ("gemma4, with a vision tower", ["model.audio_tower.output_proj.weight"], "1 of audio_tower"),
        ("deepseek v3", ["model.layers.3.eh_proj.weight"], "1 of layers.3"),
    ],
)
def test_parts_that_texts_do_not_need_are_one_line(case, names, line, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_model(tmp_path, case)
    _change(tmp_path, **{name: torch.ones(6) for name in names})
    open_runner(tmp_path)
    (found,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert line in found
    assert "no place" not in caplog.text


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "granite", "gpt2", "lfm2"])
def test_gguf_files_name_unknown_tensors(name, tmp_path, caplog):
    extra = {"blk.0.odd.weight": [1.0] * 4, "blk.9.attn_norm.weight": [1.0] * 48}
    if name == "qwen3":  # its config does not read the table
        extra |= {"rope_freqs.weight": [1.0, 2.0], "blk.0.attn_q.bias": [1.0] * 64}
    _, path = export_model(name, tmp_path, extra)
    unused = _unused(path)
    assert len(unused.unknown) == len(extra)
    assert "blk.0.odd.weight" in unused.unknown
    open_runner(path)
    assert f"{len(extra)} tensors of the checkpoint have no place" in caplog.text
