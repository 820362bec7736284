"""Model weights from disk, one tensor at a time: a folder of safetensors files, or a GGUF file.

Both are mapped into memory and read tensor by tensor, and pages are released after use. So loading needs only the
model's memory and one tensor's source. Headers are checked before any other use of a file."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.loading.folder import INDEX_NAME, folder_eos_token_ids, model_config, read_json, weight_files
from runtime.loading.gguf import GgufFile, dequantize
from runtime.loading.gguf_architectures import GgufModel, Source, read_gguf_model
from runtime.loading.gguf_configs import gguf_eos_token_ids
from runtime.loading.gguf_towers import find_tower
from runtime.loading.read_ahead import ByteRange, ReadAhead
from runtime.loading.stacked_experts import Place, single_weights
from runtime.loading.upload import Uploader
from runtime.media.families import image_rule
from runtime.media.rule import ImageRule
from runtime.models import has_experts_in_turn, hidden_size
from runtime.quant.weight_format import TensorSource

_MOST_MAPPED = 64 << 20  # bytes read from a safetensors file before its pages are released
_DEQUANTIZED_AT_ONCE = 1 << 17  # weights; half a MB of float32 stays in a core's cache
_KEPT_EXPERTS = 4  # gate and up share an expert's blocks, scales and biases
_SAMPLE_BYTES = 256  # sample size at each tensor's head, middle and tail, for the fingerprint


class Checkpoint(TensorSource):
    """The weights and the configuration of one model, under Hugging Face names whatever the source.

    `config` is config.json or its equivalent; `eos_token_ids` are the ids that end a text."""

    config: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def _stored(self, name: str) -> memoryview:
        """Return the bytes of a tensor in its file, read on access."""

    @property
    @abstractmethod
    def image_rule(self) -> ImageRule | None:
        """How a picture becomes pixels and tokens; None for a model that takes no images."""

    def reading_ahead(self, ignored: str) -> AbstractContextManager[object]:
        """Read files ahead of `tensor`, layer by layer, without the tensors with names that match `ignored`."""
        return nullcontext()

    @cached_property
    def _uploader(self) -> Uploader:
        return Uploader()

    @cached_property
    def fingerprint(self) -> str:
        """128 bits in hex that identify a model's weights, equal on every machine with the same files.

        A hash over the configuration, every tensor's name, type and shape, and samples of its bytes."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self.names():
            digest.update(json.dumps([name, self.type_name(name), self.shape(name)]).encode())
            data = self._stored(name)
            for start in (0, len(data) // 2, max(0, len(data) - _SAMPLE_BYTES)):
                digest.update(data[start : start + _SAMPLE_BYTES])
        return digest.hexdigest()[:32]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a result of `resolve`: a .gguf file, or a folder with config.json and safetensors files.

    Reads only headers. Raises CallboardError with the file, the tensor and the reason if one is damaged."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path)
    raise CallboardError(f"{path} is neither a folder with safetensors files nor a .gguf file.")


class GgufCheckpoint(Checkpoint):
    """A GGUF file of a supported architecture."""

    def __init__(self, path: Path) -> None:
        text = read_gguf_model(GgufFile(path))
        tower = find_tower(path, text)  # its config has the text's
        self._models = [text] if tower is None else [text, tower.model]
        self._image_rule = None if tower is None else tower.rule
        self.config = self._models[-1].config
        self.eos_token_ids = gguf_eos_token_ids(text.file)

    @property
    def image_rule(self) -> ImageRule | None:
        return self._image_rule

    def names(self) -> list[str]:
        return sorted(name for model in self._models for name in model.sources)

    def __contains__(self, name: str) -> bool:
        return any(name in model.sources for model in self._models)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32  # what `dequantize` returns

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        source, raw = self._source(name), self._model(name).raw(name)
        stored_shape = list(source.shape[::-1] if source.transposed else source.shape)
        step, columns = max(1, _DEQUANTIZED_AT_ONCE // stored_shape[-1]), slice(None)
        if part is not None:
            dim = len(stored_shape) - 1 - part.dim if source.transposed else part.dim
            stored_shape[dim] = part.stop - part.start
            if dim == len(stored_shape) - 1:  # blocks lie along it, and are dequantized whole
                columns = slice(part.start, part.stop)
            elif dim == 0:
                raw = raw[part.start : part.stop]
        out = torch.empty(stored_shape, dtype=dtype, device=device)
        rows = out.view(len(raw), -1)
        for start in range(0, len(raw), step):
            weights = dequantize(raw[start : start + step], source.tensor.type_name)[:, columns]
            if source.plus_one:
                weights = weights - np.float32(1)
            if source.is_decay:
                weights = np.log(-weights)
            # A row slice may be a read-only view of the file; from_numpy takes writable arrays only.
            rows[start : start + step] = torch.from_numpy(weights if weights.flags.writeable else weights.copy())
        self._model(name).file.forget(source.tensor.name)
        return out.T.contiguous() if source.transposed else out

    def blocks(
        self, name: str, num_bytes: int, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        source, raw, device = self._source(name), self._model(name).raw(name), torch.device(device)
        blocks = raw.reshape(len(raw), -1, num_bytes)
        if part is not None:
            blocks = blocks[(slice(None),) * part.dim + (slice(part.start, part.stop),)]
        out = torch.empty(blocks.shape, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self._uploader.upload(np.ascontiguousarray(blocks).reshape(-1).data, out.view(-1))
        else:
            out.numpy()[...] = blocks
        self._model(name).file.forget(source.tensor.name)
        return out

    def _model(self, name: str) -> GgufModel:
        """The file with a tensor."""
        if name not in self:
            raise CallboardError(f"{self._models[0].file.path} has no tensor {name!r}; the file is incomplete.")
        return next(model for model in self._models if name in model.sources)

    def _source(self, name: str) -> Source:
        return self._model(name).sources[name]

    def type_name(self, name: str) -> str:
        return self._source(name).tensor.type_name

    def _stored(self, name: str) -> memoryview:
        return self._model(name).file.raw(self._source(name).tensor.name).reshape(-1).data


class _Stored(NamedTuple):
    """A tensor as its safetensors file announces it."""

    path: Path
    name: str  # the tensor's name in the file
    type_name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place | None = None  # its place in a tensor with all experts; None for a whole tensor


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files, one or several with an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = model_config(folder)
        self.eos_token_ids = folder_eos_token_ids(folder, self.config)
        self._tensors: dict[str, _Stored] = {}
        in_turn, hidden = has_experts_in_turn(self.config), hidden_size(self.config)
        for path in weight_files(folder):
            tensors = _header(path, in_turn, hidden)
            for name in tensors.keys() & self._tensors.keys():
                raise CallboardError(f"{path}: tensor {name!r} is in another file of {folder} too.")
            self._tensors |= tensors
        self._ahead: ReadAhead | None = None
        self._experts: dict[tuple[str, int], torch.Tensor] = {}  # the last few on a GPU, by tensor and expert
        self._starts: dict[str, tuple[Path, int]] = {}  # each tensor's first byte in the files
        self._path, self._file, self._num_mapped = path, open_safetensors(path), 0  # the file that was read last
        if (folder / INDEX_NAME).exists():
            found = {stored.name for stored in self._tensors.values()}
            for name, file_name in read_json(folder / INDEX_NAME)["weight_map"].items():
                if name not in found:
                    raise CallboardError(f"{folder / file_name} lacks tensor {name!r}, which {INDEX_NAME} puts there.")

    @property
    def image_rule(self) -> ImageRule | None:
        return image_rule(self._folder)

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._announced(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._announced(name).dtype

    def type_name(self, name: str) -> str:
        return self._announced(name).type_name

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        mapped, device = self._mapped(name), torch.device(device)
        if self._ahead is not None:
            self._ahead.reached(*self._starts[self._announced(name).name])
        if part is not None:
            mapped = mapped.narrow(part.dim, part.start, part.stop - part.start)
        self._num_mapped += mapped.nbytes
        if device.type != "cuda":
            return mapped.to(device, dtype, copy=True)
        place = self._announced(name).place
        if part is None and place is not None and not mapped.is_contiguous():  # the GPU takes rows out faster
            own = place.rows(self._expert(self._announced(name).name, place.expert, device))
            return own.to(dtype, memory_format=torch.contiguous_format, copy=True)
        return self._uploaded(mapped, device).to(dtype)

    def _expert(self, name: str, expert: int, device: torch.device) -> torch.Tensor:
        """Return an expert's part of a tensor with all experts, on a GPU. Its weights are read one after another."""
        if (own := self._experts.pop((name, expert), None)) is None:
            own = self._uploaded(self._file.get_tensor(name)[expert], device)
        if self._ahead is not None:
            self._experts[name, expert] = own
            if len(self._experts) > _KEPT_EXPERTS:
                del self._experts[next(iter(self._experts))]
        return own

    def _uploaded(self, mapped: torch.Tensor, device: torch.device) -> torch.Tensor:
        source = torch.empty(mapped.shape, dtype=mapped.dtype, device=device)
        self._uploader.upload(_bytes_of(mapped), source.view(-1).view(torch.uint8))
        return source

    @contextmanager
    def reading_ahead(self, ignored: str) -> Iterator[None]:
        ranges = {name: own for path in weight_files(self._folder) for name, own in byte_ranges(path).items()}
        self._starts = {name: (path, start) for name, (path, start, _) in ranges.items()}
        names = sorted((name for name in ranges if not re.fullmatch(ignored, name)), key=_layer_of)
        with ReadAhead(ranges[name] for name in names) as self._ahead:
            try:
                yield
            finally:
                self._ahead = None
                self._experts.clear()

    def _announced(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise CallboardError(f"{self._folder} has no tensor {name!r}; the checkpoint is incomplete.")
        return self._tensors[name]

    def _stored(self, name: str) -> memoryview:
        mapped, place = self._mapped(name), self._announced(name).place
        if place is not None and not mapped.is_contiguous():  # the expert's rows are a view without a copy
            mapped = self._file.get_tensor(self._announced(name).name)[place.expert]
        return _bytes_of(mapped)

    def _mapped(self, name: str) -> torch.Tensor:
        """Return a tensor in its file's pages. They count as memory of this process until the file is reopened."""
        stored = self._announced(name)
        path = stored.path
        if path != self._path or self._num_mapped > _MOST_MAPPED:
            self._path, self._file, self._num_mapped = path, open_safetensors(path), 0
        tensor: torch.Tensor = self._file.get_tensor(stored.name)
        return tensor if stored.place is None else stored.place.of(tensor)


def open_safetensors(path: Path) -> Any:
    """Return a safetensors file; raises CallboardError if its header is not in order."""
    try:
        return safe_open(path, "pt")
    except OSError as e:
        raise CallboardError(f"{path} cannot be read: {e.strerror or e}.") from e
    except SafetensorError as e:
        raise CallboardError(f"{path}: the file is damaged or cut off ({e}); fetch it again.") from e


def byte_ranges(path: Path) -> dict[str, ByteRange]:
    """The bytes of each tensor in a safetensors file, which is in order.

    Layout: the header's length in eight bytes | the header in JSON | the data, from which offsets count."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: ByteRange(path, start + first, start + last) for name, (first, last) in offsets.items()}


def _layer_of(name: str) -> int:
    """The first number in a tensor's name: its layer, or -1."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else -1


def _header(path: Path, in_turn: bool, hidden: int) -> dict[str, _Stored]:
    """The tensors of a safetensors file; raises CallboardError if one has a type that torch does not know."""
    file, tensors = open_safetensors(path), {}
    for name in file.keys():  # noqa: SIM118
        type_name = file.get_slice(name).get_dtype()
        try:
            tensor = file.get_tensor(name)
        except SafetensorError as e:
            raise CallboardError(f"{path}: tensor {name!r} has the type {type_name}, which is not supported.") from e
        stored = _Stored(path, name, type_name, tensor.dtype, tuple(tensor.shape))
        singles = single_weights(name, stored.shape, in_turn, hidden)
        for single, place in singles.items():
            tensors[single] = stored._replace(shape=place.shape(stored.shape), place=place)
        if not singles:
            tensors[name] = stored
    return tensors


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in C order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
