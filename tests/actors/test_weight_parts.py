"""Tensors of weight updates on their way through Ray's object store."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.client.weight_sources import parts_of, weight_list, weight_slices
from actors.runners.weight_parts import StoredTensor, as_tensor, pieces, stored
from runtime.base.types import CallboardError
from runtime.base.weight_parts import FilesPart

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = (100 * torch.rand(shape, generator=generator)).to(dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


def bits(tensor):
    numbers = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), numbers.view(torch.uint8).tolist() if numbers.numel() else []


@given(st.lists(tensors(), max_size=8), st.integers(1, 200))
def test_tensors_keep_their_bits(drawn, most_bytes):
    by_name = {str(i): tensor for i, tensor in enumerate(drawn)}
    found = list(pieces(by_name, most_bytes))
    for piece in found:
        sizes = [e.array.nbytes if isinstance(e, StoredTensor) else e.nbytes for e in piece.values()]
        assert len(piece) == 1 or sum(sizes) <= most_bytes
    joined = {name: as_tensor(each) for piece in found for name, each in piece.items()}
    assert list(joined) == list(by_name)
    assert all(bits(joined[name]) == bits(tensor) for name, tensor in by_name.items())


def test_stored_forms_are_read_without_a_copy():
    for dtype in DTYPES:
        each = stored(torch.ones(4, 3).to(dtype))
        array = each.array if isinstance(each, StoredTensor) else each
        assert as_tensor(each).data_ptr() == array.ctypes.data
    array = np.ones(3, np.float32)
    array.flags.writeable = False  # as the object store's are
    assert stored(array) is array
    assert as_tensor(array).tolist() == [1.0] * 3


@given(tensors().filter(lambda t: t.dim() > 0), st.data())
def test_slices_are_those_of_the_tensor(tensor, data):
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    start = data.draw(st.integers(0, tensor.shape[dim]))
    stop = data.draw(st.integers(start, tensor.shape[dim]))
    whole, part = weight_slices({"x": tensor}, [("x", None, 0, 0), ("x", dim, start, stop)])
    assert bits(whole) == bits(tensor)
    assert bits(part) == bits(tensor.narrow(dim, start, stop - start))


def test_a_list_of_weights_names_all_of_them():
    state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(())}
    assert weight_list(state) == [("a", "bfloat16", (2, 3)), ("b", "float32", ())]


@pytest.mark.parametrize(
    ("source", "paths"),
    [("w", ["w"]), (Path("w"), ["w"]), (["/a", Path("/b/c")], ["/a", "/b/c"])],
)
def test_paths_become_whole(source, paths):
    assert list(parts_of(source, "objects", "weights", None)) == [
        FilesPart([str(Path(path).absolute()) for path in paths])
    ]


@pytest.mark.parametrize("source", [None, 5, [1, 2], b"bytes"])
def test_other_sources_are_refused(source):
    assert not isinstance(source, Mapping)
    with pytest.raises(CallboardError, match=f"cannot come from a {type(source).__name__}"):
        list(parts_of(source, "objects", "weights", None))
