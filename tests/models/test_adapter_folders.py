"""Malicious folders of adapters: none may take long, or much memory."""

import json
import os
import re
import shutil
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.library.make_adapter import save_adapter
from runtime.base.types import CallboardError
from runtime.features.adapter_weights import _matrices
from runtime.loading.adapter_files import read_adapter
from runtime.loading.adapter_patterns import Patterns
from tests.support.cpu_time import reference_s

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    save_adapter(tmp_path / "a", {MODULE: (8, 8)})
    return tmp_path / "a"


def configure(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("pattern", ["(?:[a-z0-9_.]+)+!", "(q|k)_proj", ".*", "layers.3.*", "[0-9]+", "", "q_proj|"])
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_are_not_regular_expressions(folder, field, pattern):
    configure(folder, **{field: {pattern: 4}})
    if pattern == ".*":
        assert read_adapter(folder).rank == 4
        return
    with pytest.raises(CallboardError, match=f"{field} has '.*', which is not accepted; a pattern is a module's name"):
        read_adapter(folder)


_PARTS = st.lists(st.sampled_from(["a", "b", "ab", "0", "10"]), min_size=1, max_size=4)
_PATTERNS = st.one_of(
    st.builds(lambda whole, parts: whole + ".".join(parts), st.sampled_from(["", "^"]), _PARTS),
    st.builds(
        lambda whole, parts: whole + "".join(parts),
        st.sampled_from(["", "^"]),
        st.lists(st.sampled_from([".*", r"\.", "a", "b", "0"]), min_size=1, max_size=6),
    ),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(_PATTERNS, max_size=3, unique=True), _PARTS)
def test_patterns_match_as_in_peft(patterns, parts):
    name = ".".join(parts)
    own = Patterns({pattern: i for i, pattern in enumerate(patterns)}, "rank_pattern").value(name, None)
    fits = [i for i, pattern in enumerate(patterns) if re.match(rf"(?:.*\.)?(?:{pattern})$", name)]
    assert own == next(iter(fits), None)


def test_many_patterns_and_maps_take_linear_time():
    names = [f"model.layers.{i}.{'x' * 300}.q_proj" for i in range(300)]
    patterns = dict.fromkeys(names, 4) | {rf".*{'x' * 100}.*y{i}": 4 for i in range(64)}
    started = time.thread_time()
    found = Patterns(patterns, "rank_pattern")
    assert all(found.value(name, None) == 4 for name in names)
    assert time.thread_time() - started < 200 * reference_s()
    with pytest.raises(CallboardError, match="65 patterns with"):
        Patterns({rf".*{i}": 4 for i in range(65)}, "rank_pattern")


def test_sizes_of_files_are_bounded(folder):
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for path, says in ((config, "at most 1048576 are read"), (weights, "at most 34359738368 are read")):
        good = path.read_bytes()
        os.truncate(path, 1 << 40)  # with holes: it takes no room
        with pytest.raises(CallboardError, match=says):
            read_adapter(folder)
        path.unlink()
        os.mkfifo(path)  # opening it would block forever
        with pytest.raises(CallboardError, match="is not a regular file"):
            read_adapter(folder)
        path.unlink()
        path.write_bytes(good)
    assert read_adapter(folder).digest
    header = json.dumps({"x" * (5 << 20): {}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CallboardError, match="at most 4194304 are read") as error:
        read_adapter(folder)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"dtype": ["F32"], "shape": [2, 2], "data_offsets": [0, 16]}, "must be a matrix"),
        ({"dtype": "F32", "shape": "ab", "data_offsets": [0, 16]}, "must be a matrix"),
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]}, "another size than its shape"),
        ({"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}, "negative size"),
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0.0, 16]}, "negative size"),
        ([], "damaged"),
    ],
)
def test_headers_with_wrong_sizes_are_refused(folder, tensor, says):
    header = json.dumps({f"{MODULE}.lora_A.weight": tensor}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CallboardError, match=says):
        read_adapter(folder)


def test_errors_quote_one_short_line_of_a_folder(folder):
    header = json.dumps({"x\n" * 9999: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CallboardError) as error:
        read_adapter(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "alpha", [float("nan"), float("inf"), 10**400, True, "8"], ids=["nan", "inf", "huge", "bool", "text"]
)
def test_alphas_are_ordinary_numbers(folder, alpha):
    configure(folder, lora_alpha=alpha)
    with pytest.raises(CallboardError, match=r"lora_alpha of .* must be a number"):
        read_adapter(folder)


def test_loaded_weights_are_the_digested_ones(folder, tmp_path):
    adapter = read_adapter(folder)
    data, (one,) = adapter.read(adapter.digest), adapter.maps.values()
    a, b = _matrices(data, one)
    assert (tuple(a.shape), tuple(b.shape)) == ((4, 8), (8, 4))
    odd = bytearray(b"\0" + data)  # a header of an odd length
    moved = one._replace(a=one.a._replace(offset=one.a.offset + 1), b=one.b._replace(offset=one.b.offset + 1))
    assert all(map(torch.equal, _matrices(odd, moved), (a, b)))
    save_adapter(tmp_path / "b", {MODULE: (8, 8)}, 1)
    for changed in ("adapter_model.safetensors", "adapter_config.json"):
        other = shutil.copytree(folder, tmp_path / changed)
        shutil.copy(tmp_path / "b" / "adapter_model.safetensors", other)
        if changed == "adapter_config.json":
            configure(other, lora_alpha=3)
        with pytest.raises(CallboardError, match="have changed"):
            read_adapter(other).read(adapter.digest)
