"""`quantization` of plain checkpoints gives the bits of a checkpoint that was quantized before, within the planned
memory. Impossible settings are refused."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.base.config import EngineConfig
from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError, SamplingParams
from runtime.inspection import check_model, model_report
from runtime.llm import LLM
from runtime.models import load_spec
from runtime.models.decoder_build import load_decoder
from runtime.models.weights import random_parameter
from runtime.quant.at_load import quantized_at_load
from runtime.quant.encodings import ENCODINGS
from runtime.quant.model_formats import LAYOUTS, weight_bytes, weight_formats
from runtime.quant.report import weight_report
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import Location
from runtime.text.tokenizer import Tokenizer
from tests.support.models.plain_format import PlainFormat
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import LLAMA, MIXTRAL, PHI, logits
from tests.support.models.quantized_tensors import CPU, Tensors, equal, numerics, random_weight, source_of
from tests.support.models.runner_driver import TINY, open_runner, tiny_runner

WIDE = {"hidden_size": 96, "intermediate_size": 256}
WHOLE = {"hidden_size": 128, "intermediate_size": 256}
ROWS = {"strategy": "channel", "symmetric": True}
_INT8 = replace(ENCODINGS["int8"], scale_dtype=torch.bfloat16)  # as a CPU quantizes
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}


def _config(file_format: str, **targets: dict) -> dict:
    groups = {name: {"targets": [of], "weights": weights} for name, (of, weights) in targets.items()}
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": groups, "ignore": ["lm_head"]}


CONFIGS = {  # of checkpoints as llm-compressor and bitsandbytes write them
    "fp8": _config("float-quantized", all=("Linear", ROWS | {"num_bits": 8, "type": "float"})),
    "int8": _config("int-quantized", all=("Linear", ROWS | {"num_bits": 8, "type": "int"})),
    "int4": _config("pack-quantized", all=("Linear", GROUPS | {"group_size": 32})),
    "nf4": FORMATS["bnb-nf4"].config,
}


@pytest.fixture(autouse=True)
def _products_with_all(monkeypatch):
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: PlainFormat)


def plain_tensors(config: dict) -> dict[str, torch.Tensor]:
    """By parameter, in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    shapes = load_spec(config)[0].shapes()
    return {name: random_parameter(name, shape, generator).bfloat16() for name, shape in shapes.items()}


