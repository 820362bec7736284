"""Adapters (LoRA) as peft writes them: a folder with adapter_config.json and adapter_model.safetensors.

This module parses only headers, without torch. It refuses unsupported fields that would change an answer, by name. It
ignores fields about training, and the list of maps: the tensors show the maps.

A folder may come from a client, and this code runs in the engine's process. So sizes are bounded, and the folder's
texts are not used as regular expressions."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from runtime.base.types import CallboardError
from runtime.loading.adapter_patterns import Patterns
from runtime.loading.folder import json_object, own_file

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES, _MOST_HEADER_BYTES, _MOST_WEIGHT_BYTES = 1 << 20, 4 << 20, 32 << 30
_MOST_ALPHA, _MOST_NAME_CHARS = 1e9, 512
_READ_BYTES = 1 << 20  # a file piece
_SHOWN = 200  # characters of a folder's text in an error
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Config fields that are supported only with one of these values: others need more than matrices.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "modules_to_save": ((), []),
    "bias": ("none",),
    "lora_bias": (False,),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
}
_CHANGES_THE_MODEL = ("pissa", "olora", "loftq", "corda", "lora_ga")  # values of init_lora_weights


class TensorPlace(NamedTuple):
    """A matrix in the safetensors file."""

    dtype: str  # safetensors's name
    rows: int
    columns: int
    offset: int  # bytes from the file's start


class AdaptedMap(NamedTuple):
    """The addition of an adapter to one linear map: scale * B (A x), with A [rank, in] and B [out, rank]."""

    a: TensorPlace
    b: TensorPlace
    scale: float

    @property
    def rank(self) -> int:
        return self.a.rows

    @property
    def size_in(self) -> int:
        return self.a.columns

    @property
    def size_out(self) -> int:
        return self.b.rows


@dataclass(frozen=True)
class Adapter:
    """An adapter's files, with valid headers."""

    path: Path
    config: bytes
    head: bytes  # the weight file's bytes before the first matrix
    maps: Mapping[str, AdaptedMap]  # key: the module's name in the model, such as `model.layers.0.self_attn.q_proj`

    @cached_property
    def digest(self) -> str:
        """The hash of both files, 128 bits in hex. Reads the weights. Raises CallboardError."""
        hashed = blake2b(self.config + b"\0", digest_size=16)
        with _opened(self.path / _WEIGHTS, _MOST_WEIGHT_BYTES) as file:
            while piece := file.read(_READ_BYTES):
                hashed.update(piece)
        return hashed.hexdigest()

    def read(self, digest: str = "") -> bytearray:
        """Read the bytes of the weights. Raises CallboardError if the files have another digest."""
        path = self.path / _WEIGHTS
        with _opened(path, _MOST_WEIGHT_BYTES) as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            num_read = file.readinto(data)
        hashed = blake2b(self.config + b"\0", digest_size=16)
        hashed.update(data)
        is_same = not digest or hashed.hexdigest() == digest
        end = max(place.offset + _num_bytes(place) for one in self.maps.values() for place in (one.a, one.b))
        if not is_same or not data.startswith(self.head) or num_read != len(data) or num_read < end:
            raise CallboardError(f"The files of the adapter in {self.path} have changed; load it again.")
        return data

    @property
    def rank(self) -> int:
        """The highest rank of its maps."""
        return max(one.rank for one in self.maps.values())

    def check_rank(self, max_lora_rank: int) -> None:
        """Raise CallboardError if the rank exceeds the limit."""
        if self.rank > max_lora_rank:
            raise CallboardError(
                f"The adapter in {self.path} has rank {self.rank}; start with max_lora_rank {self.rank} or more "
                f"(it is {max_lora_rank})."
            )


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a folder. Raises CallboardError for the first damaged or unsupported part."""
    folder = Path(path)
    config_path, weights_path = own_file(folder, CONFIG), own_file(folder, _WEIGHTS)
    if config_path is None:
        raise CallboardError(f"{folder} has no {CONFIG}; name a folder that peft's save_pretrained has written.")
    with _opened(config_path, _MOST_CONFIG_BYTES) as file:
        data = file.read(_MOST_CONFIG_BYTES)
    config = json_object(data, config_path)
    _check(config, config_path)
    if weights_path is None:
        hint = (
            " (.bin files are pickles, which can run code, and are never read)"
            * (folder / "adapter_model.bin").exists()
        )
        raise CallboardError(f"{folder} has no {_WEIGHTS}; save the adapter as safetensors{hint}.")
    with _opened(weights_path, _MOST_WEIGHT_BYTES) as file:
        head, tensors = _header(file, weights_path)
    return Adapter(folder, data, head, _maps(config, tensors, len(head), weights_path))


def _opened(path: Path, most_bytes: int) -> BufferedReader:
    """Open a regular file of a bounded size. Raises CallboardError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CallboardError(f"{path} is not a regular file; an adapter is read from regular files alone.")
        if found.st_size > most_bytes:
            raise CallboardError(
                f"{path} has {found.st_size} bytes, and at most {most_bytes} are read; make it smaller."
            )
        return path.open("rb")
    except OSError as e:
        raise CallboardError(f"{path} cannot be read: {e.strerror}.") from e


