"""Readers of quantized weights against the formats' own libraries, bit by bit."""

from collections.abc import Mapping

import pytest
import torch

from runtime.kernels.numerics import Numerics
from runtime.quant import METHODS
from runtime.quant.model_formats import LAYOUTS
from runtime.quant.quantized_formats import DequantizedFormat, QuantizedFormat
from runtime.quant.weight_format import Location
from runtime.spec.sharding import Part
from runtime.spec.types import CallboardError
from tests.support.plain_products import PLAIN
from tests.support.quantized import FORMATS, Format

CPU = torch.device("cpu")
SHAPES = [(16, 64), (72, 160), (136, 384), (8, 32)]


class Tensors:
    """A checkpoint of a dict of tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self):
        return sorted(self.tensors)

    def __contains__(self, name):
        return name in self.tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def type_name(self, name):
        return str(self.tensors[name].dtype)

    def dtype(self, name):
        return self.tensors[name].dtype

    def tensor(self, name, dtype, device, part=None):
        tensor = self.tensors[name]
        if part is not None:
            tensor = tensor.narrow(part.dim, part.start, part.stop - part.start)
        return tensor.to(device, dtype, copy=True)


def numerics(dtype: torch.dtype) -> Numerics:
    return Numerics(dtype, CPU, "torch", packed=False, deterministic=False)


def random_weight(shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), generator


def layout_of(form: Format):
    config = form.config or next(iter(form.files.values()))
    scheme = METHODS[config.get("quant_method", "modelopt")](config)("layers.0.q.weight", "model.layers.0.q_proj")
    return LAYOUTS[scheme.layout](scheme)


def source_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return Tensors({f"q_proj.{name}": tensor for name, tensor in tensors.items()})


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bits, minus zero and NaN included."""
    return torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_those_of_the_library(name, shape):
    form = FORMATS[name]
    dense, generator = random_weight(shape)
    tensors = form.pack(dense, generator)
    want, layout = form.dequantize(tensors, shape), layout_of(form)
    location = Location("q_proj.weight", shape)
    widened = DequantizedFormat(layout, layout.encoding(shape))
    source = source_of(tensors)
    stored = widened.stored(location)
    assert {own for own, tensor in stored.items() if not tensor.optional} <= set(source.names()) <= stored.keys()
    for own in source.names():
        assert stored[own].shape in (source.shape(own), None) or source.shape(own) in stored[own].others
        assert source.dtype(own) in stored[own].dtypes
    (got,) = widened.read(source, location, numerics(want.dtype))
    assert equal(got, want)
    if layout.encoding(shape).fits(shape):
        kept = QuantizedFormat(layout, layout.encoding(shape), PLAIN)
        weight = kept.read(source, location, numerics(want.dtype))
        assert sum(tensor.nbytes for tensor in weight) == kept.device_bytes(shape, numerics(want.dtype))
        assert equal(
            layout.encoding(shape).dequantize(PLAIN.unpacked(layout.encoding(shape), weight), want.dtype), want
        )


@pytest.mark.parametrize("name", FORMATS)
def test_parts_equal_slices_of_the_whole(name):
    form, shape = FORMATS[name], (256, 512)
    dense, generator = random_weight(shape)
    tensors = form.pack(dense, generator)
    source, layout = source_of(tensors), layout_of(form)
    widened = DequantizedFormat(layout, layout.encoding(shape))
    (whole,) = widened.read(source, Location("q_proj.weight", shape), numerics(torch.float32))

    def read(*parts: Part) -> torch.Tensor:
        return widened.read(source, Location("q_proj.weight", shape, False, parts), numerics(torch.float32))[0]

    assert equal(read(Part(0, 128, 256)), whole[128:])
    assert equal(read(Part(0, 0, 128), Part(0, 128, 256)), whole)
    assert equal(read(Part(1, 256, 512)), whole[:, 256:])
    if layout.encoding(shape).reordered:  # groups are anywhere: a rank reads them all, and any columns are its own
        assert equal(read(Part(1, 0, 19)), whole[:, :19])
    elif layout.encoding(shape).group_size > 1:
        with pytest.raises(CallboardError, match=r"a rank's columns 0 to 19 begin or end within \d+ that are stored"):
            read(Part(1, 0, 19))


def test_all_fp8_values_equal_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    tensors = {"weight": codes, "weight_scale_inv": torch.tensor(1.0)}
    layout = layout_of(FORMATS["fp8-tensor-inv"])
    (got,) = DequantizedFormat(layout, layout.encoding((16, 16))).read(
        source_of(tensors), Location("q_proj.weight", (16, 16)), numerics(torch.float32)
    )
    assert equal(got, codes.float())
    assert int(got.isnan().sum()) == 2
