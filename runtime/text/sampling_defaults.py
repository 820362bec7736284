"""The sampling parameters that a model's makers recommend: the defaults of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.base.config import DEFAULT_MODEL, DEFAULT_MODEL_SAMPLING
from runtime.base.sampling_fields import table_of
from runtime.base.types import CallboardError, SamplingParams
from runtime.loading.folder import read_json
from runtime.loading.gguf import GgufFile

# Fields in generation_config.json, and in a GGUF file's metadata below general.sampling.
_FIELDS = {f.name: f.gguf for f in table_of(SamplingParams).fields if f.gguf}
RECOMMENDED = "recommended for the default model"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The fields of SamplingParams that a model's files set. The others have OpenAI's defaults."""

    values: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # the file's name, or RECOMMENDED; empty without values

    @classmethod
    def load(cls, path: Path, use: Literal["auto", "none"] = "auto", model: str = "") -> SamplingDefaults:
        """Read the defaults of a model folder or a .gguf file; without any, use the recommendation for `model`.

        Raises CallboardError if a value is out of range."""
        if use == "none":
            return cls()
        if path.is_dir():
            file = path / "generation_config.json"
            found = read_json(file) if file.exists() else {}
        else:
            file, metadata = path, GgufFile(path).metadata
            found = {name: metadata.get(f"general.sampling.{key}") for name, key in _FIELDS.items()}
        values = {name: found[name] for name in _FIELDS if found.get(name) is not None}
        if (top_k := values.get("top_k")) in (-1, 0):  # off, as in many files
            del values["top_k"]
        try:
            for name, value in values.items():
                if type(value) not in (int, float) or (name == "top_k" and type(top_k) is not int):
                    raise CallboardError(f"{name} is {str(value)[:40]!r}; it must be a number.")
            SamplingParams(**values)
        except CallboardError as e:
            raise CallboardError(f"{file}: {str(e).rstrip('.')}, or pass --generation-config none.") from None
        if not values and model == DEFAULT_MODEL:
            return cls(dict(DEFAULT_MODEL_SAMPLING), RECOMMENDED)
        return cls(values, file.name if values else "")

    def params(self, **given: Any) -> SamplingParams:
        """Return SamplingParams with the given fields that are not None, and the model's defaults for the others."""
        return SamplingParams(**(self.values | {name: value for name, value in given.items() if value is not None}))

    def __str__(self) -> str:
        if not self.values:
            return "none: temperature 1 and no filter, unless a request says otherwise"
        return f"{', '.join(f'{name} {value:g}' for name, value in self.values.items())} ({self.source})"
