"""Every GGUF architecture: a model that is read from its GGUF file equals the model it was made of, for `transformers`
too."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.weights import locate_parameters
from runtime.worker.sources import CheckpointSource
from tests.support.models.gguf_export import export, with_stacked_experts
from tests.support.models.gguf_models import DELTA, LONGROPE, MODELS, SMALL
from tests.support.models.runner_driver import Driver
from tests.support.models.specs import changed


def _model(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    for parameter in model.parameters():  # norms and biases are initialised as ones and zeros, which hide mistakes
        torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of the choice of experts
            torch.nn.init.normal_(buffer, std=0.1)
    return model.eval()


def export_model(
    name: str, folder: Path, extra: dict[str, list[float]] | None = None, **options: Any
) -> tuple[PreTrainedModel, Path]:
    """A model of MODELS and its file, which has these tensors besides."""
    arch, kind, config, metadata = MODELS[name]
    model = _model(kind, config)
    tables = {}
    if name == "glm4moe":  # a layer that drafts tokens
        tables = {"blk.3.nextn.enorm.weight": [1.0] * 48, "blk.3.attn_norm.weight": [1.0] * 48}
    if name == "phi3":
        tables = {f"rope_factors_{n}.weight": LONGROPE[f"{n}_factor"] for n in ("long", "short")}
    if arch == "gemma4":  # a quarter of each half of a head is turned
        tables = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}
    tables |= extra or {}
    return model, export(model, arch, folder / "model.gguf", tables=tables, **options, **metadata)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_theexport_model(tmp_path: Path, name: str):
    model, path = export_model(name, tmp_path)
    checkpoint = open_checkpoint(path)
    spec, weight_map = load_spec(checkpoint.config)
    theirs, _ = load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )
    assert spec == theirs
    locate_parameters(spec, weight_map, checkpoint)

    folder = tmp_path / "back"
    folder.mkdir()
    drafting = f"model.layers.{spec.num_layers}."
    names = [own for own in checkpoint.names() if not own.startswith(("blk.", drafting))]
    tensors = {own: checkpoint.tensor(own, torch.float32) for own in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    no_pad = {"pad_token_id": None}  # some families have a default one, beyond these vocabularies
    (folder / "config.json").write_text(json.dumps(checkpoint.config | no_pad))
    for tensor_name, tensor in tensors.items():
        assert checkpoint.shape(tensor_name) == tuple(tensor.shape)
        for dim, size in enumerate(tensor.shape):
            part = Part(dim, size // 3, size - size // 4)
            for source in (checkpoint, open_checkpoint(folder)):
                found = source.tensor(tensor_name, torch.float32, part=part)
                assert torch.equal(found, tensor.narrow(dim, part.start, part.stop - part.start)), (tensor_name, dim)
    if name == "gemma4moe":  # transformers reads experts of this family as one tensor
        save_file(with_stacked_experts(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    back, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(back) is type(model)
    state = back.state_dict()
    for tensor_name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=2e-7)  # norms: (1 + w) - 1
    for length in (12, 40):  # within and beyond a window and the lengths that RoPE was made for
        ids = torch.arange(length).view(1, -1) * 7 % 61
        with torch.no_grad():
            ours, theirs = back(ids).logits, model(ids).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "kind"), [("qwen35", "qwen3_5_text"), ("qwen35moe", "qwen3_5_moe_text"), ("qwen3next", "qwen3_next")]
)
def test_layers_with_the_delta_rule_survive_theexport_model(tmp_path, arch, kind):
    """Its heads stay in the file's order, so the logits are compared."""
    model = _model(kind, DELTA)
    sizes = {"conv_kernel": 4, "state_size": 8, "group_count": 2, "time_step_rank": 6, "inner_size": 96}
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    values = {f"ssm.{name}": size for name, size in sizes.items()} | (counts if "experts" in repr(model) else {})
    values |= {"rope.dimension_count": 4, "rope.freq_base": 10000.0}
    metadata = {f"{arch}.{name}": value for name, value in values.items()}
    path = export(model, arch, tmp_path / "model.gguf", **metadata)
    checkpoint = open_checkpoint(path)
    ours, _ = load_spec(checkpoint.config)
    theirs, _ = load_spec(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    )
    assert isinstance(ours.states, DeltaRuleSpec)
    assert ours.states.tiled == arch.startswith("qwen35")
    assert changed(ours, mixer=tuple(layer.mixer for layer in theirs.layers)) == theirs
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)
    quantized = export(model, arch, tmp_path / "quantized.gguf", block_type="Q8_0", **metadata)
    want = _logits(quantized, tokens, quantization="none")
    assert (_logits(quantized, tokens) - want).norm() <= 1e-3 * want.norm()


