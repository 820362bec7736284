"""Readers of quantized weights against the formats' own libraries, bit by bit."""

import pytest
import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.quant.weight_format import Location
from tests.support.models.plain_format import PlainFormat
from tests.support.models.quantized import FORMATS
from tests.support.models.quantized_tensors import equal, layout_of, numerics, random_weight, source_of

SHAPES = [(16, 64), (72, 160), (136, 384), (8, 32)]


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
        kept = PlainFormat(layout, layout.encoding(shape), numerics(want.dtype))
        weight = kept.read(source, location, numerics(want.dtype))
        assert sum(tensor.nbytes for tensor in weight) == kept.device_bytes(shape, numerics(want.dtype))
        assert equal(kept.operand([weight], len(want)), want)


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
