"""A strict reader for the GGUF container (versions 2 and 3), in one file or split over several, without torch.

The `gguf` package, imported with the first file, supplies the tensor types and dequantizes tensors. Its own reader
takes seconds for a model's vocabulary.

Layout (ggml/docs/gguf.md): magic, version, counts | metadata: key, type, value ... | tensor infos: name, dims, type,
offset ... | padding | tensor data. Every length in the file is checked against the remaining bytes before memory is
allocated for it. So a corrupt or hostile file costs at most ten times its own size in memory."""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import CallboardError

T = TypeVar("T")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_PARTS = 10_000  # parts in a split file


@cache
def ggml_types() -> dict[int, tuple[str, int, int]]:
    """Return the types that `dequantize` supports, by number: name, weights and bytes of one block."""
    from gguf import GGML_QUANT_SIZES, quants

    types = {}
    for kind, (block, block_bytes) in GGML_QUANT_SIZES.items():
        with suppress(NotImplementedError):
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
            types[int(kind)] = kind.name, block, block_bytes
    return types


def dequantize(raw: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Dequantize whole rows of blocks: raw [num_rows, row_bytes] -> float32 [num_rows, row_len]."""
    from gguf import GGMLQuantizationType, quants

    weights: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType[type_name])
    return weights


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor in its file."""

    name: str
    shape: tuple[int, ...]  # outermost first, so a linear layer is [out, in]
    type_name: str
    part: int  # part of a split file; 0 is the first
    offset: int  # bytes from the part's start
    nbytes: int


class MappedFile:
    """A file's bytes. Raises CallboardError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        except OSError as e:
            raise CallboardError(f"{path} cannot be read: {e.strerror}.") from e
        self.data = memoryview(self._map or b"")

    def forget(self, start: int, size: int) -> None:
        """Release the pages of `size` bytes from `start` on. A later access reads them again.

        Otherwise a model's files would count as the process's memory until its end."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map and size:
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)