def test_glm4_with_sections_has_its_pairs_apart(tmp_path):
    """Converters reorder rows of q and k in models that take images, so the logits are compared."""
    model = _model("glm4", SMALL | {"head_dim": 12})
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    for name, x in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            turned, rest = x.data.unflatten(0, (-1, 12)).split(6, 1)
            x.data = torch.cat((turned[:, ::2], turned[:, 1::2], rest), 1).flatten(0, 1)
    metadata = {"glm4.rope.dimension_count": 6, "glm4.rope.dimension_sections": [1, 1, 1, 0]}
    path = export(model, "glm4", tmp_path / "model.gguf", **metadata)
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)


def test_experts_of_granite_survive_theexport_model(tmp_path):
    """The file's names of experts are not transformers', so the logits are compared."""
    multipliers = {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    config = SMALL | multipliers | {"logits_scaling": 8.0, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = _model("granitemoe", config)
    values = {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    values |= {"expert_count": 4, "expert_used_count": 2}
    metadata = {f"granitemoe.{name}": value for name, value in values.items()}
    path = export(model, "granitemoe", tmp_path / "model.gguf", **metadata)
    tokens = [i * 7 % 61 for i in range(40)]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(_logits(path, tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_0", "MXFP4"])
def test_shared_experts_are_parts_of_their_tensor(tmp_path, block_type):
    """One case has parts that are whole blocks, and the other has parts that begin within a block."""
    for size in (32, 48):
        arch, kind, config, metadata = MODELS["qwen2moe"]
        sizes = {"hidden_size": 64, "moe_intermediate_size": size, "shared_expert_intermediate_size": 2 * size}
        metadata = metadata | {"qwen2moe.expert_feed_forward_length": size}
        path = export(_model(kind, config | sizes), arch, tmp_path / "m.gguf", block_type=block_type, **metadata)
        tokens = [i * 7 % 61 for i in range(40)]
        want = _logits(path, tokens, quantization="none", kernel_backend="torch")
        assert (_logits(path, tokens) - want).norm() <= 1e-3 * want.norm()


def driver_of(path: Path, **settings: Any) -> Driver:
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=64, kv_cache_memory=0.05, **settings)
    return Driver(build_runner(config, CheckpointSource(path)))


def _logits(path: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    driver = driver_of(path, **settings)
    driver.open(0, tokens, room=0)
    return driver.prefill(0, tokens)


class TestSplitFiles:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        export_model("qwen2", tmp_path, parts=3)
        return [tmp_path / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]

    def test_parts_form_one_model(self, parts, tmp_path):
        whole = open_checkpoint(export_model("qwen2", tmp_path)[1])
        split = open_checkpoint(parts[0])
        assert split.config == whole.config
        assert split.names() == whole.names()
        for name in whole.names():
            assert torch.equal(split.tensor(name, torch.float32), whole.tensor(name, torch.float32))

    def test_only_the_name_of_the_first_part_is_accepted(self, parts):
        with pytest.raises(CallboardError, match=r"is part 2 of 3; name the first one, model-00001-of-00003\.gguf"):
            open_checkpoint(parts[1])
        renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
        with pytest.raises(CallboardError, match=r"is part 1 of 3; it must be called \*-00001-of-00003\.gguf"):
            open_checkpoint(renamed)

    def test_parts_that_do_not_belong_together(self, parts):
        parts[2].write_bytes(parts[1].read_bytes())
        with pytest.raises(CallboardError, match=r"00003-of-00003\.gguf: tensor '.*' occurs twice"):
            open_checkpoint(parts[0])
        parts[2].unlink()
        with pytest.raises(CallboardError, match=r"00003-of-00003\.gguf cannot be read: No such file"):
            open_checkpoint(parts[0])
        parts[1].write_bytes(parts[0].read_bytes())
        with pytest.raises(CallboardError, match=r"'.*' occurs twice"):
            open_checkpoint(parts[0])


@pytest.mark.parametrize("block_type", ["Q8_0", "MXFP4"])
def test_quantized_experts_are_sliced_from_their_tensor(tmp_path, block_type):
    wide = {"hidden_size": 64, "moe_intermediate_size": 96}
    arch, kind, config, metadata = MODELS["qwen3moe"]
    metadata = metadata | {"qwen3moe.expert_feed_forward_length": 96}
    path = export(_model(kind, config | wide), arch, tmp_path / "model.gguf", block_type=block_type, **metadata)
    checkpoint = open_checkpoint(path)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    for part in ("gate", "up", "down"):
        for i, expert in enumerate(stored[f"blk.1.ffn_{part}_exps.weight"]):
            name = f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"
            assert checkpoint.type_name(name) == block_type
            assert checkpoint.shape(name) == expert.shape
            assert torch.equal(checkpoint.tensor(name, torch.float32), torch.from_numpy(expert))


def test_rotation_of_a_part_of_each_head_is_refused(tmp_path):
    arch, kind, config, metadata = MODELS["qwen2"]
    path = export(_model(kind, config), arch, tmp_path / "model.gguf", **metadata | {"qwen2.rope.dimension_count": 6})
    with pytest.raises(CallboardError, match=r"rope\.dimension_count is 6, a part of a head's 12"):
        open_checkpoint(path)
