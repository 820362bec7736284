"""The choice among several GGUF files. Their names contain the quantization, and large ones are split."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.base.types import CallboardError

DEFAULT = "Q4_K_M"  # what llama.cpp and Ollama choose
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_LABEL = re.compile(
    r"(?:^|[-._])(?P<label>(?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?))$",
    re.IGNORECASE,
)
_IMAGE_ENCODER = re.compile(r"mmproj", re.IGNORECASE)
_OTHER_FILES = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # image encoders; data for quantization
_ENCODER_LABELS = ("BF16", "F16", "FP16", "F32", "FP32")  # the preferred ones, best first


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in one file or in parts."""

    files: tuple[str, ...]  # the first part first
    label: str  # its quantization, such as Q4_K_M; empty if its name has none

    def __str__(self) -> str:
        return self.label or self.files[0]


def gguf_models(names: Iterable[str]) -> list[GgufModel]:
    """Return the models among one folder's files, in name order.

    A split model has all files that its first name announces, even if some are missing."""
    models: dict[str, GgufModel] = {}
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        if not file.endswith(".gguf") or _OTHER_FILES.search(file):
            continue
        stem, prefix = file.removesuffix(".gguf"), f"{folder}/" if folder else ""
        files: tuple[str, ...] = (name,)
        if (split := _SPLIT.fullmatch(stem)) and int(split["count"]):
            stem, count = split["stem"], int(split["count"])
            files = tuple(f"{prefix}{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, min(count, 9999) + 1))
        match = _LABEL.search(stem) or _LABEL.fullmatch(folder.rpartition("/")[2])
        models.setdefault(files[0], GgufModel(files, match["label"].upper() if match else ""))
    return list(models.values())


def image_encoders(names: Iterable[str]) -> list[str]:
    """Return the image encoders among one folder's files, the preferred one first."""

    def place(name: str) -> tuple[int, str]:
        words = re.split(r"[-._]", name.upper())
        return next((i for i, label in enumerate(_ENCODER_LABELS) if label in words), len(_ENCODER_LABELS)), name

    files = (name for name in names if name.endswith(".gguf") and _IMAGE_ENCODER.search(name.rpartition("/")[2]))
    return sorted(files, key=place)


def choose(models: Sequence[GgufModel], asked: str, where: str) -> GgufModel:
    """Return the model with the quantization or the file `asked`; by default Q4_K_M, or else the first.

    Raises CallboardError with the choices in `where` if none matches."""
    if not asked:
        return next((model for model in models if model.label == DEFAULT), models[0])
    wanted = asked.upper()
    rules = (
        lambda model: wanted in (file.upper() for file in model.files),
        lambda model: wanted in (file.rpartition("/")[2].upper() for file in model.files),
        lambda model: wanted == model.label,
        lambda model: wanted == model.label.removeprefix("UD-"),
        lambda model: wanted in model.files[0].upper() and not wanted.endswith(".GGUF"),
    )
    for meant in rules:
        if found := next(filter(meant, models), None):
            return found
    raise CallboardError(f"{where} has no GGUF file {asked!r}; it has {', '.join(map(str, models)) or 'none'}.")