def stored(form: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a weight, quantized as at a load, in a checkpoint of CONFIGS."""
    rows = len(weight)
    group, dtype = {"int4": 32, "nf4": 64}.get(form, 0), torch.bfloat16 if form in ("int4", "int8") else torch.float32
    codes, scale = replace(ENCODINGS[form], group_size=group, scale_dtype=dtype).encode(weight)
    match form:
        case "int4":
            words = ((codes.long() & 15) ^ 8).view(rows, -1, 8) << torch.arange(0, 32, 4)
            packed = words.sum(-1).to(torch.uint32).view(torch.int32)
            return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        case "nf4":
            pairs, state = codes.view(-1, 2), {"shape": list(weight.shape), "blocksize": 64}
            return {
                "weight": pairs[:, :1] << 4 | pairs[:, 1:],
                "weight.absmax": scale.flatten(),
                "weight.quant_map": torch.tensor(ENCODINGS["nf4"].table),
                "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
            }
    return {"weight": codes, "weight_scale": scale}


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_both(folder: Path, form: str, config: dict) -> tuple[Path, Path]:
    """A plain checkpoint, and the quantized one that it becomes."""
    names = load_spec(config)[1].names_of(load_spec(config)[0])
    plain, quantized = {}, {}
    for parameter, weight in plain_tensors(config).items():
        name = names[parameter]
        plain[name] = quantized[name] = weight
        if parameter.endswith(".weight") and ".router." not in parameter:
            del quantized[name]
            quantized |= {name.removesuffix("weight") + own: each for own, each in stored(form, weight).items()}
    stated = config | {"quantization_config": CONFIGS[form]}
    return write(folder / "plain", config, plain), write(folder / "quantized", stated, quantized)


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("family", [LLAMA, MIXTRAL, PHI], ids=lambda config: config["architectures"][0])
def test_a_model_has_the_bits_of_a_quantized_checkpoint(tmp_path, form, family):
    plain, quantized = write_both(tmp_path, form, family | (WHOLE if form == "nf4" else WIDE))
    settings = {"dtype": "bfloat16", "head_quantization": "none"}
    got, want = open_runner(plain, quantization=form, **settings), open_runner(quantized, **settings)
    assert got.info.weight_formats == want.info.weight_formats
    assert form in got.info.weight_formats
    assert torch.equal(logits(got), logits(want))
    assert got.memory.weights == want.memory.weights < 0.8 * open_runner(plain, dtype="bfloat16").memory.weights


def test_quantization_is_in_the_fingerprint(tmp_path, monkeypatch):
    """Cached keys and values of another format are never used."""
    plain, quantized = write_both(tmp_path, "fp8", LLAMA)
    monkeypatch.setattr("runtime.worker.runner.multiplies_fp8", lambda device: False)
    asked = [{}, {"quantization": "fp8"}, {"quantization": "int8"}, {"head_quantization": "int8"}]
    prints = [open_runner(plain, **config).info.fingerprint for config in asked]
    prints += [open_runner(quantized, **config).info.fingerprint for config in ({}, {"quantization": "none"})]
    assert len(set(prints)) == 6
    assert open_runner(plain, quantization="none").info.fingerprint == prints[0]
    assert open_runner(quantized, quantization="fp8").info.fingerprint == prints[4]
    monkeypatch.setattr("runtime.worker.runner.multiplies_fp8", lambda device: True)
    assert open_runner(plain).info.fingerprint == prints[0]
    assert open_runner(plain, quantization="fp8").info.fingerprint not in prints


def test_none_dequantizes_a_checkpoint(tmp_path):
    _, quantized = write_both(tmp_path, "int8", LLAMA)
    runner = open_runner(quantized, dtype="bfloat16", quantization="none")
    spec, _ = load_spec(LLAMA)
    assert runner.memory.weights == weight_bytes(spec, runner.numerics)
    assert (
        "dequantized to 0.00 GiB of bfloat16 as quantization is none"
        in weight_report(runner.decoder.spec, runner.numerics)[0]
    )
    # The products of the codes are computed with the same numbers.
    torch.testing.assert_close(logits(runner), logits(open_runner(quantized, dtype="bfloat16")), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_its_own_quantization(tmp_path, tied):
    config = LLAMA | {"tie_word_embeddings": tied}
    plain, _ = write_both(tmp_path, "fp8", config)
    runner = open_runner(plain, dtype="bfloat16", head_quantization="int8")
    codes, scale = _INT8.encode(plain_tensors(config)["embed" if tied else "head"])
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = torch.nn.functional.linear(hidden, (codes * scale).bfloat16())
    assert torch.equal(runner.decoder.head.product(hidden), want)
    assert runner.memory.weights == weight_bytes(runner.decoder.spec, runner.numerics)
    dense = open_runner(plain, dtype="bfloat16")
    more = 101 * 64 + 4 * 101 - (0 if tied else 2 * 101 * 64)
    if tied and dense.numerics.packed:  # a copy, too
        more -= 2 * 101 * 64
    assert runner.memory.weights - dense.memory.weights == more
    assert torch.equal(dense.decoder.embed, runner.decoder.embed)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_cpu_has_an_int8_head_beside_quantized_maps(form):
    def head(config, device="cpu", stored=None):
        return (quantized_at_load(replace(TINY, quantization=stored), config, device).quantization or {}).get("head")

    asked, of_file = EngineConfig(quantization=form), {"head": QuantizationScheme("gptq", form)}
    assert head(asked) == QuantizationScheme("plain", "int8", scale_dtype="bfloat16")
    assert head(asked, stored=of_file) == of_file["head"]
    plain = [replace(asked, head_quantization="none"), EngineConfig(quantization="fp8"), EngineConfig()]
    assert [head(asked, "cuda"), *map(head, plain)] == [None] * 4


def test_ranks_have_parts_of_the_same_quantized_weights():
    """Row scales belong to whole rows, and the columns of a rank are whole groups."""
    weight, _ = random_weight((64, 256))
    source, location = source_of({"weight": weight.bfloat16()}), Location("q_proj.weight", (64, 256))
    spec, _ = load_spec(LLAMA | {"hidden_size": 256})
    for form in CONFIGS:
        schemes = quantized_at_load(spec, EngineConfig(quantization=form, tensor_parallel_size=4)).quantization
        assert schemes["layers.0.out.weight"].group_size == {"int4": 32, "nf4": 32}.get(form, 0)
        assert schemes["layers.0.q.weight"].group_size == {"int4": 128, "nf4": 64}.get(form, 0)
        layout = LAYOUTS["plain"](schemes["layers.0.out.weight"])
        codes, scale = layout.read(source, location, CPU)
        for dim, size in ((0, 16), (1, 64)):
            ranks = [Part(dim, start, start + size) for start in range(0, 4 * size, size)]
            parts = [layout.read(source, location._replace(parts=(part,)), CPU) for part in ranks]
            assert equal(torch.cat([part[0] for part in parts], dim), codes)
            if dim == 0 or form in ("int4", "nf4"):
                assert equal(torch.cat([part[1] for part in parts], dim), scale)
            else:
                assert all(equal(part[1], scale) for part in parts)


class LiveBytes(TorchDispatchMode):
    """The bytes of the tensors that operations have made and that still live: `peak` is the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._living = {key: entry for key, entry in self._living.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()))
        return result


