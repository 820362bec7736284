"""Quantized weights of all checkpoints on a CPU: the numbers of their files, in the bits of their files."""

from dataclasses import replace

import gguf
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight, dequantize_interleaved
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import select
from runtime.models.linear_maps import LinearMaps, row_order
from runtime.quant.at_load import quantized_at_load
from runtime.quant.held_weight import HeldWeight
from runtime.quant.llvm_format import LlvmFormat
from runtime.quant.model_formats import LAYOUTS, weight_bytes, weight_formats
from runtime.quant.parsers import parse_gguf
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, Location
from tests.models.test_quantized_gguf import Blocks, random_blocks
from tests.support.models.gguf_export import export
from tests.support.models.hybrid_engine import SHAPES
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import logits
from tests.support.models.quantized_tensors import CPU, equal, layout_of, random_weight, source_of
from tests.support.models.runner_driver import Driver, open_runner, tiny_runner
from tests.support.models.specs import changed, dense_spec

LLVM = Numerics(torch.float32, CPU, "llvm", packed=False, deterministic=False)
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8, "MXFP4": 4}
SPEC = dense_spec(
    num_layers=1, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=256, vocab_size=131,
    max_positions=64, norm_eps=1e-5,
)  # fmt: skip


def gguf_scheme(kind: str) -> QuantizationScheme:
    scheme = parse_gguf({"types": {"a.weight": kind}})("", "a")
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("kind", BITS)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 999))
def test_gguf_types_keep_their_numbers_and_bits(kind, rows, blocks, seed):
    blocks *= 1 if kind.endswith("K") else 2
    raw = random_blocks(kind, rows, blocks, seed)
    want = torch.from_numpy(quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    layout = LAYOUTS[f"gguf {kind}"](gguf_scheme(kind))
    shape = tuple(want.shape)
    kept = LlvmFormat(layout, layout.encoding(shape), LLVM)
    weight = kept.operand([kept.read(Blocks(raw), Location("a.weight", shape), LLVM)], rows)
    assert weight.form.bits == BITS[kind]
    assert equal(dequantize_interleaved(weight) + 0.0, want + 0.0)
    assert weight.nbytes == kept.device_bytes(shape, LLVM)
    of_file = -(-rows // 16) * 16 * len(raw[0])
    # Scales of K types have 6 bits in the file and 8 here. Scales of MXFP4 have 8 and 16.
    assert of_file <= weight.nbytes <= (1.06 if kind == "MXFP4" else 1.03) * of_file


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_keep_their_numbers(name):
    layout, products, shape = layout_of(FORMATS[name]), LlvmFormat, (80, 256)
    encoding = layout.encoding(shape)
    if not (products.takes(encoding) and encoding.fits(shape) and products.fits(encoding, shape)):
        assert "int" not in encoding.label or encoding.reordered
        return
    tensors = FORMATS[name].pack(*random_weight(shape))
    source, location = source_of(tensors), Location("q_proj.weight", shape)
    kept = LlvmFormat(layout, encoding, LLVM)
    weight = kept.operand([kept.read(source, location, LLVM)], shape[0])
    assert weight.form.bits == encoding.bits
    assert weight.nbytes <= kept.device_bytes(shape, LLVM)
    assert torch.equal(
        dequantize_interleaved(weight), encoding.dequantize(layout.read(source, location, CPU), torch.float32)
    )
    if not encoding.has_zero_points and name != "bnb-int8" and "nvfp4" not in name:
        assert weight.form.scale_dtype != torch.float32


@pytest.mark.parametrize(("encoding", "bits"), [("int4", 4.5), ("int8", 8.1)])
def test_weights_quantized_at_load_have_short_scales(encoding, bits):
    spec = quantized_at_load(SPEC, EngineConfig(quantization=encoding), "cpu")
    kept = weight_formats(spec, LLVM)("layers.0.q.weight")
    dense = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    weight = kept.operand([kept.encode(dense)], 256)
    assert weight.nbytes == kept.device_bytes((256, 256), LLVM) <= bits / 8 * dense.numel()
    assert torch.equal(
        dequantize_interleaved(weight), kept.encoding.dequantize(kept.encoding.encode(dense), torch.float32)
    )
    assert (dequantize_interleaved(weight) - dense).norm() / dense.norm() < {"int4": 0.1, "int8": 0.01}[encoding]
    assert weight_formats(spec, LLVM)("head").name == "int8 rows"


def maps_of(spec: DecoderSpec) -> tuple[LinearMaps, dict[str, torch.Tensor]]:
    """The maps of random weights, and the numbers of each weight in the order of the checkpoint."""
    format_of, dense = weight_formats(spec, LLVM), dict[str, torch.Tensor]()

    def read(name: str, part: object = None) -> HeldWeight:
        drawn = torch.randn(spec.shapes()[name], generator=torch.Generator().manual_seed(len(name)))
        kept = format_of(name)
        weight = HeldWeight((name,), kept, kept.encode(drawn))
        dense[name] = kept.dense(weight.operand)
        return weight

    return LinearMaps(spec, select(LLVM, spec), format_of, read), dense


@pytest.mark.parametrize("rope", [RopeSpec(), RopeSpec(interleaved=True), RopeSpec(partial=0.5)])
@pytest.mark.parametrize(
    ("kinds", "num_parts"),
    [(("Q4_K", "Q4_K", "Q6_K"), 2), (("Q5_0", "Q5_0", "Q8_0"), 2), (("Q4_K", "Q8_0", "Q4_K"), 3), (("Q4_0",) * 3, 1)],
)
def test_parts_of_a_layer_may_differ_in_form(rope, kinds, num_parts):
    names = [f"layers.0.{part}.weight" for part in "qkv"]
    spec = changed(SPEC, rope=rope, quantization=dict(zip(names, map(gguf_scheme, kinds), strict=True)))
    maps, dense = maps_of(spec)
    layer = maps.linear("layers.0.", "qkv")
    assert len(layer.parts) == num_parts
    rows, order = torch.cat([dense[name] for name in names]), row_order(spec, 0, "qkv")
    if order is not None:
        rows[: len(order)] = rows[order]
    assert torch.equal(torch.cat([dequantize_interleaved(part) for part in layer.parts]), rows)
    x = torch.randn(3, 256)
    torch.testing.assert_close(layer.product(x), x @ rows.T, rtol=1e-3, atol=1e-2)


def test_a_dense_part_makes_the_layer_dense():
    schemes = {f"layers.0.{part}.weight": gguf_scheme("Q4_0") for part in ("q", "k", "gate", "up", "down")}
    format_of = weight_formats(replace(SPEC, quantization=schemes), LLVM)
    assert not any(isinstance(format_of(f"layers.0.{part}.weight"), LlvmFormat) for part in "qkv")
    assert format_of("layers.0.v.weight") is DENSE
    assert isinstance(format_of("layers.0.down.weight"), LlvmFormat)


@pytest.mark.parametrize("dense_shared", [False, True])
def test_experts_may_differ_in_form(dense_shared):
    kinds = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}
    spec = changed(SPEC, experts=ExpertsSpec(3, 2, normalized=True, shared=1))
    schemes = {
        f"layers.0.experts.{e}.{part}.weight": gguf_scheme("Q8_0" if e == 3 else kind)
        for e in range(4)
        for part, kind in kinds.items()
    }
    if dense_shared:
        schemes = {name: scheme for name, scheme in schemes.items() if ".experts.3." not in name}
    maps, dense = maps_of(replace(spec, quantization=schemes))
    mixture = maps.experts("layers.0.", spec.experts)
    x = torch.randn(5, 256)
    for index, (gate_up, down) in enumerate(zip(mixture.gate_up.layers, mixture.down.layers, strict=True)):
        prefix = f"layers.0.experts.{index}."
        rows = torch.cat((dense[f"{prefix}gate.weight"], dense[f"{prefix}up.weight"]))
        torch.testing.assert_close(gate_up.product(x), x @ rows.T, rtol=1e-3, atol=2e-2)
        torch.testing.assert_close(down.product(x), x @ dense[f"{prefix}down.weight"].T, rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_stays_quantized(tmp_path, tied):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 101}
    config = LlamaConfig(**sizes, hidden_size=64, intermediate_size=96, num_hidden_layers=2, tie_word_embeddings=tied)
    torch.manual_seed(0)
    path = export(LlamaForCausalLM(config), "llama", tmp_path / "model.gguf", block_type="Q8_0")
    runner, dense = open_runner(path), open_runner(path, quantization="none")
    decoder = runner.decoder
    assert isinstance(decoder.embed, InterleavedWeight)
    assert torch.equal(decoder.embed_tokens(torch.arange(101), 1.0), dense.decoder.embed)
    assert (decoder.head.parts[0] is decoder.embed) == tied
    assert isinstance(dense.decoder.embed, torch.Tensor)
    torch.testing.assert_close(logits(runner), logits(dense), rtol=1e-3, atol=1e-3)
    assert runner.memory.weights < 1.2 * path.stat().st_size
    assert runner.memory.weights == weight_bytes(decoder.spec, runner.numerics)


def test_the_head_in_leaves_is_a_second_copy():
    spec = replace(SPEC, tied_head=True, quantization={"embed": gguf_scheme("Q8_0")})
    whole, in_leaves = (weight_bytes(spec, replace(LLVM, rank_invariant=each)) for each in (False, True))
    assert in_leaves - whole == weight_formats(spec, LLVM)("embed").device_bytes((131, 256), LLVM)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_have_quantized_weights_too(dtype):
    spec = changed(SPEC, num_layers=2, max_positions=256)
    wide, narrow = (tiny_runner(spec, quantization="int8", dtype=each) for each in ("float32", dtype))
    assert narrow.info.weight_formats == wide.info.weight_formats == "int8 rows"
    found = []
    for runner in (wide, narrow):
        driver = Driver(runner)
        driver.open(0, list(range(40, 70)))
        found.append(driver.prefill(0, list(range(40, 70))).float())
    assert (found[1] - found[0]).norm() / found[0].norm() < 0.03


def test_embeddings_of_layers_become_int8():
    """They are half of the weights of Gemma 4 E2B."""
    spec = changed(SHAPES, hidden_size=64, ffn_size=96, embed_size=32)
    runner, plain = (tiny_runner(spec, quantization=kind, kernel_backend="llvm") for kind in ("int8", "none"))
    saved = plain.memory.weights - runner.memory.weights
    assert saved > 2.9 * spec.vocab_size * spec.num_layers * 32
    ids = torch.tensor([5, 0, 130])
    got, want = (each.decoder.layer_embed.lookup(ids, 2.0).clone() for each in (runner, plain))
    assert 0 < (got - want).abs().max() < 0.01 * want.abs().max()
