"""Heads from a model's own checkpoint: their logits against transformers' layer, ranks, and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.library.models import head_of, spec_of
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from runtime.models.heads.mtp import mtp_spec
from runtime.models.kv_scales import scales_of_rank
from runtime.quant.model_formats import weight_bytes
from runtime.worker.memory import plan_memory
from runtime.worker.sources import CheckpointSource, DummySource
from tests.support.models.gguf_export import export, head_tables
from tests.support.models.head_steps import HeadDriver, in_float32
from tests.support.models.mtp_models import GGUF, MODELS, head_tensors, oracle, random_pair, write_model
from tests.support.ranks.rank_threads import on_ranks

PROMPT, SAMPLE = [(7 * i + 3) % 131 for i in range(19)], 5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare the logits of each draft token apart."""
    assert want.std() > 0.1
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_oracle(name, stacked, tmp_path):
    model, head = random_pair(name)
    source = CheckpointSource(write_model(tmp_path, model, head_tensors(name, head, stacked)))
    want = oracle(model, head, PROMPT, SAMPLE, 3)
    close(HeadDriver(source).drafts(PROMPT, SAMPLE, 3), want)
    close(HeadDriver(source).drafts(PROMPT, SAMPLE, 3, cuts=(4, 17)), want)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("name", GGUF)
def test_gguf_head_is_that_of_the_oracle(name, has_norm, tmp_path):
    model, head = random_pair(name)
    arch, metadata = GGUF[name]
    if not has_norm:
        head.post_norm.weight.data = model.model.norm.weight.data
    tables: dict[str, Any] = head_tables(head, arch, model.config)
    if not has_norm:
        del tables["blk.2.nextn.shared_head_norm.weight"]
    given = {f"{arch}.{key}": value for key, value in metadata.items()}
    given |= {f"{arch}.block_count": 3, f"{arch}.nextn_predict_layers": 1}
    source = CheckpointSource(export(model, arch, tmp_path / "model.gguf", tables=tables, **given))
    close(HeadDriver(source).drafts(PROMPT, SAMPLE, 3), oracle(model, head, PROMPT, SAMPLE, 3))


@pytest.mark.parametrize("name", ["qwen3.5-moe", "glm4-moe", "deepseek-v3"])
def test_two_ranks_have_the_drafts_of_one(name, tmp_path):
    model, head = random_pair(name)
    source = CheckpointSource(write_model(tmp_path, model, head_tensors(name, head, False)))
    want = HeadDriver(source).drafts(PROMPT, SAMPLE, 1)
    parts = on_ranks(2, lambda ranks: HeadDriver(source, ranks).drafts(PROMPT, SAMPLE, 1))
    close(torch.cat(parts, 1), want)


def test_a_dummy_model_has_the_head_of_its_spec():
    spec = spec_of("tiny-hybrid")
    source = DummySource(spec, draft_head=mtp_spec(spec))
    assert source.head(None) is None
    drafts = HeadDriver(source).drafts(PROMPT, SAMPLE, 2)
    assert drafts.isfinite().all()
    assert drafts.std() > 0.1


@pytest.fixture
def glm(tmp_path):
    model, head = random_pair("glm4-moe")
    return model, head_tensors("glm4-moe", head, False), tmp_path


def refusal(path) -> str:
    with pytest.raises(CallboardError) as caught:
        HeadDriver(CheckpointSource(path))
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_a_checkpoint_without_a_head_is_refused(glm):
    model, _, path = glm
    assert "lacks the head's tensors, model.layers.2.*" in refusal(write_model(path, model, {}))


def test_an_absent_expert_is_named(glm):
    model, tensors, path = glm
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[name]
    assert f"lacks tensor {name}" in refusal(write_model(path, model, tensors))


def test_equal_copies_are_shared_and_others_named(glm):
    model, tensors, path = glm
    copies = {"embed_tokens": model.model.embed_tokens.weight, "shared_head.head": model.lm_head.weight}
    tensors |= {f"model.layers.2.{name}.weight": weight.detach().clone() for name, weight in copies.items()}
    HeadDriver(CheckpointSource(write_model(path, model, tensors)))
    tensors["model.layers.2.shared_head.head.weight"][5, 5] += 1
    assert "model.layers.2.shared_head.head.weight differs from lm_head" in refusal(write_model(path, model, tensors))


@pytest.mark.parametrize(("field", "value"), [("mtp_hidden_states_first", True), ("chain_hidden_post_norm", False)])
def test_other_flags_are_refused(glm, field, value):
    model, tensors, path = glm
    assert f"the model's {field} is {value}" in refusal(write_model(path, model, tensors, **{field: value}))


@pytest.mark.parametrize(
    ("extra", "text"),
    [("mtp.fc_embedding.weight", "has mtp.fc_embedding"), ("mtp.layers.1.self_attn.q_proj.weight", "one layer")],
)
def test_other_layouts_are_refused(extra, text, tmp_path):
    model, head = random_pair("qwen3.5")
    tensors = head_tensors("qwen3.5", head, False) | {extra: torch.zeros(2, 2)}
    assert text in refusal(write_model(tmp_path, model, tensors))


def test_a_head_in_fp8_is_read_by_its_tensors(tmp_path):
    """The config states no quantization. The head has fp8 blocks beside bfloat16."""
    model, head = random_pair("qwen3.5")
    tensors = head_tensors("qwen3.5", head, False)
    quantized = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
    head.eh_proj.weight.data = quantized.float() * 0.5
    tensors |= {"mtp.fc.weight": quantized, "mtp.fc.weight_scale_inv": torch.full((1, 1), 0.5)}
    source = CheckpointSource(write_model(tmp_path, model, tensors))
    close(HeadDriver(source).drafts(PROMPT, SAMPLE, 2), oracle(model, head, PROMPT, SAMPLE, 2))


def test_memory_plan_counts_the_head():
    head, numerics = head_of("qwen3.6-35b-a3b"), in_float32()
    assert head is not None
    spec = replace(spec_of("qwen3.6-35b-a3b"), draft_layers=head.layers)
    config = EngineConfig(max_model_len=64).sized_for("cpu")
    without, plan = (plan_memory(config, spec, numerics, 1 << 40, head=each) for each in (None, head))
    own = 2048 * 2 * 2048 + 256 * 3 * 512 * 2048  # fc and the experts
    assert plan.weights - without.weights == weight_bytes(head.decoder, numerics) > 4 * own
    assert plan.kv == plan.num_kv_blocks * (plan.kv_cache.bytes_per_block(plan.block_size) + 2048 * 4)


def test_layers_of_a_head_have_kv_scales_of_one():
    spec = spec_of("tiny-hybrid")
    scales = torch.full((spec.num_layers, 2, 2), 3.0)
    own = scales_of_rank(scales, replace(spec, draft_layers=mtp_spec(spec).layers))
    assert own.shape[0] == spec.num_layers + 1
    assert (own[-1] == 1).all()
    assert (own[:-1] != 1).any()
