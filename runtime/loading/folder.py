"""Files of a Hugging Face style model folder that several readers need, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError
from runtime.models.families.defaults import with_defaults

INDEX_NAME = "model.safetensors.index.json"
# Files from exporters that do not write to config.json -> the missing quant_method.
_QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_HEADS = re.compile("eagle|dflash|dspark|medusa|gemma4(unified)?assistant", re.IGNORECASE)
_HEAD_FIELDS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
_MOST_HEAD_LAYERS = 4  # an EAGLE-1 head has the config.json of a small Llama


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CallboardError if the file is missing or invalid."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CallboardError(f"{path} cannot be read: {e.strerror}.") from e
    return json_object(data, path)


def json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file. Raises CallboardError if they are invalid."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CallboardError(f"{path} is not valid JSON: {e}.") from e
    if not isinstance(value, dict):
        raise CallboardError(f"{path} holds a JSON {type(value).__name__}; an object is needed.")
    return value


def model_config(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json, with the quantization's description from a separate file if there is one."""
    config = read_json(folder / "config.json")
    for name, method in _QUANTIZATION_FILES.items():
        if "quantization_config" not in config and (folder / name).exists():
            config["quantization_config"] = {"quant_method": method} | read_json(folder / name)
    return config


def own_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a model folder, with a text for clients; None if it is missing.

    Raises CallboardError if it is a link to a file elsewhere: an untrusted folder could expose any file on this
    machine. Links in the hub's cache, from a snapshot to the blobs next to it, are allowed."""
    path, home = folder / name, folder.resolve()
    if not path.exists():
        return None
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(path.resolve().is_relative_to(h) for h in homes):
        raise CallboardError(f"{path} is a link to {path.resolve()}, outside the model's folder; copy that file there.")
    return path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sharded or single, in a fixed order.

    Raises CallboardError if there are none, or if it is not clear which ones belong together."""
    if (folder / INDEX_NAME).exists():
        weight_map = read_json(folder / INDEX_NAME).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(n, str) and n and n == Path(n).name and "\0" not in n for n in names):
            raise CallboardError(f"{folder / INDEX_NAME} has no 'weight_map' from tensors to files beside it.")
        return [folder / name for name in sorted(set(names))]
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return [folder / "model.safetensors"]
    if len(files) == 1:
        return files
    if files:
        raise CallboardError(f"{folder} has {len(files)} safetensors files and no {INDEX_NAME} to say what is in them.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CallboardError(
            f"{folder} has weights only as .bin or .pt files, which are pickles and can run code; "
            "convert them to safetensors."
        )
    raise CallboardError(
        f"{folder} has no *.safetensors file (.bin checkpoints are pickles, which can run code, and are never read)."
    )


def folder_eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids in generation_config.json, or else in config.json with its defaults; empty if neither
    names any that the vocabulary has."""
    path = folder / "generation_config.json"
    sources = [read_json(path) if path.exists() else {}, config, config.get("text_config")]
    named = config.get("architectures")
    if not any("eos_token_id" in source for source in sources if isinstance(source, dict)) and isinstance(named, list):
        completed = with_defaults(config, str(named[0])) if named else {}
        ids, size = completed.get("eos_token_id"), completed.get("vocab_size")
        own = [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(size, int) and i is not None]
        sources.append({"eos_token_id": [i for i in own if i < size]})
    for source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        if type(ids) is int:
            return (ids,)
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return tuple(ids)
    return ()


def is_head_folder(path: Path) -> bool:
    """Return True if a folder's config.json describes a draft head, not a model.

    EAGLE-1 heads have a Llama's config; their file has the tensor fc.weight."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    if any(config.get(field) is not None for field in _HEAD_FIELDS) or _HEADS.search(_architecture(config)):
        return True
    return may_be_eagle1(config) and not _tensor_names(path).isdisjoint({"fc.weight", "model.fc.weight"})


def may_be_eagle1(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a small Llama, which EAGLE-1 heads have."""
    layers = config.get("num_hidden_layers")
    return _architecture(config) == "LlamaForCausalLM" and isinstance(layers, int) and layers <= _MOST_HEAD_LAYERS


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _tensor_names(folder: Path) -> set[str]:
    """The tensors in a folder's safetensors files; empty if their headers cannot be read, which loading reports."""
    names = set[str]()
    try:
        for path in weight_files(folder):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                names |= json.loads(file.read(min(size, path.stat().st_size))).keys()
    except (CallboardError, OSError, ValueError, AttributeError):
        return set()
    return names
