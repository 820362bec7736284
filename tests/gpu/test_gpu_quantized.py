"""Quantized weights that are unpacked and widened on a GPU have the bits that a CPU gives them."""

import gguf
import pytest
import torch
from safetensors.torch import save_file

from runtime.base.config import EngineConfig
from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.models import load_spec
from runtime.models.decoder_build import load_decoder
from runtime.quant.at_load import GROUPS, quantized_at_load
from runtime.quant.model_formats import LAYOUTS, backend_format, encodings_at_load, weight_bytes
from runtime.quant.parsers import parse_gguf
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import Location
from tests.models.test_quantized_gguf import FORMS as GGUF_FORMS
from tests.models.test_quantized_gguf import random_blocks
from tests.support.models.plain_format import PlainFormat
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_models import LLAMA, logits
from tests.support.models.quantized_tensors import Tensors, equal, layout_of, random_weight
from tests.support.models.runner_driver import TINY, tiny_runner
from tests.support.models.specs import changed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SHAPE = (264, 1024)


def both(layout, source, location: Location) -> list[torch.Tensor]:
    widened = DequantizedFormat(layout, layout.encoding(location.shape))
    devices = torch.device("cpu"), torch.device("cuda")
    numerics = [Numerics(torch.bfloat16, device, "torch", packed=False, deterministic=False) for device in devices]
    return [widened.read(source, location, each)[0].cpu() for each in numerics]


@pytest.mark.parametrize("name", FORMATS)
def test_layouts_of_safetensors(tmp_path, name):
    dense, generator = random_weight(SHAPE)
    tensors = FORMATS[name].pack(dense, generator)
    save_file({f"q_proj.{own}": tensor.contiguous() for own, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    got, want = both(layout_of(FORMATS[name]), open_checkpoint(tmp_path), Location("q_proj.weight", SHAPE))
    assert equal(got, want)


@pytest.mark.parametrize("name", GGUF_FORMS)
def test_blocks_of_gguf(name):
    columns, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = random_blocks(name, 264, 4, 1)

    class Source:
        def blocks(self, _, num_bytes, device, part=None):
            return torch.from_numpy(raw.copy()).view(len(raw), -1, num_bytes).to(device)

    scheme = parse_gguf({"types": {"a.weight": name}})("", "a")
    got, want = both(LAYOUTS[scheme.layout](scheme), Source(), Location("a.weight", (264, 4 * columns)))
    assert equal(got, want)


@pytest.mark.parametrize("form", GROUPS)
def test_plain_weights_are_quantized_as_on_a_cpu(form):
    dense, _ = random_weight((1000, 1024))
    layout = LAYOUTS["plain"](QuantizationScheme("plain", form, group_size=GROUPS[form]))
    source, location = Tensors({"weight": dense.bfloat16()}), Location("weight", (1000, 1024))
    got, want = (layout.read(source, location, torch.device(device)) for device in ("cuda", "cpu"))
    for what, mine, theirs in zip(("codes", "scales"), got, want, strict=True):
        differ = int((mine.cpu().view(torch.uint8) != theirs.view(torch.uint8)).sum())
        assert not differ, f"{differ} of {theirs.nbytes} bytes of the {what}"


@pytest.mark.parametrize("form", GROUPS)
def test_a_load_needs_a_fused_map_beside_the_quantized_model(form):
    numerics = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
    if form not in encodings_at_load(numerics):
        pytest.skip(f"no product with {form} here")
    hidden, ffn = 2048, 8192
    config = LLAMA | {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 8}
    spec, weight_map = load_spec(config | {"num_attention_heads": 16, "num_key_value_heads": 16})
    zeros = {name: torch.zeros(spec.shapes()[parameter]) for parameter, name in weight_map.names_of(spec).items()}
    source = Tensors({name: tensor.bfloat16() for name, tensor in zeros.items()})
    spec = quantized_at_load(spec, EngineConfig(quantization=form))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = load_decoder(source, spec, weight_map, numerics, 64)
    peak, size = torch.cuda.max_memory_allocated() - before, weight_bytes(decoder.spec, numerics)
    assert size < 0.6 * sum(2 * tensor.numel() for tensor in zeros.values())
    pieces = 40 * (1 << 22)  # weights that are quantized at once, in float32 and as indices of a table
    assert peak < size + 2 * 2 * ffn * hidden + pieces


@pytest.mark.parametrize("form", GROUPS)
def test_logits_equal_those_of_dequantized_weights(monkeypatch, form):
    monkeypatch.setattr(
        "runtime.quant.model_formats.backend_format",
        lambda numerics: backend_format(numerics) if numerics.backend == "triton" else PlainFormat,
    )
    spec = changed(TINY, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=512)
    settings = {"device": "cuda", "dtype": "bfloat16", "quantization": form, "head_quantization": "int8"}
    settings |= {"cuda_graphs": False}  # their replays would not show logits
    plain, kernels = (tiny_runner(spec, kernel_backend=backend, **settings) for backend in ("torch", "triton"))
    assert plain.info.weight_formats == kernels.info.weight_formats
    want, got = (logits(runner).float().flatten()[: spec.vocab_size] for runner in (plain, kernels))
    share = 0.1 if form == "fp8" else 0.03  # rows are fp8 there, too
    assert float((got - want).norm()) < share * float(want.norm())
