"""Safetensors folders: single, sharded, and files that are not in order."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from runtime.base.types import CallboardError
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.folder import folder_eos_token_ids, weight_files
from runtime.models import load_spec
from runtime.text.sampling_defaults import SamplingDefaults

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {str(d): (torch.randn(3, 5, generator=generator) * 9).abs().to(d) for d in _DTYPES}
    return tensors | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "flags": torch.tensor([True, False])}


def _folder(folder: Path, files: dict[str, dict[str, torch.Tensor]], config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7} if config is None else config))
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {t: name for name, tensors in files.items() for t in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stored_type_is_read_and_converted(tmp_path, dtype):
    tensors = _tensors()
    checkpoint = open_checkpoint(_folder(tmp_path, {"model.safetensors": tensors}))
    assert checkpoint.names() == sorted(tensors)
    for name, expected in tensors.items():
        actual = checkpoint.tensor(name, dtype)
        assert checkpoint.shape(name) == tuple(expected.shape) == tuple(actual.shape)
        assert actual.dtype == dtype
        assert torch.equal(actual, expected.to(dtype))


def test_a_read_tensor_is_independent_of_the_file(tmp_path):
    checkpoint = open_checkpoint(_folder(tmp_path, {"model.safetensors": {"w": torch.ones(4)}}))
    checkpoint.tensor("w", torch.float32).zero_()
    assert torch.equal(checkpoint.tensor("w", torch.float32), torch.ones(4))


def test_shards_are_one_checkpoint(tmp_path):
    tensors = _tensors()
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": {n: tensors[n] for n in names[:4]},
        "model-00002-of-00002.safetensors": {n: tensors[n] for n in names[4:]},
    }
    checkpoint = open_checkpoint(_folder(tmp_path, parts))
    assert checkpoint.names() == names
    assert all(torch.equal(checkpoint.tensor(n, torch.float32), tensors[n].float()) for n in names)


def test_fingerprint(tmp_path):
    tensors = {"a": torch.arange(5000.0), "b": torch.zeros(3)}
    first = open_checkpoint(_folder(tmp_path / "1", {"model.safetensors": tensors})).fingerprint
    assert open_checkpoint(_folder(tmp_path / "2", {"model.safetensors": tensors})).fingerprint == first
    changed = tensors | {"a": tensors["a"] + 1}
    assert open_checkpoint(_folder(tmp_path / "3", {"model.safetensors": changed})).fingerprint != first
    config = {"eos_token_id": 7, "rope_theta": 5e5}
    assert open_checkpoint(_folder(tmp_path / "4", {"model.safetensors": tensors}, config)).fingerprint != first


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        (None, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, (1, 106)),
        ({"temperature": 0.6}, {"text_config": {"eos_token_id": 5}}, (5,)),
        (None, {}, ()),
    ],
)
def test_eos_token_ids(tmp_path, generation_config, config, expected):
    _folder(tmp_path, {"model.safetensors": {"w": torch.ones(1)}}, config)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert open_checkpoint(tmp_path).eos_token_ids == expected


def test_missing_tensor_is_named(tmp_path):
    checkpoint = open_checkpoint(_folder(tmp_path, {"model.safetensors": {"w": torch.ones(1)}}))
    with pytest.raises(CallboardError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight", torch.float32)


def test_shards_that_do_not_fit_their_index(tmp_path):
    one, two = {"a": torch.ones(1)}, {"b": torch.ones(1)}
    _folder(tmp_path, {"1.safetensors": one, "2.safetensors": two})
    save_file({"c": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(CallboardError, match=r"2\.safetensors lacks tensor 'b'"):
        open_checkpoint(tmp_path)
    save_file(one, tmp_path / "2.safetensors")
    with pytest.raises(CallboardError, match=r"2\.safetensors: tensor 'a' is in another file"):
        open_checkpoint(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(CallboardError, match=r"2\.safetensors cannot be read: No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CallboardError, match="no 'weight_map' from tensors to files beside it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no .*safetensors file"),
        ({"pytorch_model.bin": b"x"}, "pickles and can run code; convert"),
        ({"a.safetensors": b"x", "b.safetensors": b"x"}, "2 safetensors files and no model.safetensors.index.json"),
        ({"model.safetensors": b""}, "cut off"),
        ({"config.json": b"[1]"}, "holds a JSON list"),
        ({"config.json": b"{"}, "not valid JSON"),
    ],
)
def test_folders_without_a_checkpoint(tmp_path, files, message):
    for name, content in ({"config.json": b"{}"} | files).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CallboardError, match=message):
        open_checkpoint(tmp_path)


def test_paths_without_a_checkpoint(tmp_path):
    with pytest.raises(CallboardError, match=r"config\.json cannot be read: No such file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CallboardError, match="neither a folder"):
        open_checkpoint(tmp_path / "nothing")


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "header",
    [
        _entry(offsets=[0, 1 << 60]),
        _entry(offsets=[-8, 0]),
        _entry(offsets=[8, 0]),
        _entry(shape=[1 << 62, 1 << 62]),
        _entry(shape=[-2]),
        _entry(shape=[True]),
        _entry(shape=None),
        _entry(dtype="F5"),
        _entry() | {"v": _entry()["w"]},  # two at one offset
        {},  # and bytes outside of all tensors
        [],
        b'{"w":1,"w":2}',
        b"{" * 100_000,
        b"[" * 100_000,
    ],
)
def test_damaged_headers(tmp_path, header):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    _write(tmp_path, encoded, 8)
    message = r"model\.safetensors: the file is damaged or cut off \(.+\); fetch it again"
    with pytest.raises(CallboardError, match=message):
        open_checkpoint(tmp_path)


def test_a_type_unknown_to_torch_is_named(tmp_path):
    _write(tmp_path, json.dumps(_entry("F6_E2M3", [32], [0, 24])).encode(), 24)
    with pytest.raises(CallboardError, match=r"model\.safetensors: tensor 'w' has the type F6_E2M3"):
        open_checkpoint(tmp_path)


def _write(folder: Path, header: bytes, num_bytes: int) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


_FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_FUZZ
@given(data=st.data())
def test_truncated_anywhere(tmp_path, data):
    path = _folder(tmp_path, {"model.safetensors": _tensors()}) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CallboardError, match=r"model\.safetensors: .* cut off"):
        open_checkpoint(tmp_path)


@_FUZZ
@given(data=st.data())
def test_flipped_header_bytes(tmp_path, data):
    tensors = _tensors()
    path = _folder(tmp_path, {"model.safetensors": tensors}) / "model.safetensors"
    content = bytearray(path.read_bytes())
    header_len = 8 + int.from_bytes(content[:8], "little")
    for at in data.draw(st.lists(st.integers(0, header_len - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CallboardError:
        return
    total = sum(checkpoint.tensor(name, torch.float64).numel() for name in checkpoint.names())
    assert total <= len(content)


@pytest.mark.parametrize("names", [{"a": []}, {"a": ""}])
def test_index_with_odd_names_is_refused(tmp_path, names):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CallboardError, match="has no 'weight_map' from tensors to files"):
        weight_files(tmp_path)


def test_malformed_parts_of_a_config_are_ignored(tmp_path):
    assert folder_eos_token_ids(tmp_path, {"text_config": "x"}) == ()
    for architectures in (5, {"a": 1}):
        with pytest.raises(CallboardError, match="architecture is None"):
            load_spec({"architectures": architectures})


def test_top_k_of_a_model_fits_the_runners_limit(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 2147483648}')
    with pytest.raises(CallboardError, match="top_k is 2147483648; it must be between 0 and 2147483647"):
        SamplingDefaults.load(tmp_path)
