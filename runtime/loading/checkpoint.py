"""Model weights from disk, one tensor at a time: a folder of safetensors files, or a GGUF file.

Both are mapped into memory and read tensor by tensor, and what was read is let go, so that loading needs no more than
the model and one tensor's source beside it. Every length in a header is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.core.sharding import Part
from runtime.core.types import CallboardError
from runtime.loading.dequantize import dequantize
from runtime.loading.folder import INDEX_NAME, folder_eos_token_ids, read_json, weight_files
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import Source, gguf_eos_token_ids, read_gguf_model
from runtime.loading.mapped import MappedFile
from runtime.loading.upload import Uploader

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_DEQUANTIZED_AT_ONCE = 1 << 17  # weights; half a MB of float32 stays in a core's cache
_SAMPLE_BYTES = 256  # of the head, the middle and the tail of each tensor, for the fingerprint


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor as its file holds it."""

    type_name: str
    shape: tuple[int, ...]
    file_index: int
    offset: int  # from the start of the file
    data: memoryview


class Checkpoint(ABC):
    """The weights and the configuration of one model, under Hugging Face names whatever the source.

    `config` is config.json or its equivalent; `eos_token_ids` are the ids that end a text."""

    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def names(self) -> list[str]:
        """All tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor without reading it; a linear layer's is (out, in)."""

    @abstractmethod
    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        """A new tensor, read, dequantised if need be, and converted; of a part no more is read than the file's layout
        needs. Raises CallboardError if there is no such name."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers before they are converted."""

    def type_name(self, name: str) -> str:
        """The type of a tensor in its file, such as BF16 or Q4_K."""
        return self._stored(name).type_name

    @abstractmethod
    def _stored(self, name: str) -> _Stored: ...

    @cached_property
    def fingerprint(self) -> str:
        """128 bits in hex that tell one model's weights from another's: equal wherever the same files are.

        A hash over the configuration, every tensor's name, type, shape and place, and samples of its bytes."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self.names():
            t = self._stored(name)
            digest.update(json.dumps([name, t.type_name, t.shape, t.file_index, t.offset, len(t.data)]).encode())
            for start in (0, len(t.data) // 2, max(0, len(t.data) - _SAMPLE_BYTES)):
                digest.update(t.data[start : start + _SAMPLE_BYTES])
        return digest.hexdigest()[:32]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens what `resolve` returned: a .gguf file, or a folder with config.json and safetensors files.

    Reads headers only; raises CallboardError that names the file, the tensor and the reason if one is damaged."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path)
    raise CallboardError(f"{path} is neither a folder with safetensors files nor a .gguf file.")


class GgufCheckpoint(Checkpoint):
    """A GGUF file of a supported architecture."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._model = read_gguf_model(self._file)
        self.config = self._model.config
        self.eos_token_ids = gguf_eos_token_ids(self._file)

    def names(self) -> list[str]:
        return sorted(self._model.sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32  # of what `dequantize` returns

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        source, raw = self._source(name), self._model.raw(name)
        stored_shape = list(source.shape[::-1] if source.transposed else source.shape)
        step, columns = max(1, _DEQUANTIZED_AT_ONCE // stored_shape[-1]), slice(None)
        if part is not None:
            dim = len(stored_shape) - 1 - part.dim if source.transposed else part.dim
            stored_shape[dim] = part.stop - part.start
            if dim == len(stored_shape) - 1:  # blocks of weights lie along it: they are dequantised whole
                columns = slice(part.start, part.stop)
            else:
                raw = raw[part.start : part.stop]
        out = torch.empty(stored_shape, dtype=dtype, device=device)
        rows = out.view(len(raw), -1)
        for start in range(0, len(raw), step):
            weights = dequantize(raw[start : start + step], source.tensor.type_name)[:, columns]
            if source.plus_one:
                weights = weights - np.float32(1)
            # A row slice may be a read-only view of the file; from_numpy takes writable arrays only.
            rows[start : start + step] = torch.from_numpy(weights if weights.flags.writeable else weights.copy())
        self._file.forget(source.tensor.name)
        return out.T.contiguous() if source.transposed else out

    def _source(self, name: str) -> Source:
        if name not in self._model.sources:
            raise CallboardError(f"{self._file.path} has no tensor {name!r}; the file is incomplete.")
        return self._model.sources[name]

    def _stored(self, name: str) -> _Stored:
        t = self._source(name).tensor
        return _Stored(t.type_name, t.shape, t.part, t.offset, self._file.raw(t.name).reshape(-1).data)


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files, one or several with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_json(folder / "config.json")
        self.eos_token_ids = folder_eos_token_ids(folder, self.config)
        self._tensors: dict[str, _Stored] = {}
        self._files: list[MappedFile] = []
        for index, path in enumerate(weight_files(folder)):
            self._files.append(file := MappedFile(path))
            for name, stored in _read_safetensors(path, file, index):
                if name in self._tensors:
                    raise CallboardError(f"{path}: tensor {name!r} is in another file of {folder} too.")
                self._tensors[name] = stored
        if (folder / INDEX_NAME).exists():
            for name, file_name in read_json(folder / INDEX_NAME)["weight_map"].items():
                if name not in self._tensors:
                    raise CallboardError(f"{folder / file_name} lacks tensor {name!r}, which {INDEX_NAME} puts there.")

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _SAFETENSORS_DTYPES[self._stored(name).type_name]

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        stored, stored_dtype, device = self._stored(name), self.dtype(name), torch.device(device)
        # Copied as bytes: torch makes no tensors of read-only memory, and numpy has no bfloat16.
        data, shape = np.frombuffer(stored.data, np.uint8)[None], list(stored.shape)
        if part is not None:
            inner = math.prod(shape[part.dim + 1 :]) * stored_dtype.itemsize
            data = data.reshape(math.prod(shape[: part.dim]), -1)[:, part.start * inner : part.stop * inner]
            shape[part.dim] = part.stop - part.start
        source = torch.empty(shape, dtype=stored_dtype, device=device)
        raw = source.view(-1).view(torch.uint8)
        if device.type == "cuda":
            self._uploader.upload(np.ascontiguousarray(data).reshape(-1).data, raw)  # rows are as they lie in the file
        else:
            raw.numpy().reshape(data.shape)[:] = data
        self._files[stored.file_index].forget(stored.offset, len(stored.data))
        return source.to(dtype)

    @cached_property
    def _uploader(self) -> Uploader:
        return Uploader()

    def _stored(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise CallboardError(f"{self._folder} has no tensor {name!r}; the checkpoint is incomplete.")
        return self._tensors[name]


def _read_safetensors(path: Path, file: MappedFile, file_index: int) -> list[tuple[str, _Stored]]:
    """The tensors of one file: u64 header length | JSON header | data (the safetensors format)."""
    data, size = file.data, file.size
    header_len = int.from_bytes(data[:8], "little")
    if size < 8 or header_len > min(size - 8, _MAX_HEADER_BYTES):
        raise CallboardError(f"{path}: a header of {header_len} bytes is announced in a file of {size}; it is cut off.")
    try:
        header = json.loads(bytes(data[8 : 8 + header_len]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise CallboardError(f"{path}: the header is not valid JSON: {e}.") from e
    if not isinstance(header, dict):
        raise CallboardError(f"{path}: the header is a JSON {type(header).__name__}; an object is needed.")
    header.pop("__metadata__", None)
    data = data[8 + header_len :]
    tensors = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
                type(n) is int and n >= 0 for n in shape
            ):
                pass
            case _:
                raise CallboardError(f"{path}: tensor {name!r} needs a dtype, a shape and two data_offsets.")
        if dtype not in _SAFETENSORS_DTYPES:
            raise CallboardError(
                f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(_SAFETENSORS_DTYPES)}."
            )
        if not 0 <= start <= end <= len(data):
            raise CallboardError(
                f"{path}: tensor {name!r} should be bytes {start} to {end} of {len(data)}; the file is cut off."
            )
        if end - start != math.prod(shape) * _SAFETENSORS_DTYPES[dtype].itemsize or max(shape, default=0) >> 40:
            raise CallboardError(
                f"{path}: tensor {name!r} has {end - start} bytes, which its shape {shape} of {dtype} does not need."
            )
        tensors.append((name, _Stored(dtype, tuple(shape), file_index, 8 + header_len + start, data[start:end])))
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