class GgufFile:
    """A GGUF file and, if it is the first part of a split one, all the others: metadata, tensor infos, mapped bytes.

    Raises CallboardError with the file and the key or tensor if a file is invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, GgufTensor] = {}
        self.read_tables = set[str]()  # tensors that became parts of the config
        self._parts: list[MappedFile] = []
        self.metadata = self._read(path)
        for number, other in enumerate(self._other_parts(), 1):
            theirs = self._read(other)
            if theirs.get("split.no") != number or theirs.get("split.count") != self.metadata["split.count"]:
                raise CallboardError(f"{other} is not part {number + 1} of the file that begins with {path}.")
        if len(self.tensors) != (count := self.value("split.tensors.count", int, len(self.tensors))):
            raise CallboardError(f"{path} and its other parts have {len(self.tensors)} tensors, not {count}.")

    def _other_parts(self) -> list[Path]:
        """Return the other parts of a split file, by llama.cpp's rule for names (llama_split_path)."""
        count, number = self.value("split.count", int, 0), self.value("split.no", int, 0)
        if count <= 1:
            return []
        if count > _MAX_PARTS:
            raise CallboardError(f"{self.path}: split.count is {count}; at most {_MAX_PARTS} parts are read.")
        suffix = f"-{number + 1:05d}-of-{count:05d}.gguf"
        if not self.path.name.endswith(suffix):
            raise CallboardError(f"{self.path} is part {number + 1} of {count}; it must be called *{suffix}.")
        stem = self.path.name.removesuffix(suffix)
        parts = [self.path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        if number:
            raise CallboardError(f"{self.path} is part {number + 1} of {count}; name the first one, {parts[0].name}.")
        return parts[1:]

    def _read(self, path: Path) -> dict[str, Any]:
        """Add one file's tensors, and return its metadata."""
        cursor = _Cursor(path)
        if (magic := cursor.take(4)) != b"GGUF":
            raise cursor.error(f"starts with {magic!r}, not with b'GGUF', so it is no GGUF file")
        version = cursor.scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "is big-endian" if swapped in (2, 3) else f"has version {version}"
            raise cursor.error(f"{kind}; little-endian GGUF of version 2 or 3 is needed")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        cursor.check_count(num_keys, 13, "metadata entries")  # an empty key, a type, one byte
        cursor.check_count(num_tensors, 24, "tensors")

        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            cursor.where = f"the key of metadata entry {index}"
            key = cursor.string()
            cursor.where = f"metadata key {key!r}"
            if key in metadata:
                raise cursor.error("occurs twice")
            metadata[key] = cursor.value()

        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for index in range(num_tensors):
            cursor.where = f"the name of tensor {index}"
            name = cursor.string()
            cursor.where = f"tensor {name!r}"
            num_dims = cursor.scalar("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise cursor.error(f"has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
            dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
            infos.append((name, dims[::-1], cursor.scalar("I"), cursor.scalar("Q")))

        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CallboardError(f"{path}: general.alignment is {alignment!r}; it must be a power of two.")
        data_start, types = -(-cursor.at // alignment) * alignment, ggml_types()
        for name, shape, ggml_type, offset in infos:
            cursor.where = f"tensor {name!r}"
            if name in self.tensors:
                raise cursor.error("occurs twice")
            if ggml_type not in types:
                known = ", ".join(n for n, _, _ in types.values())
                raise cursor.error(f"has the type number {ggml_type}, which is not supported; supported are {known}")
            type_name, block, block_bytes = types[ggml_type]
            if 0 in shape or shape[-1] % block:
                raise cursor.error(f"has the shape {list(shape)}, which {type_name} blocks of {block} cannot fill")
            nbytes = math.prod(shape) // block * block_bytes
            if offset % alignment or data_start + offset + nbytes > cursor.size:
                raise cursor.error(
                    f"should lie at byte {data_start + offset} with {nbytes} bytes, but the file has {cursor.size} "
                    f"bytes and an alignment of {alignment}; it is cut off or corrupt"
                )
            self.tensors[name] = GgufTensor(name, shape, type_name, len(self._parts), data_start + offset, nbytes)
        self._parts.append(cursor.file)
        return metadata

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the metadata value of `key`, with type `kind`. Raises CallboardError for other types and missing
        keys."""
        value = self.metadata.get(key, default)
        if value is None:
            raise CallboardError(f"{self.path} has no metadata key {key!r}; the file is incomplete, convert it anew.")
        if type(value) is not kind:
            raise CallboardError(
                f"{self.path}: {key} is {str(value)[:40]!r}, a {type(value).__name__}; a {kind.__name__} is needed."
            )
        return value

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor, read-only: [num_rows, row_bytes], rows along its last dimension."""
        tensor = self.tensors[name]
        stored = self._parts[tensor.part].data[tensor.offset : tensor.offset + tensor.nbytes]
        return np.frombuffer(stored, np.uint8).reshape(math.prod(tensor.shape[:-1]), -1)

    def forget(self, name: str) -> None:
        """Release the pages of a tensor."""
        tensor = self.tensors[name]
        self._parts[tensor.part].forget(tensor.offset, tensor.nbytes)


class _Cursor:
    """Reads a mapped file sequentially, within its bounds. Errors name the place."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.where = path, 0, "the header"
        self.file = MappedFile(path)
        self.data, self.size = self.file.data, self.file.size

    def error(self, what: str) -> CallboardError:
        return CallboardError(f"{self.path}: {self.where} {what}.")

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.error(
                f"announces {count} {what}, but only {self.size - self.at} bytes follow; the file is cut off or corrupt"
            )

    def take(self, size: int) -> bytes:
        self.check_count(size, 1, "bytes")
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # Vocabularies and merges hold more than 10^5 strings: this loop is minimal.
        data, at, size = self.data, self.at, self.size
        read_length = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = read_length(data, at)
                at += 8
                if length > size - at:
                    raise self.error(
                        f"announces a string of {length} bytes where {size - at} are left; the file is cut off"
                    )
                out.append(str(data[at : at + length], "utf-8"))
                at += length
        except UnicodeDecodeError as e:
            raise self.error(f"has text that is not UTF-8 at byte {at}") from e
        except struct.error as e:
            raise self.error(f"is cut off at byte {at}") from e
        self.at = at
        return out

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.error(f"has the unknown type {kind}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            self.check_count(count, 8, "strings")
            return self.strings(count)
        if element not in _SCALARS:
            raise self.error(f"is an array of type {element}; arrays hold numbers, booleans or strings")
        dtype = np.dtype("<" + _SCALARS[element])
        self.check_count(count, dtype.itemsize, "numbers")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
