"""Quantized weights that are unpacked and widened on a GPU have the bits that a CPU gives them."""

import gguf
import pytest
import torch
from safetensors.torch import save_file

from runtime.kernels.numerics import Numerics
from runtime.loading.checkpoint import open_checkpoint
from runtime.quant.format import Location
from runtime.quant.formats import LAYOUTS
from runtime.quant.gguf import parse
from runtime.quant.quantized import Widened
from tests.models.test_quantized_gguf import FORMS as GGUF_FORMS
from tests.models.test_quantized_gguf import random_blocks
from tests.models.test_quantized_layouts import equal, layout_of, random_weight
from tests.support.quantized import FORMATS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

SHAPE = (264, 1024)


def both(layout, source, location: Location) -> list[torch.Tensor]:
    widened = Widened(layout, layout.form(location.shape))
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

    scheme = parse({"types": {"a.weight": name}})("", "a")
    got, want = both(LAYOUTS[scheme.layout](scheme), Source(), Location("a.weight", (264, 4 * columns)))
    assert equal(got, want)
