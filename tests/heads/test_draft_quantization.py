"""The weights of heads in 8 bits: the output head that drafts, and the layers. They change drafts, and no token."""

from dataclasses import replace

import pytest
import torch

from benchmarks.library.models import head_of, spec_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import CallboardError
from runtime.base.weight_parts import ArraysPart
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.models.heads.mtp import mtp_spec
from runtime.models.heads.quantized_head import quantized_head
from runtime.quant.at_load import quantized_at_load
from runtime.quant.model_formats import encodings_on_device
from runtime.worker.memory import plan_memory
from runtime.worker.runner import ModelRunner, choose_numerics
from runtime.worker.sources import CheckpointSource
from tests.heads.test_cpu_head import answers
from tests.heads.test_eagle import TARGET, Drafting, head_folder, prompt, read, three_drafts
from tests.support.models import mtp_models
from tests.support.models.headed_runner import headed_runner
from tests.support.models.specs import TINY, changed
from tests.support.models.weight_updates import changed as changed_tensors
from tests.support.models.weight_updates import tensors_in, update
from tests.support.ranks.rank_threads import on_ranks

__all__ = ["prompt"]  # a fixture
TIED = changed(TINY, hidden_size=64, ffn_size=96, tied_head=True)
EXACT = {"deterministic": True, "block_size": 16, "max_model_len": 96}


def in_int8(weight: torch.Tensor) -> torch.Tensor:
    """Rows rounded to 255 steps each, with scales in bfloat16."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    return torch.round(weight / scale) * scale


def test_drafts_read_a_copy_in_int8():
    head, plain = (headed_runner(TIED, **extra).head.head for extra in ({}, {"draft_quantization": "none"}))
    assert plain.output_copy is None
    embed, x = head.target.embed, torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + TIED.norm_eps) * head.head_norm
    torch.testing.assert_close(head.logits(x).clone(), normed @ in_int8(embed).T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(head.target.logits_after(x, head.head_norm, TIED.norm_eps), normed @ embed.T)


def test_a_copy_changes_drafts_alone():
    models = [headed_runner(TIED, **EXACT, draft_quantization=own) for own in ("auto", "none")]
    assert models[0].info.fingerprint == models[1].info.fingerprint
    assert answers(models[0], 6, 3)[0] == answers(models[1], 6, 3)[0]


@pytest.mark.parametrize("own", ["auto", "none", "int8", "int4"])
def test_layers_follow_the_targets_quantization(own):
    runner = headed_runner(TIED, quantization="int8", draft_quantization=own)
    layers = "int8" if own == "auto" else own
    found = encodings_on_device(runner.head.spec.decoder, runner.numerics)
    assert "head" not in found, "the target's is in int8 already"
    maps = {name for name in runner.head.spec.decoder.shapes() if name.endswith(".weight")}
    assert set(found) == (set() if own == "none" else maps)
    assert all(form.startswith(layers) for form in found.values())
    assert len(found) in (0, 8)
    other = headed_runner(TIED, quantization="int8", draft_quantization="none")
    assert (runner.info.fingerprint == other.info.fingerprint) == (own == "none"), "keys in other bits"


def test_an_encoding_without_products_is_refused():
    with pytest.raises(CallboardError, match="draft_quantization is fp8, which has no products"):
        headed_runner(TIED, draft_quantization="fp8")


def started(folder, **config) -> ModelRunner:
    sizes = {"num_kv_blocks": 80, "max_num_seqs": 4, "device": "cpu", "num_threads": 1, "draft": "mtp"}
    return build_runner(EngineConfig(**sizes | config), CheckpointSource(folder))


def test_a_copy_follows_new_weights(tmp_path, monkeypatch):
    kind, config = mtp_models.MODELS["qwen3.5"]
    monkeypatch.setitem(mtp_models.MODELS, "qwen3.5", (kind, config | {"tie_word_embeddings": True}))
    model, head = mtp_models.random_pair("qwen3.5")
    mtp_models.write_model(tmp_path, model, mtp_models.head_tensors("qwen3.5", head, False))
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda self: None)
    runner = started(tmp_path, weight_updates=True)
    own, x = runner.head.head, torch.randn(3, 32)
    old = own.logits(x).clone()
    tensors = {name: tensor for name, tensor in tensors_in(tmp_path).items() if not name.startswith("mtp.")}
    update(runner, [ArraysPart(changed_tensors(tensors))])
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + own.eps) * own.head_norm
    torch.testing.assert_close(own.logits(x).clone(), normed @ in_int8(own.target.embed).T, rtol=1e-3, atol=1e-2)
    assert (own.logits(x) - old).abs().max() > 0.1


def in_8_bits(spec: HeadSpec, ranks: Communicator, **config) -> HeadSpec:
    """The head as a CPU with compiled kernels reads it."""
    own = EngineConfig(device="cpu", dtype="float32", tensor_parallel_size=ranks.size, **config)
    return quantized_head(spec, TARGET, own, choose_numerics(own))


@pytest.mark.parametrize("options", [{}, {"kind": "eagle"}, {"own_head": False}], ids=["own", "eagle 1", "target's"])
def test_an_own_output_head_is_in_int8(options, tmp_path, prompt):
    head_folder(tmp_path, **options)
    found = read(tmp_path)
    plain = Drafting(found, "llvm")
    own = Drafting(replace(found, spec=in_8_bits(found.spec, OneRank())), "llvm")
    is_own = found.spec.own_head
    assert ("draft_head" in encodings_on_device(own.head.spec.decoder, own.target.numerics)) == is_own
    with torch.inference_mode():
        got, want = (three_drafts(each, *prompt) for each in (own, plain))
    assert torch.equal(got.isfinite(), want.isfinite())
    error = (got - want)[want.isfinite()].std() / want[want.isfinite()].std()
    assert (0 < error < 0.01) if is_own else error == 0


def test_ranks_have_rows_in_int8(tmp_path, prompt):
    head_folder(tmp_path)
    found = read(tmp_path)

    def logits(ranks: Communicator) -> torch.Tensor:
        with torch.inference_mode():
            own = replace(found, spec=in_8_bits(found.spec, ranks))
            return three_drafts(Drafting(own, "llvm", ranks), *prompt)

    torch.testing.assert_close(torch.cat(on_ranks(2, logits), 1), logits(OneRank()), atol=1e-3, rtol=1e-3)


def test_memory_plan_counts_the_copy():
    head, spec = head_of("qwen3.6-35b-a3b"), spec_of("qwen3.6-35b-a3b")
    assert head is not None
    config = EngineConfig(max_model_len=64, dtype="bfloat16", device="cpu").sized_for("cpu")
    numerics = replace(choose_numerics(config), backend="triton", device=torch.device("cuda"))
    plans = []
    for own in ("none", "auto"):
        whole = quantized_head(head, spec, replace(config, draft_quantization=own), numerics)
        own_spec = replace(spec, draft_layers=whole.layers)
        plans.append(plan_memory(config, own_spec, numerics, 1 << 40, head=whole))
    assert plans[1].weights - plans[0].weights == 248320 * (2048 + 4)


def test_a_quantized_output_head_is_not_copied():
    numerics = replace(choose_numerics(EngineConfig(device="cpu", dtype="bfloat16")), backend="triton")
    numerics = replace(numerics, device=torch.device("cuda"))
    for form, copies in (("auto", True), ("fp8", False)):
        config = EngineConfig(head_quantization=form)
        target = quantized_at_load(TINY, config, "cuda")
        whole = quantized_head(mtp_spec(TINY), target, config, numerics)
        assert ("head" in (whole.decoder.quantization or {})) == copies
