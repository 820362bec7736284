"""The reports of `callboard models`: a line for each family, or some families' details."""

from __future__ import annotations

import difflib
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.rope_spec import RopeType
from runtime.base.types import CallboardError
from runtime.loading import folder
from runtime.loading.gguf import ggml_types
from runtime.loading.gguf_architectures import ARCHITECTURES
from runtime.loading.sources.short_names import SHORT_NAMES
from runtime.models import FAMILIES, Family, load_spec
from runtime.models.families.defaults import with_defaults
from runtime.models.heads.names import QWEN, names_of
from runtime.models.published import PUBLISHED
from runtime.models.towers.specs import takes_images
from runtime.quant import METHODS

_GIB = 1 << 30
_CONTEXT = 8192  # tokens in the KV cache, for the memory report
_FORMS = ("bfloat16", "int8", "int4")  # weight formats in the memory report
_QUANTIZED_FORMS = ("its files", "bfloat16")  # formats for a family that publishes quantized files
_SIZE = r"(?:\d+x|E)?\d+(?:\.\d+)?[MB](?:-A\d+B)?"
_LIMITS = re.compile(r", (?:without .*|text alone)")  # follows the models' names
_LABEL_WIDTH, _WIDTH = 14, 110


def family_table() -> str:
    """Return a line for each family, and the meaning of the columns."""
    head = ("family", "sizes", "images", "tool calls", "reasoning", "files", "verified")
    rows = [head, *(_row(architecture, family) for architecture, family in FAMILIES.items())]
    methods = ", ".join(method for method in METHODS if method != "gguf")
    return "\n".join([
        *_columns(rows),
        "",
        "sizes: those with a known shape or an example; others of a family run, too",
        "images: models with an image encoder take them (docs/images.md)",
        "tool calls, reasoning: of published chat templates; of a model on disk: `callboard inspect MODEL`",
        "logits: logits and greedy tokens of random weights, against transformers",
        f"quantized weights: GGUF, or safetensors by {methods}",
        *textwrap.wrap(f"short names, such as qwen3:0.6b: {', '.join(SHORT_NAMES)}", _WIDTH),
        "details and GPU memory: callboard models NAME",
    ])  # fmt: skip


def family_details(name: str) -> str:
    """Return the details of the families with this name. Raises CallboardError for an unknown name."""
    wanted = _plain(name)
    words = [(word, architecture) for architecture, family in FAMILIES.items() for word in _words(architecture, family)]
    found = [architecture for word, architecture in words if word == wanted]
    found = found or [architecture for word, architecture in words if wanted and (wanted in word or word in wanted)]
    if not found:
        names = {
            _plain(word): word for family in FAMILIES.values() for word in re.findall(r"[A-Z][\w-]+", family.models)
        }
        near = difflib.get_close_matches(wanted, names, 1)
        meant = f"did you mean {names[near[0]]}?" if near else "see `callboard models` for all."
        raise CallboardError(f"No family is called {name!r}; {meant}")
    parts = ["\n".join(_details(architecture, FAMILIES[architecture])) for architecture in dict.fromkeys(found)]
    tags = {short: tags for short, tags in SHORT_NAMES.items() if wanted.startswith(_plain(short)) or wanted in short}
    parts += ["short names:\n" + "\n".join(_line(short, ", ".join(tags[short])) for short in tags)] if tags else []
    return "\n\n".join(parts)


def _words(architecture: str, family: Family) -> Iterator[str]:
    """Yield the names of a family and its models, reduced to letters and digits."""
    yield _plain(architecture)
    yield _plain(family.models)
    yield _plain(family.example)
    yield from map(_plain, _configs(architecture))


def _plain(text: str) -> str:
    return re.sub("[^a-z0-9.]", "", text.lower())


def _configs(architecture: str) -> dict[str, dict[str, Any]]:
    """Return the configs of models with known shapes."""
    return {name: config for name, config in PUBLISHED.items() if config["architectures"] == [architecture]}


def _published(architecture: str) -> list[str]:
    """Return the models of known shape, small ones first."""
    found = _configs(architecture)
    return sorted(found, key=lambda name: _num_parameters(load_spec(found[name])[0]))


def _num_parameters(spec: DecoderSpec) -> int:
    return sum(math.prod(shape) for shape in spec.shapes().values())


def _row(architecture: str, family: Family) -> tuple[str, ...]:
    name = re.sub(rf",? ?-?\b{_SIZE}\b", "", _LIMITS.sub("", family.models), flags=re.IGNORECASE)
    formats = ", ".join(dict.fromkeys(chat.tools for chat in family.chats))
    reasons = "yes" if any(chat.reasons for chat in family.chats) else "no"
    has_texts = ";" in family.verified
    return (
        name,
        ", ".join(_sizes(architecture, family)) or "?",
        "yes" if takes_images(architecture) else "no",
        formats or "no chats",
        reasons,
        _files(architecture),
        "logits, texts" if has_texts else "logits",
    )