class LateWeight:
    """A weight that a product dequantizes."""

    def __init__(self, kept: PlainFormat, weight: tuple[torch.Tensor, ...]) -> None:
        self.kept, self.weight = kept, weight

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        x, own, *bias = args
        return function(x, own.kept.encoding.dequantize(own.kept.unpacked(own.weight), x.dtype), *bias)


class LateFormat(PlainFormat):
    """Weights stay quantized when they have become layers."""

    def operand(self, pieces, num_rows):
        return LateWeight(self, *pieces)


@pytest.mark.parametrize("form", ["none", *CONFIGS])
def test_a_load_needs_a_fused_map_beside_the_quantized_model(monkeypatch, form):
    hidden, ffn = 256, 1024
    config = LLAMA | {"hidden_size": hidden, "intermediate_size": ffn}
    spec, weight_map = load_spec(config)
    names, tensors = weight_map.names_of(spec), plain_tensors(config)
    source = Tensors({names[parameter]: weight for parameter, weight in tensors.items()})
    spec = quantized_at_load(spec, EngineConfig(quantization=form, head_quantization="int8"))
    monkeypatch.setattr("runtime.quant.encodings._AT_ONCE", 1 << 13)
    monkeypatch.setattr("runtime.quant.model_formats.backend_format", lambda numerics: LateFormat)
    with LiveBytes() as live:
        decoder = load_decoder(source, spec, weight_map, numerics(torch.bfloat16), 8)
    size, fused = weight_bytes(decoder.spec, decoder.numerics), 2 * 2 * ffn * hidden
    assert size < live.peak < size + fused + (1 << 17)


def test_weights_without_a_kernel_stay_plain_and_are_named(tmp_path, monkeypatch, write_tiny_gguf):
    plain, _ = write_both(tmp_path, "fp8", LLAMA)
    monkeypatch.setattr(PlainFormat, "fits", lambda form, shape: shape != (64, 160))
    runner = open_runner(plain, dtype="bfloat16", quantization="fp8", deterministic=True)
    assert runner.info.weight_formats == "fp8 rows, dense"
    assert weight_formats(runner.decoder.spec, runner.numerics)("layers.0.down.weight").name == "dense"
    Tokenizer.load(write_tiny_gguf())._backend.save(str(plain / "tokenizer.json"))
    report = model_report(EngineConfig(model=str(plain), device="cpu", dtype="bfloat16", quantization="fp8"))
    assert "\nweights        12 maps in fp8 rows: 0.00 GiB, quantized as they are read\n" in report
    assert "\n               down stay bfloat16, as this device has no products for their encoding\n" in report
    end = "embed, head, norms and biases stay bfloat16; head_quantization is for the head"
    assert f"\n               {end}\n" in report


def test_random_weights_are_quantized():
    runner = tiny_runner(quantization="int4", dtype="bfloat16")
    assert runner.info.weight_formats == "int4 g32, int8 rows"
    assert runner.memory.weights < tiny_runner(dtype="bfloat16").memory.weights
    other = replace(runner.decoder.spec, quantization=None)
    assert other == TINY


