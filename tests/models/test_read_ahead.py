"""Files are read ahead of their use, within a bound, and never in place of it."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.loading import read_ahead
from runtime.loading.checkpoint import byte_ranges, open_checkpoint
from runtime.loading.read_ahead import ByteRange, ReadAhead


@pytest.fixture
def read(monkeypatch) -> list[ByteRange]:
    """The chunks that were not cached, which is all of them."""
    found: list[ByteRange] = []

    def note(file: int, chunk: ByteRange) -> bool:
        found.append(chunk)
        return False

    monkeypatch.setattr(read_ahead, "_is_cached", note)
    monkeypatch.setattr(read_ahead, "_CHUNK", 100)
    monkeypatch.setattr(read_ahead, "_AHEAD", 300)
    return found


def until(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_no_more_is_read_than_the_bound(tmp_path: Path, read):
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    ranges = [ByteRange(path, 0, 250), ByteRange(path, 500, 1000), ByteRange(path, 250, 500)]
    with ReadAhead(ranges) as ahead:
        assert until(lambda: len(read) == 3)
        time.sleep(0.05)
        assert sorted(read) == [(path, 0, 100), (path, 100, 200), (path, 200, 250)]
        ahead.reached(path, 500)
        assert until(lambda: len(read) == 6)
        ahead.reached(path, 250)
        assert until(lambda: max(chunk.stop for chunk in read if chunk.start < 500) == 500)


def test_the_end_stops_its_threads(tmp_path: Path, read):
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with ReadAhead([ByteRange(path, 0, 1000)]):
        assert until(lambda: len(read) == 3)
    assert until(lambda: not any(thread.name == "read ahead" for thread in threading.enumerate()))
    assert len(read) == 3


def test_an_error_is_left_to_the_reader(tmp_path: Path):
    with ReadAhead([ByteRange(tmp_path / "missing", 0, 10)]):
        assert until(lambda: not any(thread.name == "read ahead" for thread in threading.enumerate()))


def test_tensors_are_found_by_their_bytes(tmp_path: Path):
    tensors = {f"layers.{i}.w": torch.full((5, i + 1), float(i)) for i in (10, 2, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, (path, start, stop) in byte_ranges(tmp_path / "model.safetensors").items():
        assert path == tmp_path / "model.safetensors"
        assert data[start:stop] == tensors[name].numpy().tobytes()
    checkpoint = open_checkpoint(tmp_path)
    with checkpoint.reading_ahead("layers.2.*"):
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.tensor(name, torch.float32), tensor)
