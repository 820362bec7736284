"""The GGUF reader: values, dequantisation, and files that are not in order."""

import math
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import read_gguf_model
from runtime.text.tokenizer import Tokenizer
from tests.support.cpu_time import reference_s


def test_metadata_equals_the_reference_reader(write_tiny_gguf):
    path = write_tiny_gguf(a__bool=True, a__list=[1.5, 2.5], an__int=7, text="ünï")
    reference = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert GgufFile(path).metadata == reference


def test_tensors_are_the_stored_ones(write_tiny_gguf):
    path = write_tiny_gguf()
    checkpoint = open_checkpoint(path)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    same = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }
    for source, name in same.items():
        np.testing.assert_array_equal(checkpoint.tensor(name, torch.float32).numpy(), stored[source])
        assert checkpoint.shape(name) == stored[source].shape
    for source, name, heads in (("attn_q", "q_proj", 2), ("attn_k", "k_proj", 1)):
        ours = checkpoint.tensor(f"model.layers.0.self_attn.{name}.weight", torch.float32).numpy()
        np.testing.assert_array_equal(_permuted(ours, heads), stored[f"blk.0.{source}.weight"])
    assert len(checkpoint.names()) == len(same) + 2


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The permutation of q and k by llama.cpp's converter: LlamaModel.permute in convert_hf_to_gguf.py."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def test_bfloat16_is_the_rounded_float32(write_tiny_gguf):
    checkpoint = open_checkpoint(write_tiny_gguf())
    for name in checkpoint.names():
        whole = checkpoint.tensor(name, torch.float32)
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), whole.to(torch.bfloat16))


def test_config(write_tiny_gguf):
    config = open_checkpoint(write_tiny_gguf()).config
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["rope_theta"], config["vocab_size"]) == (16, 10000.0, 262)
    assert config["rope_scaling"] == {"rope_type": "default"}


def test_untied_head_and_biases(write_tiny_gguf):
    bias = np.arange(32, dtype=np.float32)
    path = write_tiny_gguf(
        {
            "output.weight": np.ones((262, 32), np.float32),
            "blk.0.attn_q.bias": bias,
            "blk.0.ffn_up.bias": np.ones(64, np.float32),
        }
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is checkpoint.config["mlp_bias"] is True
    assert checkpoint.shape("lm_head.weight") == (262, 32)
    ours = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias", torch.float32).numpy()
    np.testing.assert_array_equal(_permuted(ours, 2), bias)


def test_llama3_rope_scaling_is_found_in_its_table(write_tiny_gguf):
    # Llama 3.2: factor 32, as transformers' _compute_llama3_parameters divides the frequencies.
    theta, dim, factor, original = 500000.0, 16, 32.0, 8192
    divisors = []
    for i in range(0, dim, 2):
        wavelen = 2 * math.pi * theta ** (i / dim)
        if wavelen > original / 1.0:
            divisors.append(factor)
        elif wavelen < original / 4.0:
            divisors.append(1.0)
        else:
            smooth = (original / wavelen - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(divisors)) >= 3
    table = np.array(divisors, np.float32)
    config = open_checkpoint(write_tiny_gguf({"rope_freqs.weight": table}, llama__rope__freq_base=theta)).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    table[0] = 5
    with pytest.raises(CallboardError, match=r"rope_freqs\.weight is not Llama 3's"):
        open_checkpoint(write_tiny_gguf({"rope_freqs.weight": table}, llama__rope__freq_base=theta))


def test_rope_table_is_compared_with_a_stated_size_first(write_tiny_gguf):
    """The stated size would take gigabytes."""
    table, size = np.full(8, 2, np.float32), 1 << 24
    sizes = {"llama__attention__key_length": size, "llama__rope__dimension_count": size}
    tracemalloc.start()
    with pytest.raises(CallboardError, match=r"rope_freqs\.weight is not Llama 3's"):
        read_gguf_model(GgufFile(write_tiny_gguf({"rope_freqs.weight": table}, **sizes)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size


@pytest.mark.parametrize("number", ["00", "9" * 5000, "\N{ARABIC-INDIC DIGIT ZERO}"])
def test_layers_have_plain_numbers(write_tiny_gguf, number):
    name = f"blk.{number}.attn_q.bias"
    assert name in read_gguf_model(GgufFile(write_tiny_gguf({name: np.ones(32, np.float32)}))).sources  # unused


def test_fingerprints_differ_by_weights(write_tiny_gguf, tmp_path):
    path = write_tiny_gguf()
    first = open_checkpoint(path).fingerprint
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(path.read_bytes())
    assert open_checkpoint(copy).fingerprint == first
    other = write_tiny_gguf({"output.weight": np.ones((262, 32), np.float32)}, name="other.gguf")
    theta = write_tiny_gguf(name="theta.gguf", llama__rope__freq_base=5e5)
    assert len({first, open_checkpoint(other).fingerprint, open_checkpoint(theta).fingerprint}) == 3
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert open_checkpoint(copy).fingerprint != first


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "'mamba' model; .* supported: llama"),
        ({"llama__block_count": None}, "no metadata key 'llama.block_count'"),
        ({"llama__block_count": "one"}, "llama.block_count is 'one', a str; a int is needed"),
        ({"llama__attention__head_count": 0}, "head_count is 0; it must be at least 1"),
        ({"llama__rope__scaling__type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ({"llama__expert_count": 8}, "no metadata key 'llama.expert_used_count'"),
        ({"split__count": 2, "split__no": 0}, r"is part 1 of 2; it must be called \*-00001-of-00002\.gguf"),
    ],
)
def test_models_that_are_not_supported(write_tiny_gguf, metadata, message):
    with pytest.raises(CallboardError, match=message):
        open_checkpoint(write_tiny_gguf(**metadata))


def test_a_missing_tensor_is_named(write_tiny_gguf):
    with pytest.raises(CallboardError, match=r"no tensor 'lm_head\.weight'"):
        open_checkpoint(write_tiny_gguf()).tensor("lm_head.weight", torch.float32)


def _file(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "cut off"),
        ([b"PK\x03\x04", bytes(40)], "no GGUF file"),
        ([b"GGUF", struct.pack(">IQQ", 3, 0, 0)], "big-endian"),
        ([b"GGUF", struct.pack("<IQQ", 1, 0, 0)], "version 1"),
        ([b"GGUF", struct.pack("<IQQ", 3, 1 << 60, 0)], "announces 1152921504606846976 tensors"),
        ([b"GGUF", struct.pack("<IQQ", 3, 0, 1 << 60)], "announces 1152921504606846976 metadata entries"),
        ([b"GGUF", struct.pack("<IQQQ", 3, 0, 1, 1 << 60), bytes(99)], "string of 1152921504606846976 bytes"),
        ([b"GGUF", struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60)], "'k' announces .* strings"),
        ([b"GGUF", struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 60)], "'k' announces .* numbers"),
        ([b"GGUF", struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1)], "'k' is an array of type 9"),
        ([b"GGUF", struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77)], "'k' has the unknown type 77"),
        ([b"GGUF", struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"k", 8, 1, b"\xff")], "'k' has text that is not UTF-8"),
        ([b"GGUF", struct.pack("<IQQQ1sIQ3s", 3, 0, 1, 1, b"k", 8, 40, b"abc")], "'k' .* 40 bytes where 3 are left"),
        ([b"GGUF", struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 99, 0)], "'t' has the type number 99,"),
        ([b"GGUF", struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 26, 0)], "'t' has the type number 26, .* IQ4_XS"),
        ([b"GGUF", struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 2, 0)], "'t' .* Q4_0 blocks of 32 cannot fill"),
        ([b"GGUF", struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 1 << 62, 0, 0)], "'t' should lie at .* cut off"),
        ([b"GGUF", struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 9, 8, 0, 0)], "'t' has 9 dimensions"),
    ],
)
def test_damaged_headers(tmp_path, parts, message):
    with pytest.raises(CallboardError, match=message) as caught:
        GgufFile(_file(tmp_path / "bad.gguf", *parts))
    assert "bad.gguf" in str(caught.value)