def _shown(text: str) -> str:
    """Return a folder's text for an error: one line with a bounded length."""
    text = "".join(c if c.isprintable() else "?" for c in text[: _SHOWN + 1])
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _num_bytes(place: TensorPlace) -> int:
    return place.rows * place.columns * _ITEM_BYTES[place.dtype]


def _check(config: dict[str, Any], path: Path) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise CallboardError(f"{path}: peft_type is {_shown(repr(kind))}; only LORA is supported.")
    for name, neutral in _NEUTRAL.items():
        if (value := config.get(name)) is not None and value not in neutral:
            text = f"{path}: {name} is {_shown(repr(value))}, which is not supported"
            raise CallboardError(f"{text}; train the adapter without it.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_MODEL):
        raise CallboardError(
            f"{path}: init_lora_weights is {_shown(repr(start))}, which changes the model's own weights, too; convert "
            "the adapter with peft's path_initial_model_for_weight_conversion."
        )


def _header(file: BufferedReader, path: Path) -> tuple[bytes, dict[str, Any]]:
    """Read the header of a safetensors file: its bytes, and its entry for each tensor. Raises CallboardError."""
    num_bytes = os.fstat(file.fileno()).st_size
    head = file.read(8)
    size = int.from_bytes(head, "little")
    try:
        if not 0 < size <= num_bytes - 8:
            raise ValueError("its header is longer than the file")
        if size > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {size} bytes, and at most {_MOST_HEADER_BYTES} are read")
        head += file.read(size)
        header = json.loads(head[8:])
        header.pop("__metadata__", None)
        if max((one["data_offsets"][1] for one in header.values()), default=0) != num_bytes - 8 - size:
            raise ValueError("its length is not what the header says")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise CallboardError(f"{path}: the file is damaged or cut off ({_shown(str(e))}); fetch it again.") from e
    return head, header


def _place(name: str, one: dict[str, Any], start: int, path: Path) -> TensorPlace:
    """Return a tensor's place. Raises CallboardError if it is not a matrix with a supported type."""
    dtype, shape, where = one.get("dtype"), one.get("shape", ()), one["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES or not isinstance(shape, list) or len(shape) != 2:
        raise CallboardError(
            f"{path}: tensor {_shown(name)} is {_shown(str(dtype))} of shape {_shown(str(shape))}; it must be a matrix "
            f"of {', '.join(_ITEM_BYTES)}."
        )
    if not all(type(n) is int and n >= 0 for n in (*shape, *where)):
        raise CallboardError(f"{path}: tensor {_shown(name)} has a negative size or place; fetch the file again.")
    place = TensorPlace(dtype, shape[0], shape[1], start + where[0])
    if where[1] - where[0] != _num_bytes(place):
        raise CallboardError(f"{path}: tensor {_shown(name)} has another size than its shape; fetch the file again.")
    return place


def _maps(config: dict[str, Any], tensors: dict[str, Any], start: int, path: Path) -> dict[str, AdaptedMap]:
    """Return the maps of the tensors in a header. Tensor bytes begin at `start`. Raises CallboardError."""
    pairs: dict[str, dict[str, TensorPlace]] = {}
    for name, one in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or len(name) > _MOST_NAME_CHARS:
            raise CallboardError(
                f"{path} has the tensor {_shown(name)}, which is none of a linear map's lora_A and lora_B; only those "
                "are supported."
            )
        pairs.setdefault(match[1], {})[match[2]] = _place(name, one, start, path)
    if not pairs:
        raise CallboardError(f"{path} has no tensors.")
    config_path = path.parent / CONFIG
    ranks = Patterns(config.get("rank_pattern"), f"{config_path}: rank_pattern")
    alphas = Patterns(config.get("alpha_pattern"), f"{config_path}: alpha_pattern")
    maps = {}
    for module, pair in pairs.items():
        shown = _shown(module)
        if len(pair) < 2:
            raise CallboardError(f"{path} has lora_{min(pair)} of {shown} and not the other one of lora_A and lora_B.")
        a, b = pair["A"], pair["B"]
        wanted = _number(ranks.value(module, config.get("r")), f"{config_path}: r of {shown}")
        if not a.rows == b.columns == wanted or wanted < 1:
            raise CallboardError(
                f"{path}: lora_A and lora_B of {shown} have ranks {a.rows} and {b.columns}, where {CONFIG} says "
                f"{wanted}."
            )
        alpha = _number(alphas.value(module, config.get("lora_alpha")), f"{config_path}: lora_alpha of {shown}")
        maps[module] = AdaptedMap(a, b, alpha / (math.sqrt(a.rows) if config.get("use_rslora") else a.rows))
    return maps


def _number(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MOST_ALPHA:
        raise CallboardError(f"{name} is {_shown(repr(value))}; it must be a number of at most {_MOST_ALPHA:g}.")
    return float(value) if isinstance(value, float) else int(value)