def _sizes(architecture: str, family: Family) -> list[str]:
    """Return the sizes of the family's models, its example and its known shapes, the smallest first."""
    texts = [family.models, family.example.rpartition("/")[2], *_configs(architecture)]
    found = {
        size.upper().replace("X", "x")
        for text in texts
        for size in re.findall(rf"(?<![\w.]){_SIZE}(?!\w)", text, re.IGNORECASE)
    }
    return sorted(found, key=_num_of_size)


def _num_of_size(size: str) -> float:
    """Return the number of parameters in a size such as 8x7B."""
    times, _, each = size.partition("-")[0].removeprefix("E").rpartition("x")
    return int(times or 1) * float(each[:-1]) * (1e9 if each[-1] == "B" else 1e6)


def _files(architecture: str) -> str:
    has_gguf = any(entry.hf_class == architecture for entry in ARCHITECTURES.values())
    return "safetensors, GGUF" if has_gguf else "safetensors"


def _details(architecture: str, family: Family) -> Iterator[str]:
    yield family.models
    yield _line("config.json", architecture)
    yield _line("example", family.example)
    yield _line("verified", family.verified)
    names = [name for name, entry in ARCHITECTURES.items() if entry.hf_class == architecture]
    methods = ", ".join(method for method in METHODS if method != "gguf")
    yield _line("safetensors", f"plain, or quantized by {methods}")
    if names:
        yield _line("GGUF", f"general.architecture {', '.join(names)}")
        yield _line("", f"tensors in {', '.join(name for name, _, _ in ggml_types().values())}")
    yield _line("RoPE", ", ".join(get_args(RopeType)))
    yield _line("images", "by the image encoder among its files" if takes_images(architecture) else "none")
    yield _line("draft heads", f"{'in its checkpoints (--draft mtp), and ' * _brings_head(architecture, family)}EAGLE")
    for i, chat in enumerate(family.chats):
        reasons = ", reasoning" if chat.reasons else ""
        yield _line("" if i else "chat template", f"{chat.template}: tool calls ({chat.tools}){reasons}")
    if not family.chats:
        yield _line("chat template", "none")
    yield from _memory(architecture, family)


def _brings_head(architecture: str, family: Family) -> bool:
    """True if the family's checkpoints have a head that drafts tokens."""
    configs = (with_defaults({}, architecture), *_configs(architecture).values())
    has_layer = any(config.get("num_nextn_predict_layers") for config in configs)
    return has_layer or names_of(family.weight_map) is QWEN


def _memory(architecture: str, family: Family) -> Iterator[str]:
    """Report the GPU memory of each model with a known shape, with room for one context."""
    configs = {name: PUBLISHED[name] for name in _published(architecture)}
    if (config := _cached_config(family.example)) is not None:
        configs = {family.example: config, **configs}
    if not configs:
        yield _line("GPU memory", f"see `callboard inspect {family.example} --max-model-len {_CONTEXT}`")
        return
    specs = {name: load_spec(config)[0] for name, config in configs.items()}
    forms = _QUANTIZED_FORMS if any(spec.quantization for spec in specs.values()) else _FORMS
    rows: list[tuple[str, ...]] = [("GiB, with one context", "parameters", "context", *forms)]
    for name, spec in specs.items():
        context = min(_CONTEXT, spec.max_positions)
        sizes = (f"{_gpu_bytes(spec, form, context) / _GIB:.1f}" for form in forms)
        rows.append((name, f"{_num_parameters(spec):,}", str(context), *sizes))
    for i, line in enumerate(_columns(rows)):
        yield _line("" if i else "GPU memory", line)


def _cached_config(model: str) -> dict[str, object] | None:
    """Return the config.json of a hub model, or None unless the hub's cache has it."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, "config.json")
    return folder.model_config(Path(path).parent) if isinstance(path, str) else None


def _gpu_bytes(spec: DecoderSpec, form: str, context: int) -> int:
    """Return the bytes of an engine with room for one context: weights, KV cache, working memory and CUDA graphs."""
    import torch

    from runtime.kernels.numerics import Numerics
    from runtime.quant.at_load import quantized_at_load
    from runtime.worker.memory import plan_memory, planned_cache

    setting = {"its files": "auto", "bfloat16": "none"}.get(form, form)
    config = EngineConfig(quantization=setting, max_model_len=context).sized_for("cuda")  # type: ignore[arg-type]
    assert config.max_num_batched_tokens is not None
    numerics = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
    cache = planned_cache(config, spec, numerics)
    num_blocks = cache.most_blocks(context, config.block_size, config.max_num_batched_tokens) + 1
    config = replace(config, num_kv_blocks=num_blocks)
    plan = plan_memory(config, quantized_at_load(spec, config, "cuda"), numerics, available=1 << 62)
    return plan.weights + plan.kv + plan.working + plan.graphs


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}} {text}"
