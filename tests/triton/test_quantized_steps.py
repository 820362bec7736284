"""Steps of a decoder with quantized weights: its logits equal products in torch with the same weights."""

from dataclasses import replace

import pytest
import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.quantized.launch_configs import Wna16SkinnyConfig
from runtime.quant.checkpoint_layouts import OneByOne
from runtime.quant.model_formats import LAYOUTS, backend_format
from runtime.quant.scheme import QuantizationScheme
from tests.support.kernels.triton_engine import SPEC
from tests.support.models.plain_format import PlainFormat
from tests.support.models.specs import changed
from tests.triton.test_family_steps import logits

KINDS = {
    "fp8": QuantizationScheme("made-up", "fp8"),
    "int4 with zero points": QuantizationScheme("made-up", "int4", group_size=32, symmetric=False),
    "int8 experts": QuantizationScheme("made-up", "int8"),
    "int8 experts beside a dense one": QuantizationScheme("made-up", "int8"),
}


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [
        ("fp8", False),
        ("int4 with zero points", True),
        ("int8 experts", False),
        ("int8 experts beside a dense one", True),
    ],
)
@pytest.mark.thorough
def test_steps(kind: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch):
    wide = Wna16SkinnyConfig(block_n=128, block_k=128, num_warps=4)
    monkeypatch.setattr("runtime.kernels.quantized.wna16_skinny_gemm.wna16_skinny_config", lambda *arguments: wide)
    monkeypatch.setattr(
        "runtime.quant.model_formats.backend_format",
        lambda numerics: backend_format(numerics) if numerics.backend == "triton" else PlainFormat,
    )
    monkeypatch.setitem(LAYOUTS, "made-up", OneByOne)
    spec = changed(SPEC, num_layers=1, hidden_size=128, ffn_size=192)
    maps = [name for name in spec.shapes() if name.endswith(".weight")]
    if "experts" in kind:
        spec = changed(spec, ffn_size=48, experts=ExpertsSpec(3, 1, True, shared=1, shared_gate=True))
        dense = ".experts.3." if "beside" in kind else "none"
        maps = [name for name in spec.shapes() if ".experts." in name and dense not in name]
    spec = replace(spec, quantization=dict.fromkeys(maps, KINDS[kind]))
    want = logits(spec, "torch", deterministic=False, graphs=False)
    got = logits(spec, "triton", deterministic, graphs=True)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
