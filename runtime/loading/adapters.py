"""Adapters (LoRA) as peft writes them: a folder with adapter_config.json and adapter_model.safetensors.

Only headers are read here, and without torch. What would change an answer in a way that is not supported is refused by
name; fields that only say how an adapter was trained, or which maps it has, do not matter: its tensors say that, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from runtime.core.types import CallboardError
from runtime.loading.folder import own_file, read_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_TYPES = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
# Fields of the config that ask for more than matrices beside linear maps, unless they have one of these values.
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
_MOST_HEADER_BYTES = 100 << 20  # as the format's own readers allow


class AdaptedMap(NamedTuple):
    """The addition of an adapter to one linear map: scale * B (A x), with A [rank, in] and B [out, rank]."""

    a: str  # names of the tensors
    b: str
    rank: int
    size_in: int
    size_out: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's files, whose headers are in order."""

    path: Path
    digest: str  # of all that is in them, 128 bits in hex
    maps: Mapping[str, AdaptedMap]  # by the name of the module in the model, `model.layers.0.self_attn.q_proj` say

    @property
    def weights(self) -> Path:
        """The safetensors file."""
        return self.path / _WEIGHTS

    @property
    def rank(self) -> int:
        """The highest of its maps."""
        return max(one.rank for one in self.maps.values())

    def check_rank(self, max_lora_rank: int) -> None:
        """Raises CallboardError if it does not fit into what is set aside for an adapter."""
        if self.rank > max_lora_rank:
            raise CallboardError(
                f"The adapter in {self.path} has rank {self.rank}; start with max_lora_rank {self.rank} or more "
                f"(it is {max_lora_rank})."
            )


def read_adapter(path: str | Path) -> Adapter:
    """The adapter in a folder. Raises CallboardError with the first thing about it that is damaged or not supported."""
    folder = Path(path)
    config_path, weights_path = own_file(folder, _CONFIG), own_file(folder, _WEIGHTS)
    if config_path is None:
        raise CallboardError(f"{folder} has no {_CONFIG}; name a folder that peft's save_pretrained has written.")
    config = read_json(config_path)
    _check(config, config_path)
    if weights_path is None:
        hint = (
            " (.bin files are pickles, which can run code, and are never read)"
            * (folder / "adapter_model.bin").exists()
        )
        raise CallboardError(f"{folder} has no {_WEIGHTS}; save the adapter as safetensors{hint}.")
    try:
        data = weights_path.read_bytes()
    except OSError as e:
        raise CallboardError(f"{weights_path} cannot be read: {e.strerror}.") from e
    digest = blake2b(config_path.read_bytes() + b"\0", digest_size=16)
    digest.update(data)
    return Adapter(folder, digest.hexdigest(), _maps(config, _header(data, weights_path), weights_path))


def _check(config: dict[str, Any], path: Path) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise CallboardError(f"{path}: peft_type is {kind!r}; only LORA is supported.")
    for name, neutral in _NEUTRAL.items():
        if (value := config.get(name)) is not None and value not in neutral:
            raise CallboardError(f"{path}: {name} is {value!r}, which is not supported; train the adapter without it.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_MODEL):
        raise CallboardError(
            f"{path}: init_lora_weights is {start!r}, which changes the model's own weights, too; convert the adapter "
            "with peft's path_initial_model_for_weight_conversion."
        )


def _header(data: bytes, path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: their types, shapes and places."""
    size = int.from_bytes(data[:8], "little")
    try:
        if not 0 < size <= min(len(data) - 8, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        tensors = json.loads(data[8 : 8 + size])
        tensors.pop("__metadata__", None)
        if max((one["data_offsets"][1] for one in tensors.values()), default=0) != len(data) - 8 - size:
            raise ValueError("its length is not what the header says")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise CallboardError(f"{path}: the file is damaged or cut off ({e}); fetch it again.") from e
    header: dict[str, Any] = tensors
    return header


def _maps(config: dict[str, Any], tensors: dict[str, Any], path: Path) -> dict[str, AdaptedMap]:
    pairs: dict[str, dict[str, str]] = {}
    for name, one in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CallboardError(
                f"{path} has the tensor {name}, which is none of a linear map's lora_A and lora_B; only those are "
                "supported."
            )
        if one.get("dtype") not in _TYPES or len(one.get("shape", ())) != 2:
            raise CallboardError(
                f"{path}: tensor {name} is {one.get('dtype')} of shape {one.get('shape')}; it must be a matrix of "
                f"{', '.join(_TYPES)}."
            )
        pairs.setdefault(match[1], {})[match[2]] = name
    if not pairs:
        raise CallboardError(f"{path} has no tensors.")
    maps = {}
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise CallboardError(f"{path} has lora_{min(pair)} of {module} and not the other one of lora_A and lora_B.")
        (rank, size_in), (size_out, b_rank) = (tensors[pair[kind]]["shape"] for kind in "AB")
        wanted = _of_module(config, "r", "rank_pattern", module, path)
        if not rank == b_rank == wanted or rank < 1:
            raise CallboardError(
                f"{path}: lora_A and lora_B of {module} have ranks {rank} and {b_rank}, where {_CONFIG} says {wanted}."
            )
        alpha = _of_module(config, "lora_alpha", "alpha_pattern", module, path)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        maps[module] = AdaptedMap(pair["A"], pair["B"], rank, size_in, size_out, scale)
    return maps


def _of_module(config: dict[str, Any], name: str, pattern_name: str, module: str, path: Path) -> float:
    """A number of the config, or that of the first pattern that matches the module's name or an end of it."""
    value = config.get(name)
    for pattern, own in (config.get(pattern_name) or {}).items():
        try:
            found = re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module, re.DOTALL)
        except re.error as e:
            raise CallboardError(f"{path.parent / _CONFIG}: {pattern_name} has {pattern!r}: {e}.") from e
        if found:
            value = own
            break
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CallboardError(f"{path.parent / _CONFIG}: {name} of {module} is {value!r}; it must be a number.")
    return value
