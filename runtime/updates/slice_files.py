"""Slice files: safetensors files in which an entry's name states the part of its tensor.

An entry `model.norm.weight` is a whole tensor; `model.norm.weight|0|64|128` has the rows 64 to 127 of one. Metadata
holds a digest of samples, which shows that a crash has lost pages."""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.updates.slices import Slice, SliceSet

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_SAMPLE_BYTES = 256  # sample size at each slice's head, middle and tail
_CHUNK = 16 << 20  # bytes that are copied from a GPU at once
_MOST_HEADER = 256 << 20  # bytes
_ALIGNED = 64  # the header's size is a multiple of these bytes


class SliceFile(NamedTuple):
    """A file that is read."""

    slices: SliceSet  # views into the mapped file
    metadata: dict[str, str]


def write_slices(file: BinaryIO, slices: SliceSet, metadata: Mapping[str, str]) -> None:
    """Write a file that is empty and open. Raises OSError."""
    entries, at = list[tuple[str, torch.Tensor, int, int]](), 0
    # The format forbids gaps. Wide elements are first, so that each tensor begins at a multiple of its elements' size.
    for name, (part, values) in sorted(slices.all(), key=lambda entry: -entry[1].values.dtype.itemsize):
        key = name if part is None else "|".join((name, *map(str, part)))
        entries.append((key, values, at, at + values.nbytes))
        at += values.nbytes
    digest, size = hashlib.sha256(), _header_size(entries, slices, metadata)
    stream = _stream_of(slices)
    with torch.cuda.stream(stream):
        buffer = None if stream is None else torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
        for _, values, start, _ in entries:
            file.seek(size + start)
            for piece in _bytes(values, buffer):
                file.write(piece)
            for sample in _samples(values.reshape(-1).view(torch.uint8)):
                digest.update(sample)
    file.truncate(size + at)
    file.seek(0)
    file.write(_header(entries, slices, metadata, digest.hexdigest(), size))
    file.flush()


def read_slices(path: Path) -> SliceFile:
    """Map a file. Raises CallboardError if it is missing, cut off or damaged."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:8], "little")
        if not 0 < length <= _MOST_HEADER:
            raise ValueError("its header is damaged")
        header: dict[str, Any] = json.loads(mapped[8 : 8 + length])
        metadata = header.pop("__metadata__")
        slices = SliceSet(dense=set(json.loads(metadata["dense"])), is_mapped=True)
        digest = hashlib.sha256()
        for key, entry in header.items():
            start, stop = entry["data_offsets"]
            if 8 + length + stop > len(mapped):
                raise ValueError("it is cut off")
            dtype, name, part = _TORCH_DTYPES[entry["dtype"]], *_name_and_part(key)
            count = (stop - start) // dtype.itemsize
            values = torch.empty(0, dtype=dtype)
            if count:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the memory is read-only, and nothing writes to it
                    values = torch.frombuffer(mapped, dtype=dtype, count=count, offset=8 + length + start)
            for sample in _samples(values.view(torch.uint8)):
                digest.update(sample)
            slices.of.setdefault(name, []).append(Slice(part, values.view(entry["shape"])))
        if digest.hexdigest() != metadata["digest"]:
            raise ValueError("its content has changed")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise CallboardError(f"{path} cannot be read: {e}.") from e
    slices.seen = set(slices.of)
    return SliceFile(slices, metadata)


def _name_and_part(key: str) -> tuple[str, Part | None]:
    name, *numbers = key.split("|")
    return name, Part(*map(int, numbers)) if numbers else None


def _header_size(entries: list[tuple[str, torch.Tensor, int, int]], slices: SliceSet, of: Mapping[str, str]) -> int:
    """The bytes before the data. The header is written last, with a digest of fixed length."""
    size = len(_json(entries, slices, of, "0" * 64)) + 8
    return size + -size % _ALIGNED


def _header(
    entries: list[tuple[str, torch.Tensor, int, int]], slices: SliceSet, of: Mapping[str, str], digest: str, size: int
) -> bytes:
    return (size - 8).to_bytes(8, "little") + _json(entries, slices, of, digest).ljust(size - 8)


def _json(
    entries: list[tuple[str, torch.Tensor, int, int]], slices: SliceSet, of: Mapping[str, str], digest: str
) -> bytes:
    header: dict[str, Any] = {"__metadata__": {**of, "dense": json.dumps(sorted(slices.dense)), "digest": digest}}
    for key, values, start, stop in entries:
        header[key] = {"dtype": _DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [start, stop]}
    return json.dumps(header).encode()


def _stream_of(slices: SliceSet) -> torch.cuda.Stream | None:
    """A stream for copies from a GPU, so that they do not wait for steps, nor steps for them."""
    device = next((each.values.device for _, each in slices.all() if each.values.is_cuda), None)
    return None if device is None else torch.cuda.Stream(device)


def _bytes(values: torch.Tensor, buffer: torch.Tensor | None) -> Iterator[memoryview]:
    """A contiguous tensor's bytes, in pieces. From a GPU, each piece is copied to `buffer`, uint8.

    The buffer is pinned: a copy to other memory holds the driver's lock, so that steps would wait for it."""
    for piece in values.reshape(-1).view(torch.uint8).split(_CHUNK):
        if buffer is not None and values.is_cuda:
            piece = buffer[: len(piece)].copy_(piece, non_blocking=True)
            torch.cuda.current_stream(values.device).synchronize()
        yield piece.numpy().data


def _samples(flat: torch.Tensor) -> Iterator[bytes]:
    for start in (0, len(flat) // 2, max(0, len(flat) - _SAMPLE_BYTES)):
        yield flat[start : start + _SAMPLE_BYTES].cpu().numpy().tobytes()