def test_a_checkpoint_of_another_format_is_refused(tmp_path, write_tiny_gguf):
    _, quantized = write_both(tmp_path, "int4", LLAMA | WIDE)
    wanted = (
        "quantization is fp8, but the checkpoint's weights are int4 already; use int4 to keep them, none to dequantize "
        "them, or a checkpoint with weights in bfloat16."
    )
    with pytest.raises(CallboardError) as error:
        open_runner(quantized, quantization="fp8")
    assert str(error.value) == wanted
    Tokenizer.load(write_tiny_gguf())._backend.save(str(quantized / "tokenizer.json"))
    with pytest.raises(CallboardError) as error:
        check_model(EngineConfig(model=str(quantized), quantization="fp8"))
    assert str(error.value) == wanted
    with pytest.raises(
        CallboardError, match="quantization is nf4, but the checkpoint's weights are int4, int8 already"
    ):
        check_model(EngineConfig(model=str(write_tiny_gguf()), quantization="nf4"))
    mixed = dict.fromkeys(("layers.0.q.weight", "layers.0.k.weight"), QuantizationScheme("awq", "int4"))
    spec = replace(
        TINY,
        quantization=mixed
        | {"head": QuantizationScheme("gptq", "int4"), "layers.0.v.weight": QuantizationScheme("fp8", "int8")},
    )
    assert quantized_at_load(spec, EngineConfig(quantization="int4")) == spec
    with pytest.raises(CallboardError, match="quantization is int8, but the checkpoint's weights are int4, int8 "):
        quantized_at_load(spec, EngineConfig(quantization="int8"))
    with pytest.raises(CallboardError, match=r"^head_quantization is fp8, .* are int4 already; use auto to keep them"):
        quantized_at_load(spec, EngineConfig(head_quantization="fp8"))
    config = EngineConfig(draft="d", quantization="int4", draft_quantization="int8").draft_config()
    with pytest.raises(CallboardError, match=r"^draft_quantization is int8, but the checkpoint's weights are int4"):
        quantized_at_load(spec, config, is_draft=True)


def test_a_format_without_a_kernel_here_is_refused(monkeypatch):
    for products, refusal in (
        (lambda numerics: None, "leave it at auto."),
        (
            lambda numerics: PlainFormat if numerics.dtype == torch.bfloat16 else None,
            "use fp8 or int8 or int4 or nf4 with dtype=bfloat16.",
        ),
    ):
        monkeypatch.setattr("runtime.quant.model_formats.backend_format", products)
        for field, form in (("quantization", "nf4"), ("head_quantization", "int8")):
            with pytest.raises(CallboardError) as error:
                tiny_runner(dtype="float32", **{field: form})
            assert str(error.value) == (
                f"{field} is {form}, which has no products in float32 on cpu (llvm kernels); {refusal}"
            )


@pytest.mark.parametrize(("form", "differs"), [("int4", False), ("fp8", True)])
def test_devices_with_and_without_fp8_rows_share_no_blocks(monkeypatch, form, differs):
    prints = set()
    for multiplies in (False, True):
        monkeypatch.setattr("runtime.worker.runner.multiplies_fp8", lambda device, multiplies=multiplies: multiplies)
        prints.add(tiny_runner(dtype="bfloat16", quantization=form).info.fingerprint)
    assert len(prints) == 1 + differs


def test_a_draft_has_its_own_quantization():
    config = EngineConfig(draft="other", quantization="int4", head_quantization="int8", draft_quantization="fp8")
    own = config.draft_config()
    assert (own.quantization, own.head_quantization) == ("fp8", "auto")
    assert EngineConfig(draft="other", quantization="int4").draft_config().quantization == "auto"


def test_a_quantized_draft_changes_no_text(tmp_path, write_tiny_gguf, caplog):
    caplog.set_level(logging.INFO)
    plain, _ = write_both(tmp_path, "fp8", LLAMA | {"vocab_size": 1000})
    Tokenizer.load(write_tiny_gguf())._backend.save(str(plain / "tokenizer.json"))
    params, answers = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), []
    for draft in ({}, {"draft": str(plain), "draft_quantization": "fp8", "num_draft_tokens": 2}):
        llm = LLM(str(plain), dtype="bfloat16", num_kv_blocks=20, **draft)
        answers.append([answer.token_ids for answer in llm.generate([[5, 9, 33], [7, 8]], params)])
    assert answers[0] == answers[1]
    assert llm.engine.scheduler.stats.accepted_draft_tokens > 10
    assert caplog.text.count("14 maps in fp8 rows: 0.00 GiB, quantized as they are read") == 1
