"""Weight formats: a format made up here runs like the formats of the tree, and ranks read their parts of a
checkpoint."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Sharding, parts_of, sharding_of
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.inspection import model_report
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.weights import draw, locate_parameters, random_parameter
from runtime.quant import METHODS
from runtime.quant.checkpoint_layouts import OneByOne
from runtime.quant.encodings import ENCODINGS, Encoding, Integer8
from runtime.quant.model_formats import LAYOUTS, check_products, weight_bytes, weight_formats
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE
from runtime.text.tokenizer import Tokenizer
from tests.support.models.plain_format import PlainFormat
from tests.support.models.runner_driver import TINY, Driver, open_runner, tiny_runner
from tests.support.models.specs import changed, dense_spec, field_of

FLOAT32 = Numerics(torch.float32, torch.device("cpu"), "torch", packed=False, deterministic=False)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mixtral": LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": LLAMA | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "olmo2": LLAMA | {"architectures": ["Olmo2ForCausalLM"]},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 6,
        "n_positions": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8Rows(Integer8):
    """A byte for each weight and a scale for each row."""


class Int8Format(PlainFormat):
    """The format of those codes alone."""

    @staticmethod
    def takes(encoding: Encoding) -> bool:
        return isinstance(encoding, Int8Rows)


INT8_ROWS = Int8Rows("made-up")
SCHEME = QuantizationScheme("made-up", "made-up")
QUANTIZATION = {"quant_method": "made-up", "keep": "head"}


@pytest.fixture(autouse=True)
def _made_up_method(monkeypatch):
    def parse(config):
        return lambda parameter, module: None if parameter == config["keep"] else SCHEME

    monkeypatch.setitem(METHODS, "made-up", parse)
    monkeypatch.setitem(LAYOUTS, "made-up", OneByOne)
    monkeypatch.setitem(ENCODINGS, "made-up", INT8_ROWS)
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: Int8Format)


def dense_weights(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: random_parameter(name, shape, generator) for name, shape in spec.shapes().items()}


def write_checkpoints(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """A model in the made-up format, and the same values as a dense one."""
    spec, weight_map = load_spec(config | {"quantization_config": QUANTIZATION})
    quantized, dense, format_of = {}, {}, weight_formats(spec, FLOAT32)
    for parameter, name in weight_map.names_of(spec).items():
        dense[name] = dense_weights(spec)[parameter]
        if format_of(parameter).name == INT8_ROWS.name:
            codes, scale = INT8_ROWS.encode(dense[name])
            quantized |= {name: codes, f"{name}_scale": scale}
            dense[name] = codes * scale
        else:
            quantized[name] = dense[name]
    folders = folder / "quantized", folder / "dense"
    for path, tensors, added in zip(
        folders, (quantized, dense), ({"quantization_config": QUANTIZATION}, {}), strict=True
    ):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | added))
    return folders


def logits(runner) -> torch.Tensor:
    driver = Driver(runner)
    driver.open(0, list(range(40, 70)))
    return driver.prefill(0, list(range(40, 70)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "phi"])
def test_a_made_up_format_runs_like_its_dense_weights(tmp_path, family, deterministic):
    quantized, dense = write_checkpoints(tmp_path, CONFIGS[family])
    runner = open_runner(quantized, deterministic=deterministic)
    want = logits(open_runner(dense, deterministic=deterministic))
    torch.testing.assert_close(logits(runner), want, atol=1e-4, rtol=1e-4)
    assert runner.info.weight_formats == "made-up rows, dense"


def test_memory_is_planned_for_weights_as_read(tmp_path):
    quantized, _ = write_checkpoints(tmp_path, LLAMA)
    checkpoint = open_checkpoint(quantized)
    spec, weight_map = load_spec(checkpoint.config)
    formats, locations = weight_formats(spec, FLOAT32), locate_parameters(spec, weight_map, checkpoint)
    read = [formats(name).read(checkpoint, location, FLOAT32) for name, location in locations.items()]
    size = sum(tensor.nbytes for weight in read for tensor in weight)
    assert weight_bytes(spec, FLOAT32) == size < 0.6 * weight_bytes(replace(spec, quantization=None), FLOAT32)
    assert open_runner(quantized).memory.weights == size
    assert size == sum(tensor.nbytes for tensor in load_file(quantized / "model.safetensors").values())


def test_random_weights_equal_dense_ones_quantized():
    linears = [name for name in TINY.shapes() if name.endswith(".weight")]
    spec = replace(TINY, quantization=dict.fromkeys(linears, SCHEME))
    runner = tiny_runner(spec)
    assert runner.info.weight_formats == "made-up rows, dense"
    assert runner.memory.weights == weight_bytes(spec, runner.numerics) < tiny_runner().memory.weights
    torch.testing.assert_close(logits(runner), logits(tiny_runner()), atol=0.2, rtol=0.1)


def test_inspect_names_the_format(tmp_path, write_tiny_gguf):
    folder, _ = write_checkpoints(tmp_path, LLAMA)
    Tokenizer.load(write_tiny_gguf())._backend.save(str(folder / "tokenizer.json"))
    report = model_report(EngineConfig(model=str(folder), device="cpu"))
    assert "14 I8" in report
    assert "\nweights        14 maps in made-up rows: 0.00 GiB\n" in report
    assert "\n               embed, head, norms and biases are plain numbers in the checkpoint\n" in report
    spec, _ = load_spec(open_checkpoint(folder).config)
    assert f"weights {weight_bytes(spec, FLOAT32) / (1 << 30):.2f} GiB" in report


def test_unknown_tensors_are_refused_before_any_is_read(tmp_path):
    quantized, dense = write_checkpoints(tmp_path, LLAMA)
    name = "model.layers.1.self_attn.k_proj.weight"

    def refusal(folder: Path, changed: dict[str, torch.Tensor | None]) -> str:
        tensors = load_file(folder / "model.safetensors") | changed
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        save_file({n: t for n, t in tensors.items() if t is not None}, other / "model.safetensors")
        (other / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(CallboardError) as error:
            open_runner(other)
        return str(error.value)

    assert f"lacks tensor {name}_scale; its config asks for shape [16, 1]" in refusal(
        quantized, {f"{name}_scale": None}
    )
    wrong = torch.zeros(16, 48)
    assert f"{name} is stored as F32, which made-up rows weights are not (int8)" in refusal(quantized, {name: wrong})
    for dtype, stored in ((torch.int8, "I8"), (torch.bool, "BOOL"), (torch.int64, "I64"), (torch.uint8, "U8")):
        message = refusal(dense, {name: torch.zeros(16, 48).to(dtype)})
        assert f"{name} is stored as {stored}, which dense weights are not (bfloat16, float16, float32" in message
        assert message.endswith("name its quantization in the checkpoint's config.json.")
    message = refusal(dense, {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    assert "model.norm.weight is stored as I8" in message


def test_every_parameter_has_a_sharding_rule():
    mixtral, _ = load_spec(CONFIGS["mixtral"])
    names = {
        "embed": Sharding.VOCABULARY, "head": Sharding.VOCABULARY, "final_norm": Sharding.REPLICATED,
        "positions": Sharding.REPLICATED, "layers.1.q_norm": Sharding.REPLICATED,
        "layers.1.k_heads_norm": Sharding.COLUMN,
        "layers.0.attn_norm_bias": Sharding.REPLICATED, "layers.0.router.weight": Sharding.REPLICATED,
        "layers.0.k.weight": Sharding.COLUMN, "layers.0.k.bias": Sharding.COLUMN, "layers.0.out.weight": Sharding.ROW,
        "layers.0.out.bias": Sharding.REPLICATED, "layers.0.down.weight": Sharding.ROW,
        "layers.2.experts.3.down.weight": Sharding.EXPERT_INNER, "layers.2.experts.3.up.weight": Sharding.EXPERT_INNER,
    }  # fmt: skip
    assert {name: sharding_of(name) for name in names} == names
    refusal = "tensor_parallel_size is 3, which does not divide the model's 6 heads, 2 of keys.*; it can be 1, 2, 6."
    with pytest.raises(CallboardError, match=refusal):
        mixtral.of_rank(Shard(0, 3))


def test_ranks_have_every_head_token_and_its_keys():
    """This holds for fewer KV heads than ranks, and for a number of tokens that does not divide."""
    spec = dense_spec(
        num_layers=1, hidden_size=96, num_heads=16, num_kv_heads=4, head_dim=8, ffn_size=64, vocab_size=32000,
        max_positions=64, norm_eps=1e-6, fused_qkv=True, fused_gate_up=True,
    )  # fmt: skip
    for size, shares in ((2, {16000}), (4, {8000}), (8, {4000}), (16, {2000})):
        ranks = [spec.of_rank(Shard(rank, size)) for rank in range(size)]
        assert {rank.vocab_size for rank in ranks} == shares
        for rank, own in enumerate(ranks):
            q, k, v = parts_of(own, "layers.0.qkv.weight")
            heads = range(q.start // 8, q.stop // 8)
            assert heads == range(rank * 16 // size, (rank + 1) * 16 // size)
            assert {head // 4 for head in heads} == set(range((k.start - 128) // 8, (k.stop - 128) // 8))
            assert (v.start - k.start, v.stop - k.stop) == (32, 32)
    thirds = [changed(spec, num_heads=9, num_kv_heads=3, ffn_size=1536).of_rank(Shard(rank, 3)) for rank in range(3)]
    assert [(own.num_heads, field_of(own, "num_kv_heads"), own.ffn.size) for own in thirds] == [(3, 1, 512)] * 3
    assert [own.token_ids for own in thirds] == [range(10667), range(10667, 21334), range(21334, 32000)]
    nested = [[spec.of_rank(Shard(r, size)).token_ids for r in range(size)] for size in (2, 8)]
    odd = [Shard(rank, 4).vocabulary(101) for rank in range(4)]
    assert [len(rows) for rows in odd] == [26, 26, 26, 23]
    assert [rows.stop for rows in nested[0]] == [nested[1][3].stop, nested[1][7].stop]


@pytest.mark.parametrize("family", CONFIGS)
def test_parts_that_ranks_read_form_the_whole(tmp_path, family):
    """Dense weights, stored as the families do: biases, experts, fused maps, and maps stored as (in, out)."""
    config = CONFIGS[family] | {"vocab_size": 104}
    spec, weight_map = load_spec(config)
    tensors = {}
    for parameter, name in weight_map.names_of(spec).items():
        dense = dense_weights(spec)[parameter]
        transposed = weight_map.transposed and parameter.endswith(".weight")
        tensors[name] = (dense.t() if transposed else dense).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    whole = locate_parameters(spec, weight_map, checkpoint)
    ranks = [locate_parameters(spec.of_rank(Shard(rank, 2)), weight_map, checkpoint) for rank in range(2)]
    for parameter, expected in dense_weights(spec).items():
        assert torch.equal(DENSE.read(checkpoint, whole[parameter], FLOAT32)[0], expected)
        read = [DENSE.read(checkpoint, locations[parameter], FLOAT32)[0] for locations in ranks]
        if not (parts := ranks[0][parameter].parts):
            assert sharding_of(parameter) is Sharding.REPLICATED
            assert all(torch.equal(tensor, expected) for tensor in read)
            continue
        # A rank holds some heads of each of q, k and v in one tensor, so it reads one piece for each part.
        pieces = [tensor.split([p.stop - p.start for p in parts], parts[0].dim) for tensor in read]
        order = [piece for same in zip(*pieces, strict=True) for piece in same]
        assert torch.equal(torch.cat(order, parts[0].dim), expected), parameter
        assert all(2 * tensor.numel() == expected.numel() for tensor in read)


def test_weights_that_cannot_be_split_are_refused_unread(monkeypatch):
    monkeypatch.setattr(Int8Format, "fits", lambda form, shape: shape[1] % 24 == 0)
    spec, _ = load_spec(LLAMA | {"quantization_config": QUANTIZATION})
    says = r"tensor_parallel_size is 2, but a rank's \[48, 36\] of layers.0.down.weight cannot be made-up rows;"
    with pytest.raises(CallboardError, match=says):
        check_products(spec.of_rank(Shard(1, 2)), FLOAT32, EngineConfig())
    check_products(changed(spec, ffn_size=96).of_rank(Shard(1, 2)), FLOAT32, EngineConfig())


def test_random_weights_of_ranks_are_parts_of_one_model():
    spec = changed(TINY, num_heads=4, num_kv_heads=2)
    read_whole = draw(spec, FLOAT32, 3)
    whole = {name: read_whole(name).dense for name in spec.shapes()}
    for rank in range(4):
        own = spec.of_rank(Shard(rank, 4))
        read = draw(own, FLOAT32, 3)
        for name, shape in own.shapes().items():
            weight = read(name).dense
            assert weight.shape == shape
            assert torch.equal(weight, DENSE.encode(whole[name], parts_of(own, name))[0])


def test_a_format_gives_a_rank_its_part_of_every_tensor(tmp_path):
    quantized, _ = write_checkpoints(tmp_path, LLAMA | {"vocab_size": 104})
    checkpoint = open_checkpoint(quantized)
    spec, weight_map = load_spec(checkpoint.config)
    whole = locate_parameters(spec, weight_map, checkpoint)
    for name, dim in (("layers.0.gate.weight", 0), ("layers.1.down.weight", 1)):
        made_up = weight_formats(spec, FLOAT32)(name)
        codes, scale = made_up.read(checkpoint, whole[name], FLOAT32)
        for rank in range(2):
            location = locate_parameters(spec.of_rank(Shard(rank, 2)), weight_map, checkpoint)[name]
            part_codes, part_scale = made_up.read(checkpoint, location, FLOAT32)
            assert torch.equal(part_codes, codes.chunk(2, dim)[rank])
            assert torch.equal(part_scale, scale.chunk(2)[rank] if dim == 0 else scale)