def _load_all(path: Path) -> None:
    """Read all metadata and tensors; only CallboardError may be raised, and little memory be used."""
    tracemalloc.start()
    message = ""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.tensor(name, torch.float32)
        Tokenizer.load(path)
    except CallboardError as e:
        message = str(e)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not message or (str(path) in message and "\n" not in message)
    assert peak < 20 << 20


_FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_FUZZ
@given(data=st.data())
def test_truncated_anywhere(write_tiny_gguf, data):
    path = write_tiny_gguf()
    end = max(t.offset + t.nbytes for t in GgufFile(path).tensors.values())
    cut = path.with_name("short.gguf")
    cut.write_bytes(path.read_bytes()[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(CallboardError, match=r"short\.gguf: .* cut off"):
        open_checkpoint(cut)


@_FUZZ
@given(data=st.data())
def test_flipped_bytes(write_tiny_gguf, data):
    path = write_tiny_gguf()
    content = bytearray(path.read_bytes())
    header_len = min(t.offset for t in GgufFile(path).tensors.values())
    for at in data.draw(st.lists(st.integers(0, header_len - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(content)
    _load_all(damaged)


def test_smollm2(smollm2_path):
    start = time.process_time()
    file = GgufFile(smollm2_path)
    assert time.process_time() - start < 100 * reference_s()  # usually 3; the gguf package's reader takes 280
    model = read_gguf_model(file)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "stored_out_bias": False,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {"rope_type": "default"},
        "bos_token_id": 1,
        "eos_token_id": [2, 0],  # <|im_end|>, <|endoftext|>
    }
    stated = model.config.pop("quantization_config")
    assert (stated["quant_method"], len(stated["types"])) == ("gguf", 211)
    assert model.config == expected
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.eos_token_ids == (2, 0)
    assert len(checkpoint.names()) == 272
    assert sum(math.prod(checkpoint.shape(n)) for n in checkpoint.names()) == 134_515_008
    for name in checkpoint.names():
        info = model.sources[name].tensor
        raw = file.raw(info.name)
        stored = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.type_name]).reshape(info.shape)
        ours = checkpoint.tensor(name, torch.float32).numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            ours = _permuted(ours, 9 if "q_proj" in name else 3)
        np.testing.assert_array_equal(ours, stored)
